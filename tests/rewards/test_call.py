from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import score

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


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, "high"])
@pytest.mark.parametrize("weights", [None, [0.0]])
def test_a_value_that_is_no_finite_number(value: Any, weights: list[float] | None) -> None:
    def odd(completions: list[str], **kwargs: Any) -> list[Any]:
        return [1.0, value, 2.0]

    with pytest.raises(KvrlError, match=r"reward_funcs\.odd: returned .* for sample 1 \(prompt 'p1'\)") as stopped:
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
    scores = run(fragile, length, on_error="drop")
    same(scores.per_function, [[-1.0, 1.0], [NAN, 2.0], [0.5, 3.0]])
    same(scores.rewards, [0.0, 2.0, 3.5])
    assert scores.errors == 1


def test_an_exception_of_the_whole_batch() -> None:
    def alone(completions: list[str], **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("two\nlines")
        return [1.0]

    with pytest.raises(KvrlError, match="alone: raised RuntimeError: two lines on a batch of 3, but on no single"):
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
    with pytest.raises(KvrlError, match="reward_weights: 1 weights for 2 reward functions"):
        run(length, exact, weights=[1.0])


@pytest.mark.parametrize("name", ["completions", "prompts", "self"])
def test_a_column_cannot_replace_what_the_sampler_gives(name):
    with pytest.raises(KvrlError, match=f"column {name}: .*rename the column"):
        score([lambda completions, **_: [1.0]], None, ["a"], {"prompt": ["p"], name: ["x"]})
