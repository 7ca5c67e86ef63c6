"""One GRPO step of kvrl's trainer: its time, the rollouts' part, and the part that the trace takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvrl.attention.replay import ReplayContext
from kvrl.bench.settings import GROUP, Settings
from kvrl.cache.compaction import Compactor
from kvrl.sampler import engine
from kvrl.tasks.recurrence import Recurrence
from kvrl.train.config import Config
from kvrl.train.run import build
from kvrl.train.trainer import train_step

MICRO_BATCH = 4  # completions of one forward and backward, as TRL's per_device_train_batch_size

# What records an eviction, what cuts a request's trace out of the record, and what checks it and finds the
# survivors of each eviction for the learner's attention
TRACE_WORK = ((Compactor, "_record"), (engine, "make_rollout"), (ReplayContext, "__init__"))


@dataclass(frozen=True)
class StepCost:
    """Of one step: sampling, rewards, parity check, update."""

    seconds: float
    rollout_seconds: float
    trace_seconds: float
    """Inside `TRACE_WORK`."""
    trace_bytes: int
    """Of all completions."""
    tokens: int
    """Of all completions, prompts apart."""

    @property
    def trace_share(self) -> float:
        return self.trace_seconds / self.seconds


def step_costs(settings: Settings, folder: str) -> list[StepCost]:
    """As many steps as repeats, after the set-up of a run."""
    config = make_config(settings, folder)
    run, _ = build(config, say=lambda text: None)
    costs = []
    for step in range(1, settings.repeats + 1):
        with timed(*TRACE_WORK) as trace:
            metrics = train_step(run, step)
        costs.append(StepCost(
            metrics["seconds"], metrics["rollout_seconds"], trace.seconds, int(metrics["trace_bytes"]),
            int(metrics["completion_length"] * settings.completions),
        ))  # fmt: skip
    return costs


def make_config(s: Settings, folder: str) -> Config:
    """GRPO with replay, on prompts of a task that needs no file; completions have full length."""
    return Config.model_validate({
        "method": "shadow_mask",
        "algorithm": "grpo",
        "seed": s.seed,
        "model": {"path": folder, "dtype": s.dtype, "gradient_checkpointing": s.gradient_checkpointing},
        "task": {"name": Recurrence.name},
        "reward": {"funcs": [f"{__name__}:odd_share"]},
        "cache": {"policy": s.policy, "budget": s.budget, "buffer": s.buffer},
        "sampling": {"max_completion_length": s.completion_length, "eos_token_ids": []},
        "grpo": {"num_generations": GROUP},
        "train": {"max_steps": s.repeats, "prompts_per_step": s.completions // GROUP,
                  "micro_batch_tokens": MICRO_BATCH * (s.prompt_length + s.completion_length)},
        "eval": {"n": 0},
        # The check costs what it costs in a run; text without end is not what its limits are meant for
        "parity": {"mean_tolerance": 1e3, "p99_tolerance": 1e3, "dense_every": 0},
    })  # fmt: skip


def odd_share(completions: list[str], **_: list) -> list[float]:
    """A reward that differs between completions: the share of characters with an odd code."""
    return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]


def prompts(s: Settings) -> list[str]:
    """The texts that kvrl's steps start from."""
    count = s.completions // GROUP * s.repeats
    return [row["prompt"] for row in Recurrence().rows("train", count, s.seed)]


@dataclass
class Timed:
    """Seconds spent in the functions of `timed`."""

    seconds: float = 0.0


@contextmanager
def timed(*functions: tuple[Any, str]) -> Iterator[Timed]:
    """Inside the block, the time in these methods or functions of a module is added up (none of them calls another)."""
    found, originals = Timed(), [getattr(kind, name) for kind, name in functions]

    def wrap(function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found.seconds += time.perf_counter() - start

        return wrapped

    for (kind, name), original in zip(functions, originals, strict=True):
        setattr(kind, name, wrap(original))
    try:
        yield found
    finally:
        for (kind, name), original in zip(functions, originals, strict=True):
            setattr(kind, name, original)
