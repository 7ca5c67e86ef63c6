"""Sparse-RL's correction: sequences rejected by their smallest token ratio, tokens weighed by theirs.

xi = dense old policy over sparse sampler, per token (arXiv 2601.10079, section 3). J averages over all G samples
of a group, with weight 0 for the rejected:

    J = E[ 1/G sum_i keep_i 1/|o_i| sum_t xi_it min(w_it A_i, clip(w_it, 1-e, 1+e) A_i) - beta KL ]
"""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives.corrections import Correction
from kvrl.objectives.ratios import ratio_metrics, share, weights_of


class SparseRLConfig(BaseModel):
    """Sparse-RL as the config file states it; the defaults are the released settings.

    The paper's text has neither band nor normalisation: band null, normalize false. The released code takes the mean of
    `normalize` over all tokens of a micro-batch, rejected and masked ones too: another scale of the update.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    reject_below: float = Field(1e-4, gt=0, lt=1)
    """A sequence with any token ratio below it is rejected."""
    max_weight: float = Field(1.5, ge=1)
    """Token weights are truncated here."""
    band: tuple[float, float] | None = (0.5, 1.5)
    """Lowest and highest token ratio that is kept, both inclusive; null keeps all tokens of a kept sequence."""
    normalize: bool = True
    """Divide the weights by their mean over the remaining tokens of the rollout batch."""

    @model_validator(mode="after")
    def _band_holds_one(self) -> SparseRLConfig:
        if self.band is not None and not 0 < self.band[0] <= 1 <= self.band[1]:
            raise KvrlError(
                f"sparse_rl.band: [{self.band[0]}, {self.band[1]}] does not hold the ratio 1, which means no "
                "mismatch; choose a positive lower value up to 1 and an upper value from 1 on, or null"
            )
        return self

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Correction:
        """`sparse_rl` with these settings."""
        return sparse_rl(log_ratio, mask, self)


def sparse_rl(log_ratio: Tensor, mask: Tensor, config: SparseRLConfig) -> Correction:
    """Which sequences and tokens count, and with which weight (arXiv 2601.10079, section 3).

    log_ratio: [N, C] = dense old log-prob - sampler's, natural log; mask: [N, C] bool; the whole rollout batch
    in one call. A sequence is rejected if any of its tokens has xi < reject_below. In kept sequences, tokens
    outside the band are masked; the remaining ones weigh min(xi, max_weight), divided by the mean of these
    weights over all remaining tokens if `normalize`.

    The result's mask, for denominators and KL term: masked tokens have left it (1/|o_i| counts the remaining
    ones); a rejected sequence stays whole in it, with weight 0, because J averages over all G samples, and so does
    a kept one none of whose tokens is inside the band. slime's correction, on which the released code is built,
    takes the mean over all tokens of a micro-batch, before rejection and band; this one takes it over what remains.

    Metrics, with the prefix "correction/": `ratio_metrics` of the raw xi of all tokens; share_rejected, of
    sequences with active tokens; share_masked (outside the band) and share_clipped (inside, above max_weight),
    both of the tokens of kept sequences.
    """
    log_xi = torch.where(mask, log_ratio.detach(), 0)  # [N, C]
    rejected = (log_xi < math.log(config.reject_below)).any(-1)  # [N]
    kept = mask & ~rejected[:, None]  # [N, C]
    remaining = kept
    if config.band is not None:
        low, high = (math.log(bound) for bound in config.band)
        remaining = kept & (log_xi >= low) & (log_xi <= high)
    highest = math.log(config.max_weight)
    weights = weights_of(log_xi.clamp(max=highest), remaining, config.normalize)  # [N, C]
    metrics = ratio_metrics(log_xi[mask]) | {
        "share_rejected": share(rejected, mask.any(-1)),
        "share_masked": share(kept & ~remaining, kept),
        "share_clipped": share(remaining & (log_xi > highest), kept),
    }
    counted = torch.where(remaining.any(-1, keepdim=True), remaining, mask)  # [N, C]
    return Correction(weights, ~rejected, counted, {f"correction/{name}": value for name, value in metrics.items()})
