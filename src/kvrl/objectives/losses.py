"""Policy-gradient losses of the GRPO family, independent of how the batch is cut into micro-batches.

All log-probs of one call are in one view (the method's learner view) and at the sampling temperature.
N = sequences, C = completion tokens (right-padded), natural log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives.kl import k3

LossType = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]

Metrics = dict[str, Tensor]
"""Scalars named "what/sum", "what/count", "what/min" or "what/max", which add up over micro-batches."""

MAX_LOG_RATIO = 20.0
"""Ratios beyond exp(20), or below its inverse, count as that and give no gradient."""


@dataclass(frozen=True)
class LossNormaliser:
    """What the loss is divided by, counted once over everything that one optimiser step sees."""

    sequences: int
    """Sequences with at least one active token."""
    tokens: int
    """Active tokens."""

    @classmethod
    def from_mask(cls, mask: Tensor) -> LossNormaliser:
        """Count a mask [N, C] bool, after every sample that must not count was taken out of it."""
        return cls(sequences=int(mask.any(-1).sum()), tokens=int(mask.sum()))

    def __add__(self, other: LossNormaliser) -> LossNormaliser:
        return LossNormaliser(self.sequences + other.sequences, self.tokens + other.tokens)


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType,
    epsilon: float,
    epsilon_high: float | None = None,
    normaliser: LossNormaliser,
    max_completion_length: int,
    token_weights: Tensor | None = None,
    ref_logps: Tensor | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's share of the loss, and its metrics. The shares of a step add up to the step's loss.

    logps, old_logps, ref_logps: [N, C]; advantages: [N], or [N, C] for one per token (PPO: dapo is its loss);
    mask: [N, C] bool, True = counts; token_weights: [N, C], a correction, multiplies the clipped term but not
    the KL term. With r = exp(logps - old_logps) per token, A = advantages, e = epsilon and h = epsilon_high
    (epsilon if None):

    - grpo (arXiv 2402.03300, eq. 3): -min(r A, clip(r, 1-e, 1+h) A), averaged within each sequence and then
      over the sequences.
    - dr_grpo (arXiv 2503.20783): the same term summed, divided by sequences * max_completion_length.
    - dapo (arXiv 2503.14476, eq. 8): the same term, averaged over all tokens of the step.
    - gspo (arXiv 2507.18071, eq. 5-7): one ratio per sequence, exp(mean of logps - old_logps), clipped
      likewise, averaged over sequences; every token of a sequence has the same weight in the gradient.
    - rloo (arXiv 2402.14740): the completion is one action, so one ratio per sequence, exp(sum of logps - old_logps),
      clipped likewise; its term, once for each token, summed and averaged over sequences. The gradient is that of
      one term per sequence, but for token_weights, each of which weighs its own token's part.
    - cispo (arXiv 2506.13585, eq. 4-5): -sg(min(r, 1+h)) A logps, averaged over all tokens; no lower bound,
      as in the paper's experiments, so `epsilon` serves only as the default of h. TRL's cispo clips at
      `epsilon_high` itself: its 5.0 is 4.0 here.

    The KL term, beta * k3, is averaged as the loss is. Do not divide the result again by the number of
    accumulation steps; where data parallelism averages gradients, count the normaliser over all processes
    and multiply the loss by their number. A micro-batch without active tokens gives loss 0 and gradient 0.

    Metrics, before any clipping: ratio (of sequences for gspo and rloo), clip_low and clip_high (ratios at which
    clipping acts: below the range with A < 0, above it with A > 0; for cispo above it whatever A), and kl
    if `ref_logps` is given. Raises KvrlError for an unknown loss_type, for a beta without `ref_logps`, and for
    gspo or rloo with an advantage per token.
    """
    if beta and ref_logps is None:
        raise KvrlError(f"beta: {beta} needs the reference policy's log-probs; pass ref_logps or set it to 0")
    if loss_type in ("gspo", "rloo") and advantages.dim() == 2:
        raise KvrlError(
            f"loss_type: {loss_type} has one ratio per sequence, which would average an advantage per token away; "
            "use dapo, grpo, dr_grpo or cispo, or an algorithm with one advantage per completion"
        )
    upper = 1.0 + (epsilon if epsilon_high is None else epsilon_high)
    # where, not *: padding may hold anything, and 0 * inf would be NaN in the loss and in its gradient.
    log_ratio = torch.where(mask, logps - old_logps, 0)  # [N, C]
    lengths = mask.sum(-1).clamp(min=1)  # [N]
    units = mask  # [N, C]
    if loss_type == "gspo":
        log_ratio = (log_ratio.sum(-1) / lengths)[:, None]  # [N, 1]
        units = mask.any(-1, keepdim=True)  # [N, 1]
    elif loss_type == "rloo":  # every token has the completion's ratio and its own gradient
        log_ratio = log_ratio.detach().sum(-1, keepdim=True) + (log_ratio - log_ratio.detach())  # [N, C]
        units = mask.any(-1, keepdim=True)  # [N, 1]
    # exp overflows at 88, and its gradient times a clipped term's 0 is then NaN.
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [N, C] or [N, 1]
    advantage = advantages if advantages.dim() == 2 else advantages[:, None]  # [N, C] or [N, 1]
    advantage = torch.where(units, advantage, 0)  # [N, C], or [N, 1] for gspo and rloo

    measured = ratio[:, : units.shape[1]]  # [N, C] or [N, 1]
    if loss_type == "cispo":
        objective = ratio.clamp(max=upper).detach() * advantage * logps  # [N, C]
        clipped_low = torch.zeros_like(units)
        clipped_high = measured > upper
    else:
        clipped = ratio.clamp(1.0 - epsilon, upper)
        objective = torch.minimum(ratio * advantage, clipped * advantage)  # [N, C] or [N, 1]
        clipped_low = (measured < 1.0 - epsilon) & (advantage < 0)
        clipped_high = (measured > upper) & (advantage > 0)

    loss = -objective.expand_as(logps)  # [N, C]
    if token_weights is not None:
        loss = loss * torch.where(mask, token_weights, 0)
    metrics = {
        **extremes("ratio", measured, units),
        **total("ratio", measured, units),
        **total("clip_low", clipped_low, units),
        **total("clip_high", clipped_high, units),
    }
    if ref_logps is not None:
        kl = k3(torch.where(mask, logps, 0), torch.where(mask, ref_logps, 0))  # [N, C]
        loss = loss + beta * kl
        metrics.update(total("kl", kl, mask))

    per_sequence = torch.where(mask, loss, 0).sum(-1)  # [N]
    share = (per_sequence / _denominator(loss_type, lengths, normaliser, max_completion_length)).sum()
    return share, metrics


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Metrics of several micro-batches as one: sums and counts add, extremes stay extremes."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith("/min"):
                merged[name] = torch.minimum(merged[name], value)
            elif name.endswith("/max"):
                merged[name] = torch.maximum(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def mean_metrics(metrics: Metrics) -> dict[str, float]:
    """Plain numbers for the log: "what/mean", "what/min", "what/max"; absent where the count is 0."""
    result: dict[str, float] = {}
    for name, value in metrics.items():
        what, kind = name.rsplit("/", 1)
        count = float(metrics[f"{what}/count"])
        if count and kind == "sum":
            result[f"{what}/mean"] = float(value) / count
        elif count and kind != "count":
            result[name] = float(value)
    return result


def _denominator(loss_type: LossType, lengths: Tensor, normaliser: LossNormaliser, max_length: int) -> Tensor:
    """What each sequence's summed loss is divided by, [N]; 1 where a whole step has no active token."""
    sequences, tokens = max(normaliser.sequences, 1), max(normaliser.tokens, 1)
    match loss_type:
        case "grpo" | "gspo":
            return lengths * sequences
        case "dr_grpo":
            return torch.full_like(lengths, sequences * max_length)
        case "rloo":
            return torch.full_like(lengths, sequences)
        case "dapo" | "cispo":
            return torch.full_like(lengths, tokens)
        case _:
            raise KvrlError(f"loss_type: {loss_type!r} is unknown; use one of grpo, dr_grpo, dapo, gspo, cispo, rloo")


def total(name: str, values: Tensor, where: Tensor) -> Metrics:
    """Sum and count of values where `where`, both of one shape, without gradient."""
    return {f"{name}/sum": torch.where(where, values.detach(), 0).sum(), f"{name}/count": where.sum()}


def extremes(name: str, values: Tensor, where: Tensor) -> Metrics:
    """Least and greatest of values where `where`, both of one shape, without gradient."""
    values = values.detach()
    return {
        f"{name}/min": values.masked_fill(~where, torch.inf).min(),
        f"{name}/max": values.masked_fill(~where, -torch.inf).max(),
    }
