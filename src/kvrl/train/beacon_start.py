"""The beacon policy's own start: the uncompressed policy distilled into it on the task's worked solutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvrl.attention.probe import ModelSpec, probe
from kvrl.beacons.config import BeaconSet
from kvrl.beacons.insert import insert_drawn
from kvrl.cache.trace import KVTrace
from kvrl.distill import Distillation
from kvrl.learner import Scorer
from kvrl.sampler.types import Rollout
from kvrl.tasks import Task
from kvrl.train.micro_batch import MAX_TOKENS
from kvrl.train.section import WarmStart
from kvrl.train.supervised import Example, OnStep, fit


def beacon_start(
    pupil: Scorer,
    distillation: Distillation,
    beacons: BeaconSet,
    tokenizer: Any,
    task: Task,
    settings: WarmStart,
    seed: int,
    temperature: float = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: OnStep | None = None,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, float]:
    """Train the pupil's model in place, by the KL of method `breadcrumbs` on the completions' tokens and their EOS.

    Each demonstration draws a window of `beacons`. Both distributions are at the sampling's temperature, over the whole
    vocabulary: nobody sampled, so nothing was cut off. The rest is `fit`'s.
    """
    spec = probe(pupil.model)

    def divergence(examples: list[Example], rows: list[int], step: int) -> Tensor:
        rollouts = [as_rollout(spec, *example, temperature) for example in examples]
        scored = pupil(insert_drawn(rollouts, beacons, seed, 0, step, rows=rows), view="sparse", distill=distillation)
        assert scored.divergence is not None
        return scored.divergence.sum()

    return fit(pupil.model, tokenizer, task, settings, seed, divergence, optimizer, on_step, max_tokens)


def as_rollout(spec: ModelSpec, ids: list[int], prompt: int, temperature: float) -> Rollout:
    """Tokens that nobody sampled, as a rollout of the full cache: what of it is the sampler's has no meaning."""
    completion = ids[prompt:]
    trace = KVTrace.dense(spec.num_layers, spec.kv_heads, len(ids))
    mask = torch.ones(len(completion), dtype=torch.bool)
    return Rollout(ids[:prompt], completion, torch.zeros(len(completion)), mask, trace, "eos", temperature)
