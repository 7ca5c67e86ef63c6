"""Running a reward function beside the main thread: async ones on one event loop, sync ones under a time limit."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

GRACE = 1.0  # seconds after its limit in which a loop that is not blocked has cancelled a call


class OverTime(Exception):
    """A call did not end within its limit."""


def is_async(func: Callable[..., Any]) -> bool:
    """Whether calling `func` gives a coroutine: an async function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


def start_async(coroutine: Coroutine[Any, Any, T], limit: float | None) -> Future[T]:
    """Start a coroutine and return at once; after `limit` seconds it is cancelled and the future raises OverTime."""
    return asyncio.run_coroutine_threadsafe(_limited(coroutine, limit), _loop())


def result_of(future: Future[T], end: float | None) -> T:
    """What `start_async` gives, by the monotonic time `end`.

    A call that blocks the event loop cannot be cancelled: it is left alone with its loop, and later calls get another.
    """
    if end is not None and not wait([future], max(0.0, end + GRACE - time.monotonic())).done:
        _loop.cache_clear()
        raise OverTime
    return future.result()


def run_sync(call: Callable[[], T], limit: float | None) -> T:
    """`call()`, in this thread if there is no limit. Else in a thread that OverTime abandons: it cannot be stopped."""
    if limit is None:
        return call()
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # whatever it is, it belongs to the caller's thread
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([future], limit).done:
        raise OverTime
    return future.result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole process: a client that an async function keeps between batches is bound to its loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="kvrl-rewards").start()
    return loop


async def _limited(coroutine: Coroutine[Any, Any, T], limit: float | None) -> T:
    # not asyncio.wait_for: its TimeoutError could not be told from one that the function raised
    task = asyncio.ensure_future(coroutine)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit)
        if not done:
            raise OverTime
        return task.result()
    finally:
        task.cancel()
