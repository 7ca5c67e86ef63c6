from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import BadReward, score
from reward_calls import COLUMNS, COMPLETIONS, NAN, length, run, same


def exact(prompts: list[str], completions: list[str], answer: list[int], **kwargs: Any) -> list[bool]:
    assert prompts == [f"p{i}" for i in range(3)] and "prompt" not in kwargs
    return [len(text) == number for text, number in zip(completions, answer, strict=True)]


def partly(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [None, 3.0, None]


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

    line = rf"\(test_call.py:{alone.__code__.co_firstlineno + 2}\)"
    with pytest.raises(
        KvrlError, match=f"alone: raised RuntimeError: two lines {line} on a batch of 3, but on no single"
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
