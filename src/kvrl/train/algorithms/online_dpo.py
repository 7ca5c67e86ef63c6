"""Online DPO (arXiv 2402.04792): pairs of the policy's own completions, ordered by their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrl.learner import Scored
from kvrl.objectives.advantages import Advantages
from kvrl.objectives.kl import k3
from kvrl.objectives.losses import LossNormaliser, Metrics, total
from kvrl.objectives.preference import dpo_loss, make_pairs, sequence_logps
from kvrl.train.algorithms.base import Algorithm, Fixed, Views, scores_of
from kvrl.train.algorithms.settings import OnlineDpoSettings
from kvrl.train.batch import Batch, Cut

if TYPE_CHECKING:
    from kvrl.train.config import Config


class OnlineDpo(Algorithm):
    """`online_dpo:` in the configuration. Policy and reference log-probs are both in the method's learner view."""

    settings: OnlineDpoSettings

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = config.online_dpo

    def compare(self, rewards: Tensor) -> Advantages:
        """The rewards themselves: pairs are made of them."""
        return scores_of(rewards)

    def prepare(self, batch: Batch, views: Views, step: int) -> Fixed:
        """Pairs of the completions that have a reward and were not rejected by the correction."""
        usable = batch.mask.any(-1)  # [N]
        if views.correction is not None:
            usable &= views.correction.keep
        rewards = torch.where(usable, batch.rewards, torch.nan)  # [N]
        pairs = make_pairs(rewards, self.settings.num_generations, self.settings.pairs)
        paired = torch.zeros_like(usable).index_fill(0, torch.cat([pairs.chosen, pairs.rejected]), True)  # [N]
        # Its weights are 1 for what was kept: DPO has no term that they could weigh.
        return Fixed(
            batch.mask & paired[:, None], Views(views.sampler, views.old, views.reference), step, pairs=pairs,
            metrics=pairs.metrics(),
        )  # fmt: skip

    def units(self, fixed: Fixed, rows: Sequence[int]) -> list[list[int]]:
        """The paired completions of each prompt together."""
        paired = fixed.mask.any(-1)  # [N]
        groups: dict[int, list[int]] = {}
        for row in rows:
            if paired[row]:
                groups.setdefault(row // self.settings.num_generations, []).append(row)
        return list(groups.values())

    def normaliser(self, fixed: Fixed, rows: Sequence[int]) -> LossNormaliser:
        """`sequences` counts pairs."""
        assert fixed.pairs is not None
        mine = torch.isin(fixed.pairs.chosen, torch.tensor(rows))
        return LossNormaliser(sequences=int(mine.sum()), tokens=int(fixed.mask[rows].sum()))

    def loss(self, scored: Scored, fixed: Fixed, cut: Cut, normaliser: LossNormaliser) -> tuple[Tensor, Metrics]:
        """The pairs' losses, of log-probs of whole completions."""
        assert fixed.pairs is not None and fixed.views.reference is not None
        mask, average = cut(fixed.mask), self.settings.average_logps
        logps = sequence_logps(scored.logps, mask, average)  # [n]
        reference = sequence_logps(cut(fixed.views.reference), mask, average)  # [n]
        place = {row: i for i, row in enumerate(cut.micro)}
        chosen, rejected = [], []
        for one, other in zip(fixed.pairs.chosen.tolist(), fixed.pairs.rejected.tolist(), strict=True):
            if one in place:
                chosen.append(place[one])
                rejected.append(place[other])
        loss, metrics = dpo_loss(
            logps[chosen], logps[rejected], reference[chosen], reference[rejected],
            beta=self.settings.beta, loss_type=self.settings.loss_type, pairs=normaliser.sequences,
        )  # fmt: skip
        kl = k3(scored.logps, cut(fixed.views.reference))  # [n, c]
        return loss, metrics | total("kl", kl, mask)
