"""What `kvrl eval` takes from the run that a model comes from, so that it decodes as the run did."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.sampler.config import SamplingConfig
from kvrl.train.checkpoint import MODEL, TEACHER
from kvrl.train.config_file import explain

POLICY = "rkv"
"""Policy of a model that comes from no run."""


class _Model(BaseModel):
    path: str


class _Task(BaseModel):
    name: str
    params: dict[str, Any]


class _Cache(BaseModel):
    policy: str
    params: dict[str, Any]


class _Breadcrumbs(BaseModel):
    student: str
    teacher: str
    rl: bool


class _Run(BaseModel):
    """What is read of a run's configuration. The rest may be that of another version."""

    method: str
    model: _Model
    task: _Task
    cache: _Cache
    sampling: dict[str, Any]
    breadcrumbs: _Breadcrumbs
    warm_start: dict[str, Any] | None


def run_of(model: str) -> dict[str, Any] | None:
    """The configuration beside a model's folder, if it is one of a kvrl run or checkpoint.

    KvrlError for one that was changed so that it cannot be read.
    """
    file = Path(model).expanduser().resolve().parent / "config.json"
    if not Path(model).expanduser().is_dir() or not file.is_file():
        return None
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return None  # some other program's file
    if not (isinstance(found, dict) and {"method", "cache", "sampling", "task"} <= found.keys()):
        return None
    try:
        _Run.model_validate(found)
    except ValidationError as error:
        where, reason = "/".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise KvrlError(f"{file}: {where} cannot be read ({reason}); restore what the run wrote there") from None
    return found


def is_apart(model: str) -> bool:
    """Whether a folder holds one of the two models of a run with a separate student."""
    run = run_of(model)
    return run is not None and run["method"] == "breadcrumbs" and run["breadcrumbs"]["student"] == "separate"


def is_teacher(model: str) -> bool:
    """Whether a folder is the uncompressed policy beside a separate student of a run."""
    return is_apart(model) and Path(model).expanduser().resolve().name == TEACHER


def teacher_of(model: str) -> str | None:
    """The uncompressed policy beside a separate student of a run; None for any other model."""
    if not is_apart(model) or is_teacher(model):
        return None
    return str(Path(model).expanduser().resolve().parent / TEACHER)


def without_task(model: str, flags: str) -> KvrlError:
    """The refusal of a model that says no task, with what it may be instead."""
    folder = Path(model).expanduser()
    if (folder / MODEL).is_dir():
        return KvrlError(f"MODEL: {model} is the folder of a run; give its model, {folder / MODEL}")
    if not folder.is_dir() and len(folder.parts) > 2:  # a name of the hub has two parts
        return KvrlError(f"MODEL: {model} is no folder; give the folder of a model")
    return KvrlError(f"--task: is missing, and {model} is not the model of a run; set {flags}")


def uncompressed_of(model: str, after: tuple[Path, ...] = ()) -> str:
    """The uncompressed policy whose skill the beacons of `model` are to keep.

    A separate student's teacher, also of a student whose beacon policy alone went on learning; the start where it
    taught and no reward did; the model itself otherwise. after: the models that started from this one. KvrlError for
    a start that is in no folder, or not in the one that the run says.
    """
    run = run_of(model)
    if run is None or run["cache"]["policy"] != "beacon" or run["method"] == "dense":
        return model
    if run["method"] != "breadcrumbs":  # rollouts have beacons: what they started from was taught by its own teacher
        start = run["model"]["path"]
        follow = (*after, Path(model).expanduser().resolve())
        folder = Path(start).expanduser()
        if folder.resolve() in follow or (folder.name == MODEL and not folder.is_dir()):  # a run's, maybe a student's
            raise KvrlError(
                f"--teacher: the run of {model} started from {start}, which is not there (any more, or seen from this "
                "folder); name the uncompressed policy"
            )
        found = uncompressed_of(start, follow)
        return model if found == start else found
    if taught_by_start(run):
        check_start(run, "--teacher", f"name a folder of it, or {model} for its own weights without beacons")
        return run["model"]["path"]
    return teacher_of(model) or model


