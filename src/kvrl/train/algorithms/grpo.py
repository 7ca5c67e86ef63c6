"""GRPO and its relatives: rewards compared within a group, a clipped token or sequence ratio (arXiv 2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvrl.objectives.advantages import Advantages, group_advantages
from kvrl.train.algorithms.base import Fixed, PolicyGradient, Views, counted
from kvrl.train.algorithms.settings import GrpoSettings
from kvrl.train.batch import Batch

if TYPE_CHECKING:
    from kvrl.train.config import Config


class Grpo(PolicyGradient):
    """`grpo:` in the configuration."""

    settings: GrpoSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = config.grpo
        self.loss_beta = config.grpo.beta

    def compare(self, rewards: Tensor) -> Advantages:
        """Reward minus the group's mean, scaled."""
        return group_advantages(rewards, self.settings.num_generations, self.settings.scale_rewards)

    def prepare(self, batch: Batch, views: Views, step: int) -> Fixed:
        """The group's advantage for every token."""
        return Fixed(counted(batch, views.correction), views, step, advantages=batch.advantages.values)

    def loss_type(self) -> tuple[str, int]:
        """As configured; Dr. GRPO divides by the longest completion allowed."""
        own = "grpo" if self.config.method == "sparse_rl" else "dapo"
        return self.settings.loss_type or own, self.config.sampling.max_completion_length
