"""Preference losses on pairs of completions, and pairs from the rewards of a group (Online DPO).

All log-probs of one call, policy's and reference's, are in one view: the method's learner view. P = pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kvrl.errors import KvrlError
from kvrl.objectives.groups import group_index
from kvrl.objectives.losses import Metrics, total

PreferenceLoss = Literal["sigmoid", "ipo"]
PairMode = Literal["best_worst", "all"]


@dataclass(frozen=True)
class Pairs:
    """Which completions of a rollout batch are compared."""

    chosen: Tensor
    """[P] int64 index of the completion with the higher reward."""
    rejected: Tensor
    """[P] int64 index of the one with the lower reward, of the same group."""
    groups_without_pair: int
    """Groups whose rewards are all equal, or with fewer than two."""

    def metrics(self) -> dict[str, float]:
        """The counts, for the log."""
        return {"pairs": float(self.chosen.numel()), "groups_without_pair": float(self.groups_without_pair)}


def make_pairs(rewards: Tensor, group_size: int, mode: PairMode = "best_worst") -> Pairs:
    """Pairs of completions of the same prompt with different rewards.

    rewards: [N] float, NaN = missing: in no pair. group_size: completions per prompt, consecutive. best_worst:
    one pair per group, the highest reward against the lowest, the first sample of those that tie for either. all:
    every two samples of a group whose rewards differ, in order of their indices (chosen, then rejected). Raises
    KvrlError if group_size does not divide N, and for an unknown mode.
    """
    _, count = group_index(group_size, rewards)
    grouped = rewards.view(count, group_size)  # [G, g]
    higher = grouped[:, :, None] > grouped[:, None, :]  # [G, g, g]; comparisons with NaN are False
    if mode == "best_worst":
        missing = grouped.isnan()  # [G, g]
        # argmax and argmin give the first of equal values.
        best = grouped.masked_fill(missing, -torch.inf).argmax(-1)  # [G]
        worst = grouped.masked_fill(missing, torch.inf).argmin(-1)  # [G]
        index = torch.arange(group_size, device=rewards.device)  # [g]
        chosen = (index == best[:, None])[:, :, None] & (index == worst[:, None])[:, None, :]  # [G, g, g]
    elif mode == "all":
        chosen = torch.ones_like(higher)
    else:
        raise KvrlError(f"pairs: {mode!r} is unknown; use one of 'best_worst', 'all'")
    group, one, other = (higher & chosen).nonzero(as_tuple=True)  # [P]
    return Pairs(
        chosen=group * group_size + one,
        rejected=group * group_size + other,
        groups_without_pair=int((~higher.any(-1).any(-1)).sum()),
    )


def sequence_logps(logps: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """Log-prob of each completion [N]: the sum over its mask [N, C], or the mean per token if `average`."""
    summed = torch.where(mask, logps, 0).sum(-1)  # [N]
    return summed / mask.sum(-1).clamp(min=1) if average else summed


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    beta: float,
    loss_type: PreferenceLoss = "sigmoid",
    pairs: int,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's share of the loss, and its metrics. The shares of a step add up to the step's loss.

    All four: [P], log-probs of whole completions (`sequence_logps`); pairs: those of the whole optimiser step, by
    which the sum is divided. With d = (chosen - ref_chosen) - (rejected - ref_rejected):

    - sigmoid: -log sigmoid(beta d) (DPO, arXiv 2305.18290, eq. 7).
    - ipo: (d - 1 / (2 beta))^2 (IPO, arXiv 2310.12036, eq. 17, whose tau is beta here).

    The ipo of the paper is on the probability of the completion, so on summed log-probs, and TRL's online DPO
    does that too. TRL's DPOTrainer takes the mean per token instead, on word from IPO's authors, so that beta does
    not depend on the length. This function takes what it is given: pass `sequence_logps(..., average=True)` of
    policy and reference for that form, with a beta to match (the margin it aims at, 1 / (2 beta), is per token).

    Metrics, TRL's: rewards/chosen and rewards/rejected (beta times policy minus reference), rewards/margins,
    rewards/accuracies (share of pairs with margin above 0), logps/chosen, logps/rejected. Raises KvrlError for an
    unknown loss_type.
    """
    chosen_rewards = beta * (chosen_logps - ref_chosen_logps)  # [P]
    rejected_rewards = beta * (rejected_logps - ref_rejected_logps)  # [P]
    margins = chosen_rewards - rejected_rewards  # [P]
    if loss_type == "sigmoid":
        losses = -logsigmoid(margins)  # [P]
    elif loss_type == "ipo":
        losses = (margins / beta - 1 / (2 * beta)).square()  # [P]
    else:
        raise KvrlError(f"loss_type: {loss_type!r} is unknown; use one of 'sigmoid', 'ipo'")
    every = torch.ones_like(margins, dtype=torch.bool)  # [P]
    metrics = {
        **total("rewards/chosen", chosen_rewards, every),
        **total("rewards/rejected", rejected_rewards, every),
        **total("rewards/margins", margins, every),
        **total("rewards/accuracies", margins > 0, every),
        **total("logps/chosen", chosen_logps, every),
        **total("logps/rejected", rejected_logps, every),
    }
    return losses.sum() / max(pairs, 1), metrics
