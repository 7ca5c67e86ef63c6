"""What an objective does about a mismatch between the sampler's view and the learner's: weigh or reject.

A correction is a level, an action and bounds. Some names from the literature:

| name | level | action | bounds |
|---|---|---|---|
| truncated importance sampling (TIS) | token | truncate | [null, 2.0] |
| IcePop (arXiv 2510.18855) | token | mask | [0.5, 5.0] |
| masked importance sampling (MIS) | sequence_sum | mask | [null, 2.0] |
| geometric rejection | sequence_mean | reject | [0.99, 1.01] |
| Sparse-RL's rejection (arXiv 2601.10079) | token | reject | [0.0001, null] |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from kvrl.errors import KvrlError

Level = Literal["token", "sequence_sum", "sequence_mean"]
Action = Literal["truncate", "mask", "reject"]
Bounds = tuple[float | None, float | None]

MAX_LOG = 700.0  # exp of it is still a double


class CorrectionConfig(BaseModel):
    """A correction as the config file states it; the default is token-level TIS, truncated at 2."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    level: Level = "token"
    """What has a ratio: a token, or a sequence (product of its tokens' ratios, or their geometric mean)."""
    action: Action = "truncate"
    """`truncate` clamps weights into the bounds, `mask` zeroes those outside, `reject` drops sequences."""
    bounds: Bounds = (None, 2.0)
    """Lowest and highest ratio allowed, both inclusive; null for no bound."""
    normalize: bool = False
    """Divide the weights by their mean over the batch (of the tokens or sequences that were not masked)."""

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        check_correction(self.level, self.action, self.bounds, self.normalize)
        return self

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Correction:
        """`correction` with these settings."""
        return correction(
            log_ratio,
            mask,
            level=self.level,
            action=self.action,
            bounds=self.bounds,
            normalize=self.normalize,
        )


@dataclass(frozen=True)
class Correction:
    """What `correction` decided, without gradient."""

    weights: Tensor
    """[N, C]; for the loss's clipped term. 0 outside the mask, and for what was masked or rejected."""
    keep: Tensor
    """[N] bool; False for a rejected sequence."""
    metrics: dict[str, float]
    """Raw ratios and shares, before any action."""


def correction(
    log_ratio: Tensor, mask: Tensor, *, level: Level, action: Action, bounds: Bounds, normalize: bool = False
) -> Correction:
    """Importance weights of learner's old policy over sampler, bounded.

    log_ratio: [N, C] = old log-prob in the learner's view - the sampler's, at the sampled token, natural
    log. mask: [N, C] bool, True = counts. The ratio of a token is exp(log_ratio); of a sequence exp(sum)
    ("sequence_sum", the product of its tokens' ratios) or exp(mean) ("sequence_mean", their geometric
    mean). At sequence levels all tokens of a sequence have its weight.

    - truncate: the weight is the ratio clamped into `bounds`.
    - mask: the weight is the ratio inside `bounds`, 0 outside. The tokens stay in the loss's denominator.
    - reject: a sequence is dropped if its ratio, or at token level that of any of its tokens, lies outside
      `bounds`. Kept sequences have weight 1.

    normalize needs the whole rollout batch in one call. Metrics, of the raw ratios of the level, with the
    prefix "correction/": ratio_min, ratio_mean, ratio_max (capped at e^700), effective_sample_size ((sum
    w)^2 / sum w^2 as a share of the number of ratios: 1 = no mismatch), share_below and share_above the
    bounds, share_clipped, share_masked, and share_rejected (of sequences). Raises KvrlError as
    `check_correction` does.
    """
    check_correction(level, action, bounds, normalize)
    log_weights, units = _at_level(log_ratio.detach(), mask, level)  # [N, C] or [N, 1]
    low, high = (None if bound is None else math.log(bound) for bound in bounds)
    below = units & (log_weights < low) if low is not None else torch.zeros_like(units)
    above = units & (log_weights > high) if high is not None else torch.zeros_like(units)
    outside = below | above
    rejected = outside.any(-1) if action == "reject" else torch.zeros_like(mask[:, 0])  # [N]
    metrics = _ratio_metrics(log_weights[units]) | {
        "share_below": _share(below, units),
        "share_above": _share(above, units),
        "share_clipped": _share(outside, units) if action == "truncate" else 0.0,
        "share_masked": _share(outside, units) if action == "mask" else 0.0,
        "share_rejected": _share(rejected, mask.any(-1)),
    }

    if action == "reject":
        weights = (~rejected)[:, None].to(log_ratio.dtype)  # [N, 1]
    else:
        log_weights = log_weights.clamp(low, high)
        active = units & ~outside if action == "mask" else units
        if normalize and active.any():
            # In logs: a batch of weights that all underflow would be 0 / 0.
            log_weights = log_weights - (log_weights[active].logsumexp(0) - math.log(int(active.sum())))
        weights = torch.where(active, log_weights.exp(), 0)  # [N, C] or [N, 1]
    weights = torch.where(mask, weights, 0)  # [N, C]
    return Correction(weights, ~rejected, {f"correction/{name}": value for name, value in metrics.items()})


def check_correction(level: str, action: str, bounds: Bounds, normalize: bool) -> None:
    """Refuse settings that have no meaning, with a KvrlError that says which and why."""
    if level not in ("token", "sequence_sum", "sequence_mean"):
        raise KvrlError(f"correction.level: {level!r} is unknown; use token, sequence_sum or sequence_mean")
    if action not in ("truncate", "mask", "reject"):
        raise KvrlError(f"correction.action: {action!r} is unknown; use truncate, mask or reject")
    low, high = bounds
    for bound in bounds:
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise KvrlError(
                f"correction.bounds: {bound} is no positive finite ratio; use null for no bound on that side"
            )
    if low is not None and high is not None and low > high:
        raise KvrlError(f"correction.bounds: the lower bound {low} is above the upper bound {high}; swap them")
    if low is None and high is None:
        raise KvrlError("correction.bounds: both are null, so nothing would be corrected; give at least one")
    if action in ("truncate", "mask") and high is None:
        raise KvrlError(
            f"correction.bounds: action {action} has no upper bound, so weights could grow without limit; "
            "give the second value, such as 2.0"
        )
    if action == "reject" and normalize:
        raise KvrlError("correction.normalize: true has no effect with action reject, whose weights are 1; use false")


def _at_level(log_ratio: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Log-ratios per unit of the level and which units count: [N, C] for tokens, [N, 1] for sequences."""
    log_ratio = torch.where(mask, log_ratio, 0)  # [N, C]
    if level == "token":
        return log_ratio, mask
    total = log_ratio.sum(-1, keepdim=True)  # [N, 1]
    if level == "sequence_mean":
        total = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return total, mask.any(-1, keepdim=True)


def _ratio_metrics(log_ratios: Tensor) -> dict[str, float]:
    """Statistics of exp(log_ratios) [M], in logs so that none of them overflows; empty for M = 0."""
    count = log_ratios.numel()
    if count == 0:
        return {}
    log_sum = float(log_ratios.logsumexp(0))
    log_sum_of_squares = float((2 * log_ratios).logsumexp(0))
    return {
        "ratio_min": _exp(float(log_ratios.min())),
        "ratio_mean": _exp(log_sum - math.log(count)),
        "ratio_max": _exp(float(log_ratios.max())),
        "effective_sample_size": _exp(2 * log_sum - log_sum_of_squares) / count,
    }


def _exp(value: float) -> float:
    return math.exp(min(value, MAX_LOG))


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum()) / max(int(whole.sum()), 1)
