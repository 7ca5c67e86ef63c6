from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import BadReward, score
from kvrl.rewards.build import Rewards

COMPLETIONS = ["a", "bb", "ccc"]
COLUMNS = {"prompt": ["p0", "p1", "p2"], "answer": [1, 2, 4]}
NAN = math.nan


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def exact(prompts: list[str], completions: list[str], answer: list[int], **kwargs: Any) -> list[bool]:
    assert prompts == [f"p{i}" for i in range(3)] and "prompt" not in kwargs
    return [len(text) == number for text, number in zip(completions, answer, strict=True)]


def partly(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None, 3.0, None]


def run(*funcs: Any, weights: list[float] | None = None, **changes: Any):
    return score(list(funcs), weights, COMPLETIONS, COLUMNS, **changes)


def same(values: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(values, torch.tensor(expected), equal_nan=True)


def test_weighted_sum_over_functions() -> None:
    scores = run(length, exact, weights=[0.5, 2.0])
    same(scores.rewards, [0.5 + 2.0, 1.0 + 2.0, 1.5])
    same(scores.per_function, [[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]])
    assert scores.metrics() == pytest.approx(
        {
            "reward": 7.0 / 3,
            "rewards/length/mean": 2.0,
            "rewards/exact/mean": 2 / 3,
            "reward_errors": 0.0,
        }
    )


def test_none_leaves_the_function_out_and_all_none_drops_the_sample() -> None:
    same(run(partly).rewards, [NAN, 3.0, NAN])
    scores = run(partly, length)
    same(scores.rewards, [1.0, 5.0, 3.0])
    assert scores.metrics()["rewards/partly/mean"] == 3.0
    assert scores.errors == 0


def test_a_function_that_gave_nothing_has_no_mean() -> None:
    def nothing(completions: list[str], **kwargs: Any) -> list[None]:
        return [None] * len(completions)

    assert run(nothing).metrics() == {"reward_errors": 0.0}


class Odd:
    def __float__(self) -> float:
        return 1 / 0


@pytest.mark.parametrize(
    "value", [NAN, math.inf, -math.inf, "high", "0.5", b"1", pytest.param(10**5000, id="int"), 1j, torch.ones(2), Odd()]
)
@pytest.mark.parametrize("weights", [None, [0.0]])
def test_a_value_that_is_no_finite_number(value: Any, weights: list[float] | None) -> None:
    def odd(completions: list[str], **kwargs: Any) -> list[Any]:
        return [1.0, value, 2.0]

    with pytest.raises(KvrlError, match=r"reward\.funcs\.odd: returned .* for sample 1 \(prompt 'p1'\)") as stopped:
        run(odd, weights=weights)
    assert "\n" not in str(stopped.value)
    scores = run(odd, on_error="drop")
    same(scores.rewards, [1.0, NAN, 2.0])
    assert scores.errors == 1 and scores.metrics()["reward_errors"] == 1.0


def test_an_exception_names_its_sample() -> None:
    def fragile(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        return [1 / (number - 2) for number in answer]

    with pytest.raises(
        KvrlError, match=r"fragile: raised ZeroDivisionError: .* for sample 1 \(prompt 'p1'\)"
    ) as stopped:
        run(fragile)
    assert isinstance(stopped.value.__cause__, ZeroDivisionError)
    line = fragile.__code__.co_firstlineno + 1
    assert f"(test_call.py:{line}) for sample 1" in str(stopped.value)
    assert "mend the function, or return None to drop the sample, or set reward.on_error" in str(stopped.value)
    scores = run(fragile, length, on_error="drop")
    assert scores.first_error == str(stopped.value).partition(";")[0] and run(length).first_error is None
    same(scores.per_function, [[-1.0, 1.0], [NAN, 2.0], [0.5, 3.0]])
    same(scores.rewards, [0.0, 2.0, 3.5])
    assert scores.errors == 1


def test_an_exception_of_the_whole_batch() -> None:
    def alone(completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("two\nlines")
        return [1.0]

    with pytest.raises(
        KvrlError, match=r"alone: raised RuntimeError: two lines \(test_call.*\) on a batch of 3, but on no"
    ):
        run(alone)
    scores = run(alone, on_error="drop")
    same(scores.rewards, [NAN, NAN, NAN])
    assert scores.errors == 3


@pytest.mark.parametrize("on_error", ["stop", "drop"])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, 2.0], "short: returned 2 rewards for 3 completions"),
        ([1.0] * 4, "short: returned 4 rewards for 3 completions"),
        (None, "short: returned NoneType; return a list of 3 numbers"),
        (1.0, "short: returned float; return a list of 3 numbers"),
        ("123", "short: returned str; return a list of 3 numbers"),
        (b"123", "short: returned bytes; return a list of 3 numbers"),
        ({0: 1, 1: 2, 2: 3}, "short: returned dict; return a list of 3 numbers"),
        ({1, 2, 3}, "short: returned set; return a list of 3 numbers"),
        (torch.tensor(1.0), "short: returned Tensor; return a list of 3 numbers"),
    ],
)
def test_a_result_of_the_wrong_length_always_stops(answer: Any, message: str, on_error: Any) -> None:
    def short(completions: list[str], **kwargs: Any) -> Any:
        return answer

    with pytest.raises(KvrlError, match=message):
        run(short, on_error=on_error)


