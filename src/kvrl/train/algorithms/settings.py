"""The settings of each algorithm. A section is read if `algorithm` names it; the others may stand unused."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvrl.train.section import NonNegative, Positive, Section, Share


class OverlongPenalty(Section):
    cache_length: int = Field(ge=1)
    """Tokens before max_completion_length over which the reward falls linearly by 1 (DAPO, eq. 13)."""


class DynamicSampling(Section):
    max_rounds: int = Field(ge=1)
    """Rollout rounds that may be spent to replace groups whose rewards are all equal (DAPO)."""


class AlgorithmSettings(Section):
    """What every algorithm has."""

    num_generations: int = Field(8, ge=2)
    """Completions of one prompt. The sampler follows it."""
    beta: NonNegative = 0.0
    """Weight of the KL to the reference policy, in the learner's view. 0: no reference is computed."""
    num_iterations: int = Field(1, ge=1)
    """Optimiser passes over one rollout batch."""
    num_minibatches: int = Field(1, ge=1)
    """Optimiser steps that one pass over the rollout batch is split into."""
    old_logprobs: Literal["sampler", "recompute"] | None = None
    """Denominator of the ratio: the sampler's own log-probs, or a forward pass in the learner's view. Default: the
    learner's own, detached, if a rollout batch has one update; the sampler's where they are the same (float32, views
    alike) and save a pass; else recompute."""
    mask_truncated_completions: bool = False
    """Leave completions that hit max_completion_length out of the loss."""
    overlong_penalty: OverlongPenalty | None = None
    """Soft penalty on the length of completions."""


class ClippedSettings(AlgorithmSettings):
    epsilon: NonNegative = 0.2
    """Clip range of the ratio below 1."""
    epsilon_high: NonNegative | None = None
    """Clip range of the ratio above 1. Default: epsilon."""


class GrpoSettings(ClippedSettings):
    loss_type: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] | None = None
    """How tokens are weighted and ratios clipped. Default: grpo under method sparse_rl, whose objective it is (arXiv
    2601.10079, section 3), else dapo."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that divides the advantages: the group's, the batch's, or none."""
    dynamic_sampling: DynamicSampling | None = None
    """Refill groups without signal."""


class RlooSettings(ClippedSettings):
    """`beta` weighs the KL in the reward, summed over the completion (arXiv 2402.14740, eq. 2). The completion is one
    action: with several updates its ratio, the product of its tokens', is what `epsilon` clips, as in TRL."""


class PpoSettings(ClippedSettings):
    num_generations: int = Field(1, ge=1)
    """Completions of one prompt. The sampler follows it."""
    num_iterations: int = Field(4, ge=1)
    """Optimiser passes over one rollout batch."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where `beta` acts: subtracted from each token's reward (k1), or added to the loss (k3)."""
    gamma: Share = 1.0
    """Discount of a token's reward."""
    lam: Share = 0.95
    """Trace decay of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Scale the batch's advantages to mean 0 and standard deviation 1."""
    critic: Literal["head", "model"] = "head"
    """A value head on the policy's own trunk, or a separate model that starts as a copy of the policy."""
    critic_learning_rate: Positive | None = None
    """Peak learning rate of the critic's own weights. Default: train.learning_rate."""
    critic_warmup_steps: int = Field(0, ge=0)
    """First rollout batches on which the critic alone learns."""
    vf_coef: NonNegative = 0.1
    """Weight of the value loss."""
    cliprange_value: Positive = 0.2
    """A value may move this far from its old one before its loss stops falling."""


class OnlineDpoSettings(AlgorithmSettings):
    num_generations: int = Field(2, ge=2)
    """Completions of one prompt, of which pairs are made. The sampler follows it."""
    beta: Positive = 0.1
    """Strength of the KL constraint: the scale of the implicit reward."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss (arXiv 2305.18290, eq. 7) or IPO's squared loss (arXiv 2310.12036, eq. 17)."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Of each prompt: the best completion against the worst, or every two whose rewards differ."""
    average_logps: bool = False
    """Take the mean log-prob per token instead of the completion's (TRL's DPO trainer under ipo)."""
