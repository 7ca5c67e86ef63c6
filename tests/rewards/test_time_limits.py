"""Async functions beside the others, and what becomes of a function whose time is up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvrl.errors import KvrlError
from reward_calls import NAN, length, run, same


def test_async_functions_run_together_and_beside_the_others() -> None:
    order = []
    met = threading.Event()

    async def first(completions: list[str], **kwargs: Any) -> list[float]:
        order.append("first")
        while "second" not in order or not met.is_set():  # ends only if the other two run meanwhile
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def second(completions: list[str], **kwargs: Any) -> list[float]:
        while "first" not in order:
            await asyncio.sleep(0)
        order.append("second")
        return [10.0] * len(completions)

    def third(completions: list[str], **kwargs: Any) -> list[float]:
        met.set()
        return [100.0] * len(completions)

    scores = run(first, third, second, timeout=20)
    same(scores.rewards, [111.0] * 3)
    assert scores.names == ["first", "third", "second"]


def test_an_object_with_an_async_call_and_one_loop_for_all_batches() -> None:
    loops = []

    class Remote:
        async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            loops.append(asyncio.get_running_loop())
            return [2.0] * len(completions)

    for _ in range(2):
        same(run(Remote()).rewards, [2.0] * 3)
    assert loops[0] is loops[1]


def test_score_inside_a_running_event_loop() -> None:
    async def remote(completions: list[str], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)

    async def notebook() -> Any:
        return run(remote)

    same(asyncio.run(notebook()).rewards, [2.0] * 3)


def test_an_exception_of_an_async_function_names_its_sample() -> None:
    async def fragile(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        return [1 / (number - 2) for number in answer]

    with pytest.raises(KvrlError, match=r"fragile: raised ZeroDivisionError: .* for sample 1 \(prompt 'p1'\)"):
        run(fragile)
    same(run(fragile, on_error="drop").rewards, [-1.0, NAN, 0.5])


def test_an_async_function_over_time_is_cancelled() -> None:
    ended = threading.Event()

    async def slow(completions: list[str], **kwargs: Any) -> list[float]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    with pytest.raises(KvrlError, match=r"slow: took over 0.05 s for a batch of 3; .*raise reward\.timeout"):
        run(slow, timeout=0.05)
    assert ended.wait(10)
    scores = run(length, slow, timeout=0.05, on_error="drop")
    same(scores.per_function, [[1.0, NAN], [2.0, NAN], [3.0, NAN]])
    assert scores.errors == 3


def test_a_sync_function_over_time_is_abandoned() -> None:
    release, threads = threading.Event(), []

    def slow(completions: list[str], **kwargs: Any) -> list[float]:
        threads.append(threading.current_thread())
        release.wait(20)
        return [1.0] * len(completions)

    with pytest.raises(KvrlError, match="slow: took over 0.05 s for a batch of 3"):
        run(slow, timeout=0.05)
    same(run(slow, timeout=0.05, on_error="drop").rewards, [NAN] * 3)
    assert len(threads) == 2 and all(thread.daemon for thread in threads)
    release.set()
    same(run(slow, timeout=20).rewards, [1.0] * 3)
    run(slow)
    assert threads[-1] is threading.main_thread()


def test_a_generator_does_its_work_within_the_limit() -> None:
    release = threading.Event()

    def slow(completions: list[str], **kwargs: Any) -> Iterator[float]:
        for _ in completions:
            release.wait(20)
            yield 1.0

    with pytest.raises(KvrlError, match="slow: took over 0.05 s for a batch of 3"):
        run(slow, timeout=0.05)
    release.set()
    same(run(slow, timeout=20).rewards, [1.0] * 3)


def test_an_async_function_that_blocks_its_event_loop_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrl.rewards.background.GRACE", 0.05)
    release = threading.Event()

    async def blocking(completions: list[str], **kwargs: Any) -> list[float]:
        release.wait(20)
        return [1.0] * len(completions)

    async def remote(completions: list[str], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)

    start = time.monotonic()
    with pytest.raises(KvrlError, match="blocking: took over 0.05 s for a batch of 3"):
        run(blocking, timeout=0.05)
    same(run(length, blocking, timeout=0.05, on_error="drop").rewards, [1.0, 2.0, 3.0])
    assert time.monotonic() - start < 10
    same(run(remote).rewards, [2.0] * 3)  # on another loop
    release.set()


def test_the_function_s_own_timeout_is_an_exception_like_any_other() -> None:
    def sync(completions: list[str], **kwargs: Any) -> list[float]:
        raise TimeoutError("socket")

    async def remote(completions: list[str], **kwargs: Any) -> list[float]:
        raise asyncio.TimeoutError("socket")

    for func in (sync, remote):
        with pytest.raises(KvrlError, match=r"raised TimeoutError: socket \(test_time_limits.py:\d+\) for sample 0"):
            run(func, timeout=20)


def test_samples_called_alone_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("kvrl.rewards.call.time.monotonic", lambda: clock[0])

    def slow(completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        if completions == ["ccc"]:  # nothing is left for it
            threading.Event().wait(5)
        clock[0] += 30.0
        return [5.0]

    scores = run(slow, timeout=50.0, on_error="drop")
    same(scores.rewards, [5.0, 5.0, NAN])
    assert scores.errors == 1


def test_another_function_s_stop_cancels_what_is_under_way() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def endless(completions: list[str], **kwargs: Any) -> list[float]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    def down(completions: list[str], **kwargs: Any) -> list[float]:
        assert started.wait(10)
        raise KvrlError("down")

    with pytest.raises(KvrlError, match="^down$"):
        run(down, endless)
    assert cancelled.wait(10)
