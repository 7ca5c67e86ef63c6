"""Objectives as pure functions: advantages, policy-gradient losses, corrections, KL estimators."""

from kvrl.objectives.advantages import Advantages, group_advantages, overlong_penalty
from kvrl.objectives.corrections import Correction, CorrectionConfig, correction
from kvrl.objectives.kl import k1, k2, k3
from kvrl.objectives.losses import LossNormaliser, LossType, mean_metrics, merge_metrics, policy_loss

__all__ = [
    "Advantages",
    "Correction",
    "CorrectionConfig",
    "LossNormaliser",
    "LossType",
    "correction",
    "group_advantages",
    "k1",
    "k2",
    "k3",
    "mean_metrics",
    "merge_metrics",
    "overlong_penalty",
    "policy_loss",
]