@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_function_that_cannot_take_the_columns_always_stops(on_error: Any) -> None:
    def narrow(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(KvrlError, match="narrow: cannot be called with completions, prompts, answer"):
        run(narrow, on_error=on_error)
    with pytest.raises(KvrlError, match="max: does not tell its arguments"):
        run(max, on_error=on_error)


def test_what_trl_alone_passes_is_said_to_be_missing() -> None:
    def of_trl(completions: list[str], completion_ids: list, **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(KvrlError, match="of_trl: needs completion_ids, which TRL passes and kvrl does not; take"):
        run(of_trl)


def test_the_first_error_that_is_dropped_is_told_once() -> None:
    def odd(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0, NAN, NAN]

    rewards = Rewards([length, odd], ["length", "odd"], [1.0, 1.0], on_error="drop")
    with pytest.warns(UserWarning) as told:
        assert rewards(COMPLETIONS, COLUMNS).errors == rewards(COMPLETIONS, COLUMNS).errors == 2
    assert len(told) == 1
    assert str(told[0].message).startswith("reward.funcs.odd: returned nan for sample 1 (prompt 'p1'); counted as None")


@pytest.mark.parametrize(
    "answer", [(1, 2, 0), [True, np.float32(2), torch.zeros(1)], np.array([1, 2, 0]), {1: 1, 2: 2, 3: 0}.values()]
)
def test_what_counts_as_a_list_of_numbers(answer: Any) -> None:
    same(run(lambda completions, **_: answer).rewards, [1.0, 2.0, 0.0])


def test_each_function_has_lists_of_its_own() -> None:
    def greedy(completions: list[str], prompts: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        completions.sort(reverse=True)
        prompts.clear()
        return [float(answer.pop()) for _ in completions]

    scores = run(greedy, exact, length)
    same(scores.per_function, [[4.0, 1.0, 1.0], [2.0, 1.0, 2.0], [1.0, 0.0, 3.0]])
    assert COMPLETIONS == ["a", "bb", "ccc"] and COLUMNS["answer"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("error", "message"),
    [(len, "raised TypeError: object of type 'int' has no len"), (sys.exit, "raised SystemExit: 2")],
)
@pytest.mark.parametrize("timeout", [None, 20])
def test_whatever_a_function_raises_is_its_sample_s(error: Any, message: str, timeout: float | None) -> None:
    def plain(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        return [error(number) if number == 2 else 1.0 for number in answer]

    def generator(completions: list[str], answer: list[int], **kwargs: Any) -> Iterator[float]:
        yield from plain(completions, answer)

    async def remote(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
        return plain(completions, answer)

    for func in (plain, generator, remote):
        with pytest.raises(KvrlError, match=rf"{func.__name__}: {message}.* for sample 1 \(prompt 'p1'\)"):
            run(func, timeout=timeout)
        same(run(func, on_error="drop", timeout=timeout).rewards, [1.0, NAN, 1.0])


def test_tensors_count_as_numbers_and_long_prompts_are_cut() -> None:
    def tensor(completions: list[str], **kwargs: Any) -> torch.Tensor:
        return torch.tensor([0.5, NAN, 1.0])

    columns = {"prompt": ["x", [{"role": "user", "content": "y\n" * 100}], "z"]}
    with pytest.raises(KvrlError, match=r"prompt \[\{'role': 'user', .{20,}\.\.\.\)") as stopped:
        score([tensor], None, COMPLETIONS, columns)
    assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 300


def test_functions_of_one_name_keep_their_own_means() -> None:
    class Judge:
        def __init__(self, value: float) -> None:
            self.value = value

        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [self.value] * len(completions)

    metrics = run(Judge(1.0), Judge(2.0)).metrics()
    assert metrics["rewards/Judge_0/mean"] == 1.0 and metrics["rewards/Judge_1/mean"] == 2.0


def test_weights_must_match_the_functions() -> None:
    with pytest.raises(KvrlError, match="reward.weights: 1 weights for 2 reward functions"):
        run(length, exact, weights=[1.0])


@pytest.mark.parametrize("name", ["completions", "prompts", "self"])
def test_a_column_cannot_replace_what_the_sampler_gives(name):
    with pytest.raises(KvrlError, match=f"column {name}: .*rename the column"):
        score([lambda completions, **_: [1.0]], None, ["a"], {"prompt": ["p"], name: ["x"]})


def test_bad_reward_gives_the_reason_and_on_error_decides() -> None:
    def picky(completions: list[str], **kwargs: Any) -> list[Any]:
        return [1.0, BadReward("saw nothing"), 2.0]

    with pytest.raises(KvrlError, match=r"reward\.funcs\.picky: saw nothing for sample 1 \(prompt 'p1'\)"):
        run(picky)
    scores = run(picky, on_error="drop")
    same(scores.rewards, [1.0, NAN, 2.0])
    assert scores.errors == 1


@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_kvrl_error_of_the_function_always_stops_and_is_not_retried(on_error: Any) -> None:
    calls = []

    def down(completions: list[str], **kwargs: Any) -> list[float]:
        calls.append(completions)
        raise KvrlError("server: is down; start it")

    with pytest.raises(KvrlError, match="^server: is down; start it$"):
        run(down, on_error=on_error)
    assert calls == [COMPLETIONS]


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
        with pytest.raises(KvrlError, match=r"raised TimeoutError: socket \(test_call.py:\d+\) for sample 0"):
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


@pytest.mark.parametrize("on_error", ["stop", "drop"])
def test_a_missing_column_is_named_before_any_function_is_called(on_error: Any) -> None:
    called = []

    def first(completions: list[str], **kwargs: Any) -> list[float]:
        called.append(1)
        return [1.0] * 3

    def needy(completions: list[str], solution: list, **kwargs: Any) -> list[float]:
        return [1.0] * 3

    with pytest.raises(
        KvrlError, match=r"reward\.funcs\.needy: needs column solution, and the data has prompts, answer;"
    ):
        run(first, needy, on_error=on_error)
    assert not called


def test_given_names_replace_the_functions_own() -> None:
    assert run(length, length, names=["x", "y"]).names == ["x", "y"]
    assert run(length, length, names=["x", "x"]).names == ["x_0", "x_1"]
