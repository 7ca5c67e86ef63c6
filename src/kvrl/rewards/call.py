"""Calling reward functions with TRL's signature, and refusing what they must not return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvrl.errors import KvrlError

RewardFunc = Callable[..., Any]
"""func(prompts=list, completions=list[str], **columns: list) -> one float or None per completion."""

RESERVED = ("completions", "prompts", "self")
"""Names that a data set's column cannot have: a reward function gets its own arguments under them."""

EXCERPT = 60  # characters of a prompt in a message


@dataclass(frozen=True)
class Scores:
    """Rewards of N completions under F functions."""

    rewards: Tensor
    """[N] float32, the weighted sum; NaN = dropped, because no function gave a reward."""
    per_function: Tensor
    """[N, F] float32, unweighted; NaN where the function gave none."""
    names: list[str]
    """[F], the functions' names, made unique."""
    errors: int
    """Rewards that on_error="drop" turned into None: NaN, infinities and exceptions."""

    def metrics(self) -> dict[str, float]:
        """Mean reward and mean of each function (absent where none was given), and the number of errors."""
        columns = {f"rewards/{name}/mean": self.per_function[:, i] for i, name in enumerate(self.names)}
        means = {
            name: float(values.nanmean())
            for name, values in {"reward": self.rewards, **columns}.items()
            if not values.isnan().all()
        }
        return means | {"reward_errors": float(self.errors)}


class _BadReward(Exception):
    """What a function did instead of giving a reward."""


def score(
    reward_funcs: Sequence[RewardFunc],
    weights: Sequence[float] | None,
    completions: list[str],
    columns: Mapping[str, list],
    on_error: Literal["stop", "drop"] = "stop",
) -> Scores:
    """Call every function once on the whole batch and sum what they return, weighted.

    weights: one per function, None = all 1. columns: the dataset's columns, each a list of
    len(completions); column "prompt" is passed as `prompts`, the others under their own names, as TRL does.
    None from a function leaves that function out of the sample's sum; None from all of them drops the
    sample (NaN). Tensors, arrays and booleans are taken as numbers.

    A NaN, an infinity, a value that is no number, or an exception stops with a KvrlError that names
    function, sample and prompt; with on_error="drop" it counts as None. To name the sample, a function that
    raised is called again with one sample at a time; if no single sample raises, the whole batch counts as
    bad. A result of the wrong length and a function that cannot take the arguments always stop.
    """
    if weights is not None and len(weights) != len(reward_funcs):
        raise KvrlError(
            f"reward_weights: {len(weights)} weights for {len(reward_funcs)} reward functions; give one each"
        )
    for name in RESERVED:
        if name in columns:
            raise KvrlError(
                f"column {name}: the data set has it, but reward functions get {name} from the sampler; "
                "rename the column"
            )
    arguments = {"completions": completions} | {
        ("prompts" if name == "prompt" else name): values for name, values in columns.items()
    }
    names = _unique_names(reward_funcs)
    errors = 0
    results: list[list[float]] = []
    for func, name in zip(reward_funcs, names, strict=True):
        values, failed = _call(func, name, arguments, on_error)
        results.append(values)
        errors += failed
    per_function = torch.tensor(results, dtype=torch.float64).T  # [N, F]
    scale = torch.tensor([1.0] * len(names) if weights is None else list(weights), dtype=torch.float64)  # [F]
    rewards = (per_function * scale).nansum(-1)  # [N]
    rewards[per_function.isnan().all(-1)] = torch.nan
    return Scores(rewards.float(), per_function.float(), names, errors)


def _call(func: RewardFunc, name: str, arguments: dict[str, list], on_error: str) -> tuple[list[float], int]:
    """One function on the batch: a number per completion, NaN for None, and how many errors were dropped."""
    try:
        inspect.signature(func).bind(**arguments)
    except TypeError as error:
        raise KvrlError(
            f"reward_funcs.{name}: cannot be called with {', '.join(arguments)} ({error}); "
            "name the columns it needs and accept the others with **kwargs"
        ) from error
    size = len(arguments["completions"])
    values: list[float] = []
    failed = 0
    try:
        answers = _answers(func, name, arguments, size)
    except _BadReward as bad:
        answers = [_single(func, name, arguments, i) for i in range(size)]
        if not any(isinstance(answer, _BadReward) for answer in answers):
            answers = [bad] * size
            if on_error == "stop":
                raise KvrlError(
                    f"reward_funcs.{name}: {bad} on a batch of {size}, but on no single sample of it; mend "
                    "the function, or set on_error to drop"
                ) from bad.__cause__
    for i, answer in enumerate(answers):
        number = _number(answer)
        if not isinstance(number, _BadReward):
            values.append(number)
        elif on_error == "drop":
            values.append(math.nan)
            failed += 1
        else:
            raise KvrlError(
                f"reward_funcs.{name}: {number} for sample {i} (prompt {_excerpt(arguments, i)}); return a "
                "finite number, or None to drop the sample, or set on_error to drop"
            ) from number.__cause__
    return values, failed


def _answers(func: RewardFunc, name: str, arguments: dict[str, list], size: int) -> list:
    """What the function returned, as a list of the right length; _BadReward if it raised."""
    try:
        answers = func(**arguments)
    except Exception as error:  # a user's function may raise anything
        bad = _BadReward(f"raised {type(error).__name__}: {' '.join(str(error).split())}")
        raise bad from error
    try:
        answers = list(answers)
    except TypeError as error:
        raise KvrlError(
            f"reward_funcs.{name}: returned {type(answers).__name__}; return a list of {size} numbers"
        ) from error
    if len(answers) != size:
        raise KvrlError(
            f"reward_funcs.{name}: returned {len(answers)} rewards for {size} completions; return one for "
            "each (None to drop a sample)"
        )
    return answers


def _single(func: RewardFunc, name: str, arguments: dict[str, list], i: int) -> Any:
    """The answer for sample i alone, or the _BadReward that it raised."""
    try:
        return _answers(func, name, {key: [values[i]] for key, values in arguments.items()}, 1)[0]
    except _BadReward as bad:
        return bad


def _number(answer: Any) -> float | _BadReward:
    """The answer as a number, NaN for None; a _BadReward for anything that is no finite number."""
    if answer is None:
        return math.nan
    if isinstance(answer, _BadReward):
        return answer
    try:
        number = float(answer)
    except (TypeError, ValueError):
        return _BadReward(f"returned {answer!r}")
    return number if math.isfinite(number) else _BadReward(f"returned {number}")


def _excerpt(arguments: dict[str, list], i: int) -> str:
    """The start of a prompt, on one line."""
    if "prompts" not in arguments:
        return "not given"
    text = repr(arguments["prompts"][i])
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def _unique_names(funcs: Sequence[RewardFunc]) -> list[str]:
    """Each function's own name, with its place in the list where two share one."""
    names = [getattr(func, "__name__", type(func).__name__) for func in funcs]
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
