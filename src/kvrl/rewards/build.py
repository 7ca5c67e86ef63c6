"""From the reward section of a configuration to what scores a batch."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvrl.errors import KvrlError
from kvrl.rewards import get_reward
from kvrl.rewards.base import Reward
from kvrl.rewards.call import RewardFunc, Scores, arguments_of, check_arguments, score, signature_of, unique_names
from kvrl.rewards.config import RewardEntry, RewardSettings
from kvrl.rewards.judge import Judge

if TYPE_CHECKING:
    from kvrl.tasks import Task

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rewards:
    """The functions of a run, ready to be called."""

    funcs: list[RewardFunc]
    names: list[str]
    """[F], as in metrics: the registry's or the functions' own, made unique."""
    weights: list[float]
    on_error: Literal["stop", "drop"] = "stop"
    timeout: float | None = None
    told: list[str] = field(default_factory=list)
    """The first error that was dropped, once it was."""

    def __call__(self, completions: list[str], columns: Mapping[str, list]) -> Scores:
        """Score a batch; see `kvrl.rewards.score`. Warns of the first error that on_error="drop" makes nothing of."""
        scores = score(self.funcs, self.weights, completions, columns, self.on_error,
                       names=self.names, timeout=self.timeout)  # fmt: skip
        if scores.first_error is not None and not self.told:
            self.told.append(scores.first_error)
            warnings.warn(
                f"{scores.first_error}; counted as None, as reward.on_error is drop. Further ones are counted alone "
                "(reward_errors)",
                stacklevel=2,
            )
        return scores

    def check(self, columns: Mapping[str, list]) -> None:
        """Raise KvrlError if rows of such columns cannot be scored: for the first rows, before any rollout."""
        arguments = arguments_of(columns)
        for func, name in zip(self.funcs, self.names, strict=True):
            check_arguments(func, name, ["completions", *arguments])
            if isinstance(func, Reward):
                func.check(arguments)


def build_rewards(settings: RewardSettings, task: Task, device: torch.device = CPU) -> Rewards:
    """Find, load and prepare the functions of the section. device: where a reward model runs.

    Errors: KvrlError for a function that does not exist, a package that is missing, parameters that are refused, a
    server that does not answer, and a judge of mode pairwise, which gives no rewards.
    """
    funcs = [resolve(entry, task) for entry in settings.funcs]
    for func in funcs:
        if isinstance(func, Judge) and func.mode == "pairwise":
            raise KvrlError("reward.funcs.judge.params.mode: pairwise gives preferences, not rewards, and needs "
                            "algorithm online_dpo with the judge as the only function; set mode to scalar")  # fmt: skip
    for func in funcs:
        if isinstance(func, Reward):
            func.prepare(device)
    names = [
        _name(func) if ":" in entry.func else entry.func for entry, func in zip(settings.funcs, funcs, strict=True)
    ]
    return Rewards(funcs, unique_names(names), settings.all_weights, settings.on_error, settings.timeout)


def pair_judge(settings: RewardSettings) -> Judge | None:
    """The judge of mode pairwise, prepared, if it is the section's only function; else None.

    Errors: KvrlError for what it has no use for: it gives no rewards, and nothing else is summed with it.
    """
    entries = settings.funcs
    if len(entries) != 1 or entries[0].func != Judge.name or entries[0].params.get("mode") != "pairwise":
        return None
    unused = {
        "funcs.judge.weight": entries[0].weight,
        "weights": settings.weights,
        "timeout": settings.timeout,
        "on_error": "drop" if settings.on_error == "drop" else None,
    }
    for key, value in unused.items():
        if value is not None:
            raise KvrlError(f"reward.{key}: {value} has no effect on a judge of mode pairwise, which gives "
                            "preferences and no rewards; take it out (the judge's own params are request_timeout and "
                            "on_unreadable)")  # fmt: skip
    judge = get_reward(Judge.name, **entries[0].params)
    assert isinstance(judge, Judge)
    judge.prepare(CPU)
    return judge


def resolve(entry: RewardEntry, task: Task) -> RewardFunc:
    """The function of an entry, with its parameters. Errors: KvrlError."""
    if entry.func == "task":
        if entry.params:
            raise KvrlError("reward.funcs.task.params: the task's scorer has none; set task.params")
        if task.reward is None:
            raise KvrlError(
                f"reward.funcs: task, and {task.name} has no scorer without answers; name another function, or set "
                "task.params.answers to true"
            )
        return task.reward
    if ":" not in entry.func:
        return get_reward(entry.func, **entry.params)
    func = import_function(entry.func)
    check_params(func, entry.params)
    return functools.partial(func, **entry.params) if entry.params else func


def check_params(func: RewardFunc, params: Mapping[str, Any]) -> None:
    """Raise KvrlError for a parameter that is none of the function's named arguments: **kwargs takes any mistake in."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [p.name for p in signature_of(func, _name(func)).parameters.values() if p.kind in by_name]
    for param in params:
        if param not in known:
            near = difflib.get_close_matches(param, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"name one of its arguments: {', '.join(known)}"
            raise KvrlError(f"reward.funcs.{_name(func)}.params.{param}: the function has no argument of that name; "
                            f"{remedy}")  # fmt: skip


def import_function(path: str) -> RewardFunc:
    """`path/to/file.py:function` or `package.module:function`. Errors: KvrlError for one that cannot be imported."""
    module_name, _, function = path.rpartition(":")
    try:
        module = _run_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's file may raise anything, and argparse exits
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise KvrlError(f"reward.funcs: {module_name} cannot be imported ({reason}); mend it, or give "
                        "path/to/file.py:function or package.module:function") from error  # fmt: skip
    func = getattr(module, function, None)
    if not callable(func) or inspect.isclass(func):
        functions = ", ".join(name for name, _ in inspect.getmembers(module, inspect.isfunction)) or "none"
        raise KvrlError(f"reward.funcs: {module_name} has no function {function!r}; it has {functions}")
    return func


def _run_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    name = f"kvrl_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look it up there
    # Not the loader's: its bytecode is taken for the file's by size and second, and stays beside the user's file
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def _name(func: Any) -> str:
    """A function's own name, that of what a partial one wraps, or its class's."""
    func = func.func if isinstance(func, functools.partial) else func
    return getattr(func, "__name__", type(func).__name__)
