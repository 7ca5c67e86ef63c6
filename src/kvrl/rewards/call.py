"""Calling reward functions with TRL's signature, and refusing what they must not return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.rewards.background import OverTime, is_async, result_of, run_sync, start_async
from kvrl.rewards.base import Reward

RewardFunc = Callable[..., Any]
"""func(prompts=list, completions=list[str], **columns: list) -> one float or None per completion; may be async."""

RESERVED = ("completions", "prompts", "self")
"""Names that a data set's column cannot have: a reward function gets its own arguments under them."""

OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's that there are none of here."""

MACHINERY = [Path(module).parent for module in (__file__, asyncio.__file__, concurrent.futures.__file__)]
"""Folders of what calls a function: their lines are not the user's."""

EXCERPT = 60  # characters of a prompt or an answer in a message


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
    """Rewards that on_error="drop" turned into None: NaN, infinities, exceptions and time limits passed."""
    first_error: str | None = None
    """The first of them: function, reason and sample."""

    def metrics(self) -> dict[str, float]:
        """Mean reward and mean of each function (absent where none was given), and the number of errors."""
        columns = {f"rewards/{name}/mean": self.per_function[:, i] for i, name in enumerate(self.names)}
        means = {
            name: float(values.nanmean())
            for name, values in {"reward": self.rewards, **columns}.items()
            if not values.isnan().all()
        }
        return means | {"reward_errors": float(self.errors)}

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Several batches of the same functions as one."""
        return cls(
            torch.cat([part.rewards for part in parts]), torch.cat([part.per_function for part in parts]),
            parts[0].names, sum(part.errors for part in parts),
            next((part.first_error for part in parts if part.first_error), None),
        )  # fmt: skip


class BadReward(Exception):
    """Why there is no reward for a sample. A function may put one in its list, and on_error then decides."""


def score(
    reward_funcs: Sequence[RewardFunc],
    weights: Sequence[float] | None,
    completions: list[str],
    columns: Mapping[str, list],
    on_error: Literal["stop", "drop"] = "stop",
    *,
    names: Sequence[str] | None = None,
    timeout: float | None = None,
    remedy: str = ", or set reward.on_error to drop",
) -> Scores:
    """Call every function once on the whole batch and sum what they return, weighted.

    weights: one per function, None = all 1. columns: the dataset's columns, each a list of
    len(completions); column "prompt" is passed as `prompts`, the others under their own names, as TRL does.
    Each function gets lists of its own. None from a function leaves that function out of the sample's sum; None from
    all of them drops the sample (NaN). Tensors, arrays, generators and booleans are taken as numbers, texts are not.
    Async functions run together, while the others run one after another. names: what the functions are called in
    metrics and messages, None = their own names. remedy: what messages advise besides mending the function.

    A NaN, an infinity, a value that is no number, a BadReward or an exception stops with a KvrlError that names
    function, sample and prompt; with on_error="drop" it counts as None. To name the sample, a function that
    raised is called again with one sample at a time; if no single sample raises, the whole batch counts as
    bad. So does a batch that takes longer than `timeout` seconds: an async function is then cancelled, another, or one
    that blocks its event loop, is left to itself in its thread. A result that is no list or has the wrong length, a
    function that cannot take the arguments and a KvrlError from the function always stop.
    """
    if weights is not None and len(weights) != len(reward_funcs):
        raise KvrlError(
            f"reward.weights: {len(weights)} weights for {len(reward_funcs)} reward functions; give one each"
        )
    names = unique_names([_own_name(func) for func in reward_funcs] if names is None else names)
    arguments = {"completions": completions} | arguments_of(columns)
    for func, name in zip(reward_funcs, names, strict=True):
        check_arguments(func, name, arguments)
    with ExitStack() as started:
        waits = [
            _begin(func, name, arguments, timeout, started) for func, name in zip(reward_funcs, names, strict=True)
        ]
        results = {
            i: _collect(reward_funcs[i], names[i], arguments, waits[i], on_error, timeout, remedy)
            for i in sorted(range(len(names)), key=lambda i: is_async(reward_funcs[i]))  # which run meanwhile
        }
    per_function = torch.tensor([results[i][0] for i in range(len(names))], dtype=torch.float64).T  # [N, F]
    scale = torch.tensor([1.0] * len(names) if weights is None else list(weights), dtype=torch.float64)  # [F]
    rewards = (per_function * scale).nansum(-1)  # [N]
    rewards[per_function.isnan().all(-1)] = torch.nan
    if bool((over := rewards.float().isinf()).any()):
        i = int(over.nonzero()[0])
        raise KvrlError(f"reward: {float(rewards[i]):.3g} for sample {i} is over what float32 holds; scale it down")
    dropped = [results[i][1] for i in range(len(names))]
    first = next((errors[0] for errors in dropped if errors), None)
    return Scores(rewards.float(), per_function.float(), names, sum(map(len, dropped)), first)


def arguments_of(columns: Mapping[str, list]) -> dict[str, list]:
    """Columns under the names that reward functions get them by. Errors: KvrlError for a reserved name."""
    for name in RESERVED:
        if name in columns:
            raise KvrlError(
                f"column {name}: the data set has it, but reward functions get {name} from the sampler; "
                "rename the column"
            )
    return {("prompts" if name == "prompt" else name): values for name, values in columns.items()}


def check_arguments(func: RewardFunc, name: str, arguments: Iterable[str]) -> None:
    """Raise KvrlError if `func` cannot be called with arguments of these names."""
    given = list(arguments)
    signature = signature_of(func.__call__ if isinstance(func, Reward) else func, name)
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in signature.parameters.values() if p.kind in keyword and p.default is p.empty]
    needed += func.columns if isinstance(func, Reward) else ()
    for column in needed:
        if column in OF_TRL:
            raise KvrlError(
                f"reward.funcs.{name}: needs {column}, which TRL passes and kvrl does not; take completions, prompts "
                "and the data's columns"
            )
        if column not in given:
            has = ", ".join(column for column in given if column != "completions") or "none"
            remedy = "say in its params which one it reads" if isinstance(func, Reward) else "rename its argument"
            raise KvrlError(f"reward.funcs.{name}: needs column {column}, and the data has {has}; {remedy}, or rename "
                            "the column")  # fmt: skip
    for param in func.keywords if isinstance(func, functools.partial) else ():
        if param in given:
            raise KvrlError(f"reward.funcs.{name}.params.{param}: the data has a column of that name; rename one")
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        raise KvrlError(
            f"reward.funcs.{name}: cannot be called with {', '.join(given)} ({error}); "
            "name the columns it needs and accept the others with **kwargs"
        ) from error


def signature_of(func: RewardFunc, name: str) -> inspect.Signature:
    """The arguments that `func` takes. Errors: KvrlError for one that does not tell them, such as `max`."""
    try:
        return inspect.signature(func)
    except ValueError as error:
        raise KvrlError(f"reward.funcs.{name}: does not tell its arguments ({error}); call it from a function of "
                        "your own") from error  # fmt: skip


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with the place in the list where two are the same."""
    return [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]