def taught_by_start(run: dict[str, Any]) -> bool:
    """Whether a run's model learnt beacons from the model that it started from, and nothing without them."""
    own = run["breadcrumbs"]
    return run["method"] == "breadcrumbs" and (own["student"], own["teacher"], own["rl"]) == ("same", "start", False)


def check_start(run: dict[str, Any], field: str, remedy: str) -> None:
    """Raise KvrlError for a run whose start cannot be loaded again."""
    if run["warm_start"] is not None or run["model"]["path"] == "tiny":
        raise KvrlError(
            f"{field}: the start taught (breadcrumbs.teacher start), and it was made by the run (model.path "
            f"{run['model']['path']}{'' if run['warm_start'] is None else ', warm_start'}), in no folder; {remedy}"
        )


def settings_of(args: argparse.Namespace) -> tuple[CacheConfig, SamplingConfig, str | None]:
    """Cache and sampling of `kvrl eval`, and a line that says what of them is the run's (None: nothing).

    Flags win over the run, the run over the defaults. Completes `args.policy`, `args.task` and `args.task_params`.
    """
    run = run_of(args.model)
    cache: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    taken: list[str] = []
    if run is not None:
        taken = _take_task(args, run["task"])
        same_policy = args.policy in (None, run["cache"]["policy"])
        left = {"budget", "policy"} | (set() if same_policy else {"params", "granularity"})
        if run["cache"]["policy"] == "beacon":
            left.add("buffer")  # it had no meaning there
        cache = {k: v for k, v in run["cache"].items() if k not in left and v not in (None, {})}
        sampling = {k: v for k, v in run["sampling"].items() if k != "num_generations"}
        if args.policy is None:
            args.policy = run["cache"]["policy"]
            taken.append(f"policy {args.policy}")
    args.policy = args.policy or POLICY
    flags = {k: getattr(args, k) for k in ("buffer", "window", "sinks") if getattr(args, k) is not None}
    flags |= beacon_flags(args, cache.get("params", {}))
    drawn = {k: v for k in ("temperature", "max_completion_length") if (v := getattr(args, k)) is not None}
    shown = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in cache.items() if v is not False}
    taken += [f"{k} {v}" for k, v in shown.items() if k not in flags]
    usual = SamplingConfig().model_dump(exclude={"max_completion_length"})
    taken += [f"{k} {v}" for k, v in sampling.items() if k not in drawn and usual.get(k, ...) != v]
    args.task_params = args.task_params or {}
    budgets = [budget for budget in args.budgets or [] if budget != "full"]
    return (
        _checked(CacheConfig, {"budget": max(budgets, default=512), **cache, **flags, "policy": args.policy}),
        _checked(SamplingConfig, {**sampling, **drawn}),
        f"from the run of {args.model}: {', '.join(taken)}" if taken else None,
    )


def beacon_flags(args: argparse.Namespace, params: dict[str, Any]) -> dict[str, Any]:
    """The cache's `params` that flags give, over those of the run. KvrlError where they have no meaning."""
    if args.policy == "beacon" and args.buffer is not None:
        raise KvrlError(
            f"--buffer: {args.buffer} has no meaning under --policy beacon, whose dial is --every; leave it out"
        )
    given = {name: getattr(args, name) for name in ("every", "schedule") if getattr(args, name) is not None}
    if not given:
        return {}
    if args.policy != "beacon":
        raise KvrlError(
            f"--{next(iter(given))}: chooses the windows of beacons, and --policy is {args.policy}; leave it out, or "
            "give a model with beacons and --policy beacon"
        )
    return {"params": {**params, "schedule": "constant", **given}}


def _take_task(args: argparse.Namespace, task: dict[str, Any]) -> list[str]:
    """Fill in the task's name and parameters where no flag says them; returns what was taken."""
    taken: list[str] = []
    if args.benchmark is not None:
        return taken
    if args.task is None:
        args.task = task["name"]
        taken.append(f"task {args.task}")
    if args.task_params is None and args.task == task["name"] and task["params"]:
        args.task_params = task["params"]
        taken.append(f"task_params {json.dumps(task['params'])}")
    return taken


def _checked(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValidationError as error:
        raise KvrlError(explain(error, kind, prefix="--")) from None
