"""Objectives as pure functions: advantages, losses, corrections, preference pairs, distillation, KL estimators."""

from kvrl.objectives.advantages import Advantages, group_advantages, overlong_penalty, rloo_advantages
from kvrl.objectives.corrections import Correction, CorrectionConfig, correction
from kvrl.objectives.distill import controlled_weight, kl_divergence, top_k_error, warmup
from kvrl.objectives.kl import ESTIMATORS, k1, k2, k3
from kvrl.objectives.losses import LossNormaliser, LossType, mean_metrics, merge_metrics, policy_loss
from kvrl.objectives.ppo import explained_variance, gae, token_rewards, value_loss, whiten
from kvrl.objectives.preference import Pairs, dpo_loss, make_pairs, sequence_logps
from kvrl.objectives.presets import PRESETS
from kvrl.objectives.sparse_rl import SparseRLConfig, sparse_rl

__all__ = [
    "ESTIMATORS",
    "PRESETS",
    "Advantages",
    "Correction",
    "CorrectionConfig",
    "LossNormaliser",
    "LossType",
    "Pairs",
    "SparseRLConfig",
    "controlled_weight",
    "correction",
    "dpo_loss",
    "explained_variance",
    "gae",
    "group_advantages",
    "k1",
    "k2",
    "k3",
    "kl_divergence",
    "make_pairs",
    "mean_metrics",
    "merge_metrics",
    "overlong_penalty",
    "policy_loss",
    "rloo_advantages",
    "sequence_logps",
    "sparse_rl",
    "token_rewards",
    "top_k_error",
    "value_loss",
    "warmup",
    "whiten",
]
