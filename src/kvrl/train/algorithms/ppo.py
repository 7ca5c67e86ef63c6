"""PPO (arXiv 1707.06347) with a critic that sees what the policy sees, and GAE over tokens (arXiv 1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrl.learner import Scored
from kvrl.objectives.advantages import Advantages
from kvrl.objectives.losses import LossNormaliser, Metrics
from kvrl.objectives.ppo import explained_variance, gae, token_rewards, value_loss, whiten
from kvrl.train.algorithms.base import Fixed, PolicyGradient, Views, counted, scores_of
from kvrl.train.algorithms.settings import PpoSettings
from kvrl.train.batch import Batch, Cut

if TYPE_CHECKING:
    from kvrl.train.config import Config


class Ppo(PolicyGradient):
    """`ppo:` in the configuration."""

    settings: PpoSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = config.ppo
        self.loss_beta = config.ppo.beta if config.ppo.kl_in == "loss" else 0.0

    @property
    def needs_old(self) -> bool:
        """The old values come from the pass that gives old log-probs."""
        return True

    def critic_alone(self, step: int) -> bool:
        """During the critic's warm-up."""
        return step <= self.settings.critic_warmup_steps

    def compare(self, rewards: Tensor) -> Advantages:
        """The rewards themselves: the critic is what they are compared with."""
        return scores_of(rewards)

    def prepare(self, batch: Batch, views: Views, step: int) -> Fixed:
        """Token rewards, generalised advantages, and the returns that the critic learns."""
        assert views.old is not None and views.values is not None
        settings, mask = self.settings, batch.mask
        kl, metrics = None, {}
        if views.reference is not None:
            kl = torch.where(mask, views.old - views.reference, 0)  # [N, C]
            metrics["kl/mean"] = float(kl.sum() / mask.sum().clamp(min=1))
        coefficient = settings.beta if settings.kl_in == "reward" else 0.0
        rewards = token_rewards(batch.advantages.values, kl, mask, coefficient)  # [N, C]
        advantages, returns = gae(rewards, views.values, mask, settings.gamma, settings.lam)  # [N, C]
        explained = explained_variance(views.values, returns, mask)
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask)
        metrics |= {f"value/{name}": value for name, value in explained.items()}
        return Fixed(counted(batch, views.correction), views, step, advantages, returns, metrics=metrics)

    def loss(self, scored: Scored, fixed: Fixed, cut: Cut, normaliser: LossNormaliser) -> tuple[Tensor, Metrics]:
        """Policy and value loss; during the critic's warm-up the value loss alone."""
        assert scored.values is not None and fixed.views.values is not None and fixed.returns is not None
        values, metrics = value_loss(
            scored.values, cut(fixed.views.values), cut(fixed.returns), cut(fixed.mask),
            cliprange_value=self.settings.cliprange_value, normaliser=normaliser,
        )  # fmt: skip
        if self.critic_alone(fixed.step):
            return self.settings.vf_coef * values, metrics
        policy, more = super().loss(scored, fixed, cut, normaliser)
        return policy + self.settings.vf_coef * values, metrics | more
