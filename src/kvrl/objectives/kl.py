"""Estimators of KL(policy || reference) from tokens that the policy sampled.

They are those of Schulman's note "Approximating KL Divergence", for d = log policy - log reference (natural
log, any shape). Both log-probs must be in the same view: the learner's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d: unbiased, signed, high variance. For logging only: as a loss its gradient is zero in expectation."""
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d^2 / 2: biased, low variance, and its gradient is the gradient of the KL in expectation."""
    return 0.5 * (logps - ref_logps).square()


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased and never negative (GRPO, arXiv 2402.03300, eq. 4; TRL's KL term)."""
    log_ratio = ref_logps - logps
    # expm1: exp(x) - 1 loses every digit for the small differences of the first steps.
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
