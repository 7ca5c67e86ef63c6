"""`kvrl bench`: measure on this machine, beside other libraries where asked for, and print. Nothing is written."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvrl.bench import run_learner, run_memory, run_rollout, run_step
from kvrl.bench.machine import versions
from kvrl.bench.result import Result
from kvrl.bench.settings import Settings
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.models.fetch import resolve_model
from kvrl.models.tiny import make_tiny
from kvrl.tasks.recurrence import Recurrence

BENCHMARKS: dict[str, Callable[[Result, str], None]] = {
    "rollout": run_rollout.fill,
    "learner": run_learner.fill,
    "step": run_step.fill,
    "memory": run_memory.fill,
}


def run_bench(args: argparse.Namespace) -> None:
    """`kvrl bench WHAT`: tables and figures beside their bars, or JSON alone. A missed bar is no error."""
    settings = Settings.of(args)
    make_policy(CacheConfig(policy=settings.policy, budget=settings.budget, buffer=settings.buffer))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with model_folder(settings.model, settings.seed) as folder:
        result = Result(settings, versions(), judged=not args.quick)
        BENCHMARKS[settings.what](result, folder)
    if args.quick:
        result.notes.append("--quick: far below the sizes that the bars are for; these figures only show that it runs")
    if args.json:
        print(result.to_json())
    else:
        result.print()


@contextmanager
def model_folder(name: str, seed: int) -> Iterator[str]:
    """What every engine loads: a model folder or a hub id; `tiny` is made for the time of the run."""
    if name != "tiny":
        yield resolve_model(name, "--model", also=("tiny",))
        return
    with tempfile.TemporaryDirectory(prefix="kvrl-bench-") as folder:
        yield str(make_tiny(folder, Recurrence().vocab, seed))
