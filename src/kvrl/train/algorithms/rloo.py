"""REINFORCE with a leave-one-out baseline (arXiv 2402.14740): the completion is the action."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrl.learner import completion_mask
from kvrl.objectives.advantages import Advantages, rloo_advantages
from kvrl.train.algorithms.base import Fixed, PolicyGradient, Views, counted
from kvrl.train.algorithms.settings import RlooSettings
from kvrl.train.batch import Batch

if TYPE_CHECKING:
    from kvrl.train.config import Config


class Rloo(PolicyGradient):
    """`rloo:` in the configuration."""

    settings: RlooSettings
    loss_beta = 0.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = config.rloo

    @property
    def needs_old(self) -> bool:
        """The KL in the reward is that of the policy that sampled."""
        return self.settings.beta > 0

    def compare(self, rewards: Tensor) -> Advantages:
        """Reward minus the mean of the group's other rewards."""
        return rloo_advantages(rewards, self.settings.num_generations)

    def prepare(self, batch: Batch, views: Views, step: int) -> Fixed:
        """Advantages of the rewards minus beta times the completion's KL to the reference (eq. 2)."""
        mask = counted(batch, views.correction)
        if views.reference is None:
            return Fixed(mask, views, step, advantages=batch.advantages.values)
        assert views.old is not None
        kl = torch.where(completion_mask(batch.rollouts), views.old - views.reference, 0)  # [N, C]
        # Of all its tokens, masked or not: where a truncated completion does not learn, the others' baseline has it
        compared = self.compare(batch.rewards - self.settings.beta * kl.sum(-1))
        metrics = {"kl/mean": float(torch.where(batch.mask, kl, 0).sum() / batch.mask.sum().clamp(min=1))}
        return Fixed(mask, views, step, advantages=compared.values, metrics=metrics)

    def loss_type(self) -> tuple[str, int]:
        """One ratio for each completion, as TRL's trainer has it."""
        return "rloo", 1
