"""PPO's parts beside the policy loss: rewards per token, advantages from a critic, the critic's loss.

N = sequences, C = completion tokens (right-padded). Tokens outside the mask are padding, or tokens that the policy
did not sample (tool or user turns): they are no step of the episode. values[t] is the critic's value of the state in
which token t is sampled, in the same view as the policy's log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrl.objectives.losses import LossNormaliser, Metrics, total

VARIANCE_EPSILON = 1e-8  # TRL's and verl's


def token_rewards(scores: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """-kl_coef * kl at every sampled token, and the completion's score on the last (arXiv 1909.08593, eq. 2).

    scores: [N]; kl: [N, C] an estimate of the KL to the reference per token (`kl.ESTIMATORS`: k1 as in the
    paper, or k3, whose penalty is never negative), None for no term; mask: [N, C] bool -> [N, C], 0 outside
    the mask. The KL here is a number, not a loss: k1 is unbiased and right.
    """
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))  # [N, C]
    rewards = torch.where(last, scores[:, None], 0)  # [N, C]
    if kl is not None:
        rewards = rewards - kl_coef * torch.where(mask, kl.detach(), 0)
    return rewards


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the critic's targets, both [N, C] (arXiv 1506.02438, eq. 16).

    rewards, values: [N, C]; mask: [N, C] bool. delta_t = r_t + gamma V_next - V_t and A_t = delta_t +
    gamma lam A_next, where next is the sequence's next token inside the mask: a hole costs no discount, and its
    value is not bootstrapped from. After the last token the value is 0, for truncated completions as for finished
    ones (as in TRL and verl: the score judges the text as it is; to take truncated ones out, mask them). Returns
    are A + V. Both are 0 outside the mask and carry no gradient.
    """
    rewards, values = rewards.detach(), torch.where(mask, values.detach(), 0)  # [N, C]
    advantages = torch.zeros_like(values)  # [N, C]
    next_value = next_advantage = values.new_zeros(values.shape[0])  # [N]
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # [N]
        advantage = delta + gamma * lam * next_advantage  # [N]
        advantages[:, t] = torch.where(mask[:, t], advantage, 0)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages [N, C] with mean 0 and variance 1 over the mask [N, C]; 0 outside it, and where all are equal.

    Over one rollout batch, before it is cut. The variance is the unbiased one + 1e-8, as in TRL and verl.
    """
    count = mask.sum()
    inside = torch.where(mask, advantages, 0).double()  # [N, C]
    centred = torch.where(mask, inside - inside.sum() / count, 0)  # [N, C]
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return (centred * (variance + VARIANCE_EPSILON).rsqrt()).to(advantages.dtype)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    cliprange_value: float,
    normaliser: LossNormaliser,
) -> tuple[Tensor, Metrics]:
    """This micro-batch's share of the critic's loss, and its metrics. The shares of a step add up.

    values, old_values (the critic's at the start of the step's updates), returns: [N, C]; mask: [N, C] bool.
    0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), averaged over all tokens of the optimiser step,
    as in TRL and verl. A micro-batch without active tokens gives loss 0 and gradient 0.

    Metrics: value, and value_clipped: the share of tokens where the clipped term is the larger one.
    """
    # Before the arithmetic: padding may hold anything, and 0 * inf would be NaN in the gradient.
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))  # [N, C]
    clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)  # [N, C]
    error, clipped_error = (values - returns).square(), (clipped - returns).square()  # [N, C]
    loss = 0.5 * torch.maximum(error, clipped_error).sum() / max(normaliser.tokens, 1)
    return loss, {**total("value", values, mask), **total("value_clipped", clipped_error > error, mask)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns) over the mask [N, C], for the log; empty where Var(returns) is 0.

    1: the critic predicts the returns; 0: no better than their mean; negative: worse.
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()  # [M]
    if target.numel() == 0 or target.min() == target.max():
        return {}
    return {"explained_variance": 1.0 - float(error.var(correction=0) / target.var(correction=0))}
