"""What an algorithm does with scored rollouts: compare them, fix what stays fixed, and give a micro-batch's loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrl.learner import Scored
from kvrl.objectives.advantages import Advantages
from kvrl.objectives.corrections import Correction
from kvrl.objectives.losses import LossNormaliser, Metrics, policy_loss
from kvrl.objectives.preference import Pairs
from kvrl.train.algorithms.settings import AlgorithmSettings, ClippedSettings
from kvrl.train.batch import Batch, Cut

if TYPE_CHECKING:
    from kvrl.train.config import Config


@dataclass(frozen=True)
class Views:
    """Log-probs of a rollout batch that no update changes, f32 [N, C]; all but the sampler's in the learner's view."""

    sampler: Tensor
    old: Tensor | None = None
    """None: one update, in which the learner's own detached log-probs are the old ones and every ratio is 1."""
    reference: Tensor | None = None
    values: Tensor | None = None
    """The critic's, before the updates."""
    correction: Correction | None = None


@dataclass(frozen=True)
class Fixed:
    """What stays fixed during the updates on one rollout batch."""

    mask: Tensor
    """bool [N, C]: the tokens that the loss and its denominators count."""
    views: Views
    step: int = 1
    """The rollout batch's number in the run, from 1."""
    advantages: Tensor | None = None
    """f32 [N] or [N, C]."""
    returns: Tensor | None = None
    """f32 [N, C]: what the critic learns."""
    pairs: Pairs | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> Tensor | None:
        """The correction's, f32 [N, C]."""
        return None if self.views.correction is None else self.views.correction.weights

    def teaches(self, rows: Sequence[int]) -> bool:
        """Whether any token of these rows counts with a weight that is not 0."""
        counted = self.mask[rows]
        return bool((counted if self.weights is None else counted & (self.weights[rows] != 0)).any())


class Algorithm(ABC):
    """An algorithm with its settings."""

    settings: AlgorithmSettings

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs are needed even if there is one update for each batch."""
        return False

    def critic_alone(self, step: int) -> bool:
        """Whether the policy waits at this rollout batch, counted from 1, while the critic learns."""
        return False

    @abstractmethod
    def compare(self, rewards: Tensor) -> Advantages:
        """What each sample's reward [N] says of it, NaN being a reward that is missing; groups are consecutive."""

    @abstractmethod
    def prepare(self, batch: Batch, views: Views, step: int) -> Fixed:
        """Advantages, returns or pairs of a rollout batch."""

    def units(self, fixed: Fixed, rows: Sequence[int]) -> list[list[int]]:
        """The rows of an optimiser step, parted into those that must share a micro-batch."""
        return [[row] for row in rows]

    def normaliser(self, fixed: Fixed, rows: Sequence[int]) -> LossNormaliser:
        """What the loss of one optimiser step over these rows is divided by."""
        return LossNormaliser.from_mask(fixed.mask[rows])

    @abstractmethod
    def loss(self, scored: Scored, fixed: Fixed, cut: Cut, normaliser: LossNormaliser) -> tuple[Tensor, Metrics]:
        """A micro-batch's share of the optimiser step's loss, and its metrics."""


class PolicyGradient(Algorithm):
    """The clipped policy-gradient loss, which GRPO, RLOO and PPO share."""

    settings: ClippedSettings
    loss_beta: float
    """Weight of the KL term in the loss; a KL in the reward is none."""

    def loss_type(self) -> tuple[str, int]:
        """Name of the loss in `policy_loss`, and the completion length that it divides by (if it does)."""
        return "dapo", 1

    def loss(self, scored: Scored, fixed: Fixed, cut: Cut, normaliser: LossNormaliser) -> tuple[Tensor, Metrics]:
        """The shares of a step add up to the step's loss (`policy_loss`)."""
        assert fixed.advantages is not None
        views, (loss_type, length) = fixed.views, self.loss_type()
        return policy_loss(
            scored.logps,
            scored.logps.detach() if views.old is None else cut(views.old),
            cut(fixed.advantages),
            cut(fixed.mask),
            loss_type=loss_type,  # type: ignore[arg-type]
            epsilon=self.settings.epsilon,
            epsilon_high=self.settings.epsilon_high,
            normaliser=normaliser,
            max_completion_length=length,
            token_weights=None if fixed.weights is None else cut(fixed.weights),
            ref_logps=None if views.reference is None or not self.loss_beta else cut(views.reference),
            beta=self.loss_beta,
        )


def counted(batch: Batch, correction: Correction | None) -> Tensor:
    """bool [N, C]: the batch's mask, without the tokens that the correction takes out of the denominators."""
    return batch.mask if correction is None else correction.mask


def scores_of(rewards: Tensor) -> Advantages:
    """Rewards as they are, for algorithms that do not compare within groups; NaN drops the sample."""
    keep = ~rewards.isnan()  # [N]
    return Advantages(
        values=torch.where(keep, rewards, 0).float(), keep=keep, signal=keep, groups=len(rewards),
        groups_dropped=int((~keep).sum()), groups_without_signal=0, samples_dropped=int((~keep).sum()),
    )  # fmt: skip
