"""What the corrections share: statistics of importance ratios and their normalisation, from log-ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG = 700.0  # exp of it is still a double


def ratio_metrics(log_ratios: Tensor) -> dict[str, float]:
    """Statistics of exp(log_ratios) [M], in logs so that none of them overflows; empty for M = 0.

    ratio_min, ratio_mean, ratio_max (each capped at e^700), and effective_sample_size: (sum w)^2 / sum w^2 as
    a share of M, so 1 = no mismatch.
    """
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


def weights_of(log_weights: Tensor, active: Tensor, normalize: bool) -> Tensor:
    """exp(log_weights) where active, 0 elsewhere; normalize: divided by their mean over the active ones.

    log_weights: any shape, finite or -inf; active: bool of that shape. Equal weights normalise to exactly 1.
    """
    if normalize and active.any():
        # Against the largest: weights that all underflow would be 0 / 0.
        log_weights = log_weights - log_weights[active].max()
        weights = log_weights.double().exp()
        weights = (weights / weights[active].mean()).to(log_weights.dtype)
    else:
        weights = log_weights.exp()
    return torch.where(active, weights, 0)


def share(part: Tensor, whole: Tensor) -> float:
    """True entries of `part` as a share of those of `whole`; 0 where there are none."""
    return float(part.sum()) / max(int(whole.sum()), 1)


def _exp(value: float) -> float:
    return math.exp(min(value, MAX_LOG))
