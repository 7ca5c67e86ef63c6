"""What an objective does about a mismatch between the sampler's view and the learner's: weigh or reject.

A correction is a level, an action and bounds; `kvrl.objectives.presets` has those that the literature names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives.presets import PRESETS, TIS, Action, Bounds, Level, PresetName
from kvrl.objectives.ratios import ratio_metrics, share, weights_of


class CorrectionConfig(BaseModel):
    """A correction as the config file states it; the default is token-level TIS, truncated at 2."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    preset: PresetName | None = None
    """A correction by name; fields given beside it override it. `tis`: token, truncate, [null, 2]. `mis`: token, mask,
    [0.5, 2]. `icepop`: token, mask, [0.5, 5]. `geometric`: sequence_mean, reject, [0.999, 1.001], which is meant for
    the noise between two engines: under a tight cache it rejects everything. `sequence_mask`: sequence_sum, mask,
    [null, 3]. References in `kvrl/objectives/presets.py`."""
    level: Level = TIS.level
    """What has a ratio: a token, or a sequence (product of its tokens' ratios, or their geometric mean)."""
    action: Action = TIS.action
    """`truncate` clamps weights into the bounds, `mask` zeroes those outside, `reject` drops sequences."""
    bounds: Bounds = TIS.bounds
    """Lowest and highest ratio allowed, both inclusive; null for no bound."""
    normalize: bool = TIS.normalize
    """Divide the weights by their mean over the batch (of the tokens or sequences that were not masked)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("preset") in PRESETS:
            return PRESETS[data["preset"]]._asdict() | data
        return data

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
    """What a correction decided for one rollout batch, without gradient."""

    weights: Tensor
    """[N, C]; for the loss's clipped term. 0 outside the mask, and for what was masked or rejected."""
    keep: Tensor
    """[N] bool; False for a rejected sequence."""
    mask: Tensor
    """[N, C] bool; the tokens that the loss counts in its denominators and that its KL term covers."""
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
    - mask: the weight is the ratio inside `bounds`, 0 outside.
    - reject: a sequence is dropped if its ratio, or at token level that of any of its tokens, lies outside
      `bounds`. Kept sequences have weight 1.

    What has weight 0 stays in the loss's denominators: the result's mask is the given one. normalize needs
    the whole rollout batch in one call. Metrics, of the raw ratios of the level, with the prefix
    "correction/": those of `ratio_metrics`, share_below and share_above the bounds, share_clipped,
    share_masked, and share_rejected (of sequences). Raises KvrlError as `check_correction` does.
    """
    check_correction(level, action, bounds, normalize)
    log_weights, units = _at_level(log_ratio.detach(), mask, level)  # [N, C] or [N, 1]
    low, high = (None if bound is None else math.log(bound) for bound in bounds)
    below = units & (log_weights < low) if low is not None else torch.zeros_like(units)
    above = units & (log_weights > high) if high is not None else torch.zeros_like(units)
    outside = below | above
    rejected = outside.any(-1) if action == "reject" else torch.zeros_like(mask[:, 0])  # [N]
    metrics = ratio_metrics(log_weights[units]) | {
        "share_below": share(below, units),
        "share_above": share(above, units),
        "share_clipped": share(outside, units) if action == "truncate" else 0.0,
        "share_masked": share(outside, units) if action == "mask" else 0.0,
        "share_rejected": share(rejected, mask.any(-1)),
    }

    if action == "reject":
        weights = (~rejected)[:, None].to(log_ratio.dtype)  # [N, 1]
    else:
        active = units & ~outside if action == "mask" else units
        weights = weights_of(log_weights.clamp(low, high), active, normalize)  # [N, C] or [N, 1]
    weights = torch.where(mask, weights, 0)  # [N, C]
    return Correction(weights, ~rejected, mask, {f"correction/{name}": value for name, value in metrics.items()})


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