def _own_name(func: RewardFunc) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _begin(
    func: RewardFunc, name: str, arguments: Mapping[str, list], limit: float | None, started: ExitStack
) -> Callable[[], list]:
    """A call that gives the function's answers. An async one runs from now on, and is cancelled with `started`."""
    own = {key: list(values) for key, values in arguments.items()}  # a function may sort its arguments, or pop them
    size = len(own["completions"])
    if not is_async(func):
        return lambda: run_sync(lambda: _listed(func(**own), name, size), limit)

    async def call() -> list:
        with _blamed():  # here, because a SystemExit would end the event loop
            return _listed(await func(**own), name, size)

    end = None if limit is None else time.monotonic() + limit
    future = start_async(call(), limit)
    started.callback(future.cancel)
    return lambda: result_of(future, end)


def _collect(
    func: RewardFunc, name: str, arguments: Mapping[str, list], wait: Callable[[], Any], on_error: str,
    timeout: float | None, remedy: str,
) -> tuple[list[float], list[str]]:  # fmt: skip
    """One function's results: a number per completion, NaN for None, and the errors that were dropped."""
    size = len(arguments["completions"])
    try:
        with _blamed():
            answers = wait()
    except OverTime:
        answers = [BadReward(f"took over {timeout:g} s")] * size
        if on_error == "stop":
            raise KvrlError(
                f"reward.funcs.{name}: took over {timeout:g} s for a batch of {size}; mend the function, raise "
                f"reward.timeout{remedy}"
            ) from None
    except BadReward as bad:
        answers = _one_by_one(func, name, arguments, timeout)
        if not any(isinstance(answer, BadReward) for answer in answers):
            answers = [bad] * size
            if on_error == "stop":
                raise KvrlError(
                    f"reward.funcs.{name}: {bad} on a batch of {size}, but on no single sample of it; mend "
                    f"the function{remedy}"
                ) from bad.__cause__
    values: list[float] = []
    failed: list[str] = []
    for i, answer in enumerate(answers):
        number = _number(answer)
        if not isinstance(number, BadReward):
            values.append(number)
            continue
        what = f"reward.funcs.{name}: {number} for sample {i} (prompt {_excerpt(arguments, i)})"
        if on_error == "stop":
            mend = "mend the function, or return" if number.__cause__ else "return a finite number, or"
            raise KvrlError(f"{what}; {mend} None to drop the sample{remedy}") from number.__cause__
        values.append(math.nan)
        failed.append(what)
    return values, failed


