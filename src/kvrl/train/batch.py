"""One step's rollouts with rewards and advantages, and how they are cut for the learner."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrl.learner import completion_mask
from kvrl.objectives.advantages import Advantages, overlong_penalty
from kvrl.sampler.types import Rollout
from kvrl.train.algorithms import make_algorithm
from kvrl.train.config import Config


@dataclass(frozen=True)
class Batch:
    """N scored rollouts: groups are consecutive. mask is what the loss counts."""

    rollouts: list[Rollout]
    rewards: Tensor  # f32 [N], length penalty included, NaN where there was none
    advantages: Advantages
    mask: Tensor  # bool [N, C]

    @classmethod
    def build(cls, rollouts: list[Rollout], rewards: Tensor, config: Config) -> Batch:
        """Penalise length, compare as the algorithm does, and take out what must not count."""
        settings, limit = config.settings, config.sampling.max_completion_length
        lengths = torch.tensor([len(r.completion_ids) for r in rollouts])
        if settings.overlong_penalty is not None:
            rewards = rewards + overlong_penalty(lengths, limit, settings.overlong_penalty.cache_length)
        advantages = make_algorithm(config).compare(rewards)
        mask = completion_mask(rollouts) & advantages.keep[:, None]
        if settings.mask_truncated_completions:
            truncated = torch.tensor([r.finish_reason == "length" for r in rollouts])
            mask &= ~truncated[:, None]
        return cls(rollouts, rewards, advantages, mask)

    def metrics(self) -> dict[str, float]:
        """Lengths, endings and what became of the groups."""
        lengths = [len(r.completion_ids) for r in self.rollouts]
        return {
            "completion_length": sum(lengths) / len(lengths),
            "completion_length_max": float(max(lengths)),
            "truncated": sum(r.finish_reason == "length" for r in self.rollouts) / len(self.rollouts),
            "evictions": sum(r.trace.num_events for r in self.rollouts) / len(self.rollouts),
            **self.advantages.metrics(),
        }


class Cut:
    """The rows of a micro-batch of a whole batch's tensor, [N, C] -> [n, c] or [N] -> [n], where `like` is."""

    def __init__(self, micro: list[int], like: Tensor) -> None:
        self.micro, self.like = micro, like

    def __call__(self, x: Tensor) -> Tensor:
        rows = x[self.micro]
        return (rows[:, : self.like.shape[1]] if rows.ndim == 2 else rows).to(self.like.device)


def minibatches(count: int, num_minibatches: int, group: int, seed: int) -> Iterator[list[int]]:
    """Indices of each optimiser step: whole groups, in an order of the seed; one minibatch keeps the order."""
    groups = list(range(count // group))
    if num_minibatches > 1:
        random.Random(seed).shuffle(groups)
    for i in range(num_minibatches):
        part = groups[i::num_minibatches]
        yield [g * group + j for g in part for j in range(group)]