@contextmanager
def _blamed() -> Iterator[None]:
    """Make a BadReward of what a user's function raises: anything, also by `sys.exit()`."""
    try:
        yield
    except (OverTime, KvrlError, BadReward):
        raise
    except (Exception, SystemExit) as error:
        text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise BadReward(f"{text}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """The user's line that an exception passed through first; nothing where the call itself failed."""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.parent not in MACHINERY:
            return f" ({file.name}:{frame.lineno})"
    return ""


def _listed(answers: Any, name: str, size: int) -> list:
    """What a function returned, as a list: a generator does its work here. Errors: KvrlError for no list of `size`."""
    try:
        each = iter(answers)
    except TypeError:
        each = None
    if each is None or isinstance(answers, str | bytes | Mapping | Set):
        raise KvrlError(f"reward.funcs.{name}: returned {type(answers).__name__}; return a list of {size} numbers")
    answers = list(each)
    if len(answers) != size:
        raise KvrlError(
            f"reward.funcs.{name}: returned {len(answers)} rewards for {size} completions; return one for "
            "each (None to drop a sample)"
        )
    return answers


def _one_by_one(func: RewardFunc, name: str, arguments: Mapping[str, list], timeout: float | None) -> list:
    """Each sample's answer alone, or the BadReward that it raised; all of them together within `timeout`."""
    start = time.monotonic()
    answers: list[Any] = []
    for i in range(len(arguments["completions"])):
        left = None if timeout is None else max(0.0, start + timeout - time.monotonic())
        try:
            if left == 0.0:
                raise OverTime
            with ExitStack() as started, _blamed():
                one = {key: [values[i]] for key, values in arguments.items()}
                answers += _begin(func, name, one, left, started)()
        except OverTime:
            answers.append(BadReward(f"took over {timeout:g} s"))
        except BadReward as bad:
            answers.append(bad)
    return answers


def _number(answer: Any) -> float | BadReward:
    """The answer as a number, NaN for None; a BadReward for anything that is no finite number."""
    if answer is None:
        return math.nan
    if isinstance(answer, BadReward):
        return answer
    if isinstance(answer, str | bytes):
        return BadReward(f"returned the text {_cut(repr(answer))}")
    try:
        number = float(answer)
    except Exception as error:  # of a user's object
        return BadReward(f"returned {type(answer).__name__} ({' '.join(str(error).split())})")
    return number if math.isfinite(number) else BadReward(f"returned {number}")


def _excerpt(arguments: Mapping[str, list], i: int) -> str:
    """The start of a prompt, on one line."""
    if "prompts" not in arguments:
        return "not given"
    return _cut(repr(arguments["prompts"][i]))


def _cut(text: str) -> str:
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
