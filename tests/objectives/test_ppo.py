"""PPO's parts against values worked out by hand and an independent recursion, and the critic's gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrl.objectives import (
    LossNormaliser,
    explained_variance,
    gae,
    k1,
    k3,
    mean_metrics,
    merge_metrics,
    token_rewards,
    value_loss,
    whiten,
)

# Three tokens; two with a hole between them; none.
MASK = torch.tensor([[True, True, True, False], [True, False, True, False], [False, False, False, False]])
PADDINGS = [math.inf, -math.inf, math.nan]


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


REWARDS = tensor([[0.1, 0.2, 1.0, 0.0], [0.3, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
VALUES = tensor([[0.5, 0.4, 0.6, 9.0], [0.7, 9.0, 0.8, 9.0], [9.0, 9.0, 9.0, 9.0]])


def test_the_score_comes_with_the_last_sampled_token() -> None:
    kl = tensor([[0.1, -0.2, 0.3, 9.0], [0.4, 9.0, 0.5, 9.0], [9.0, 9.0, 9.0, 9.0]])
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), kl, MASK, 0.5)
    expected = tensor([[-0.05, 0.1, 1 - 0.15, 0.0], [-0.2, 0.0, 2 - 0.25, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_rewards_without_a_kl_term_and_with_either_estimator() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert token_rewards(scores, None, MASK, 0.5).tolist() == [[0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 0, 0]]
    logps, ref = torch.full((3, 4), -1.0, dtype=torch.float64), torch.full((3, 4), -1.5, dtype=torch.float64)
    logps.requires_grad_()
    rewards = token_rewards(scores, k1(logps, ref), MASK, 0.1)
    assert rewards[0].tolist() == pytest.approx([-0.05, -0.05, 0.95, 0.0]) and not rewards.requires_grad
    third = math.exp(-0.5) - 1 + 0.5
    assert token_rewards(scores, k3(logps, ref), MASK, 0.1)[1].tolist() == pytest.approx(
        [-0.1 * third, 0, 2 - 0.1 * third, 0]
    )


def test_equal_log_probs_give_the_score_alone() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0])
    logps = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for estimate in (k1, k3):
        assert torch.equal(
            token_rewards(scores, estimate(logps, logps), MASK, 0.1), token_rewards(scores, None, MASK, 0)
        )


@pytest.mark.parametrize("padding", PADDINGS)
def test_rewards_are_clean_of_padding_and_missing_scores(padding: float) -> None:
    kl = torch.where(MASK, 0.25, padding)
    rewards = token_rewards(torch.tensor([1.0, 2.0, math.nan]), kl, MASK, 1.0)
    assert rewards.tolist() == [[-0.25, -0.25, 0.75, 0.0], [-0.25, 0.0, 1.75, 0.0], [0.0] * 4]


def test_gae_by_hand() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8)
    # First sequence, backwards; gamma lam = 0.72 and the value after the end is 0.
    third = 1.0 - 0.6
    second = 0.2 + 0.9 * 0.6 - 0.4 + 0.72 * third
    first = 0.1 + 0.9 * 0.4 - 0.5 + 0.72 * second
    # Second: its second token follows the first directly, whatever stands in the hole.
    after = 2.0 - 0.8
    before = 0.3 + 0.9 * 0.8 - 0.7 + 0.72 * after
    expected = tensor([[first, second, third, 0.0], [before, 0.0, after, 0.0], [0.0] * 4])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, torch.where(MASK, expected + VALUES, 0))


def test_gae_with_lambda_one_is_the_discounted_return_and_with_zero_the_td_error() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=0.9, lam=1.0)
    first = 0.1 + 0.9 * 0.2 + 0.81 * 1.0
    assert returns[0].tolist() == pytest.approx([first, 0.2 + 0.9, 1.0, 0.0])
    assert returns[1].tolist() == pytest.approx([0.3 + 0.9 * 2.0, 0.0, 2.0, 0.0])
    advantages, _ = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.0)
    assert advantages[0].tolist() == pytest.approx([0.1 + 0.4 - 0.5, 0.2 + 0.6 - 0.4, 1.0 - 0.6, 0.0])


def test_gae_of_each_sequence_alone_without_holes_or_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(5, 9, generator=generator) < 0.6
    advantages, returns = gae(rewards, values, mask, gamma=0.95, lam=0.9)
    for i in range(5):
        r, v = rewards[i, mask[i]].tolist(), values[i, mask[i]].tolist()
        v.append(0.0)
        deltas = [r[t] + 0.95 * v[t + 1] - v[t] for t in range(len(r))]
        # The sum of discounted TD errors, not the recursion.
        expected = [sum((0.95 * 0.9) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(r))]
        assert advantages[i, mask[i]].tolist() == pytest.approx(expected)
        assert returns[i, mask[i]].tolist() == pytest.approx([a + b for a, b in zip(expected, v, strict=False)])
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()


@pytest.mark.parametrize("padding", PADDINGS)
def test_gae_is_clean_of_padding_and_carries_no_gradient(padding: float) -> None:
    clean = gae(REWARDS, VALUES, MASK, 0.9, 0.8)
    values = torch.where(MASK, VALUES, padding).requires_grad_()
    dirty = gae(torch.where(MASK, REWARDS, padding), values, MASK, 0.9, 0.8)
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    assert not dirty[0].requires_grad and not dirty[1].requires_grad


def test_whiten_by_hand() -> None:
    # 1, 2, 3, 6 and 8: mean 4, squared deviations 9 + 4 + 1 + 4 + 16 = 34, over 4.
    advantages = tensor([[1.0, 2.0, 3.0, math.nan], [6.0, math.inf, 8.0, 0.0], [7.0] * 4])
    std = math.sqrt(34 / 4 + 1e-8)
    expected = tensor([[-3.0, -2.0, -1.0, 0.0], [2.0, 0.0, 4.0, 0.0], [0.0] * 4]) / std
    torch.testing.assert_close(whiten(advantages, MASK), expected, rtol=1e-12, atol=0)
    assert whiten(advantages.float(), MASK).dtype == torch.float32


def test_whiten_of_equal_one_or_no_advantage_is_zero() -> None:
    assert whiten(torch.full((3, 4), 0.1), MASK).abs().max() < 1e-6
    one = torch.zeros_like(MASK)
    one[0, 1] = True
    assert (whiten(torch.full((3, 4), 7.0), one) == 0).all()
    assert (whiten(torch.full((3, 4), 7.0), MASK & False) == 0).all()


OLD_VALUES = tensor([[0.0, 1.0, 2.0, 9.0], [0.0, 9.0, 1.0, 9.0], [9.0] * 4])
NEW_VALUES = tensor([[0.5, 1.1, 1.5, 9.0], [-0.6, 9.0, 1.0, 9.0], [9.0] * 4])
RETURNS = tensor([[2.0, 2.0, 1.0, 9.0], [0.0, 9.0, 3.0, 9.0], [9.0] * 4])


def loss_of(values: Tensor, rows: slice = slice(None), width: int = 4, **changes: Any):
    arguments: dict[str, Any] = {"cliprange_value": 0.2, "normaliser": LossNormaliser.from_mask(MASK)} | changes
    cut = [x[rows, :width] for x in (values, OLD_VALUES, RETURNS, MASK)]
    return value_loss(*cut, **arguments)


def test_value_loss_by_hand() -> None:
    # Clipped values 0.2, 1.1, 1.8 and -0.2, 1. Errors squared, raw and clipped:
    # 2.25 against 3.24; 0.81 twice; 0.25 against 0.64; 0.36 against 0.04; 4 twice.
    loss, metrics = loss_of(NEW_VALUES)
    assert loss.item() == pytest.approx(0.5 * (3.24 + 0.81 + 0.64 + 0.36 + 4.0) / 5, rel=1e-12)
    summary = mean_metrics(metrics)
    assert summary == pytest.approx({"value/mean": (0.5 + 1.1 + 1.5 - 0.6 + 1.0) / 5, "value_clipped/mean": 2 / 5})
    loss, metrics = loss_of(NEW_VALUES, cliprange_value=10.0)
    assert loss.item() == pytest.approx(0.5 * (2.25 + 0.81 + 0.25 + 0.36 + 4.0) / 5, rel=1e-12)
    assert mean_metrics(metrics)["value_clipped/mean"] == 0.0


def test_unchanged_values_are_not_clipped_and_have_the_plain_gradient() -> None:
    """One optimiser step, detached old values: the gradient is (V - R) / tokens."""
    values = OLD_VALUES.clone().requires_grad_()
    loss, metrics = loss_of(values)
    (gradient,) = torch.autograd.grad(loss, values)
    # The two halves of max share a tie's gradient; both are V - R here.
    torch.testing.assert_close(gradient, torch.where(MASK, OLD_VALUES - RETURNS, 0) / 5)
    assert mean_metrics(metrics)["value_clipped/mean"] == 0.0


def test_value_gradient_against_finite_differences() -> None:
    values = NEW_VALUES.clone().requires_grad_()
    shifted = values.detach() + tensor([[0.01, 0.02, 0.03, 0.0], [0.04, 0.0, 0.05, 0.0], [0.0] * 4])
    assert torch.autograd.gradcheck(lambda v: loss_of(v)[0], (shifted.requires_grad_(),), atol=1e-8)
    (gradient,) = torch.autograd.grad(loss_of(values)[0], values)
    # Where the clipped error is the larger, the value has no gradient: it has moved away from the return enough.
    assert gradient[0, 0] == 0 and gradient[0, 2] == 0
    assert gradient[1, 0].item() == pytest.approx(-0.6 / 5)
    assert (gradient[~MASK] == 0).all()


def test_any_cut_gives_the_same_value_loss_gradient_and_metrics() -> None:
    values = NEW_VALUES.clone().requires_grad_()
    whole, whole_metrics = loss_of(values)
    (whole_gradient,) = torch.autograd.grad(whole, values)
    parts = [loss_of(values, slice(0, 1), 3), loss_of(values, slice(1, 2)), loss_of(values, slice(2, 3), 1)]
    loss = sum(part[0] for part in parts)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-14)
    assert mean_metrics(merge_metrics(part[1] for part in parts)) == pytest.approx(mean_metrics(whole_metrics))
    assert parts[2][0].item() == 0.0  # no active token


@pytest.mark.parametrize("padding", PADDINGS)
def test_value_loss_is_clean_of_padding(padding: float) -> None:
    clean = NEW_VALUES.clone().requires_grad_()
    expected, _ = loss_of(clean)
    (expected_gradient,) = torch.autograd.grad(expected, clean)
    dirty = torch.where(MASK, NEW_VALUES, padding).requires_grad_()
    loss, metrics = value_loss(
        dirty,
        torch.where(MASK, OLD_VALUES, padding),
        torch.where(MASK, RETURNS, padding),
        MASK,
        cliprange_value=0.2,
        normaliser=LossNormaliser.from_mask(MASK),
    )
    (gradient,) = torch.autograd.grad(loss, dirty)
    assert torch.equal(loss, expected) and torch.equal(gradient, expected_gradient)
    assert all(math.isfinite(value) for value in mean_metrics(metrics).values())


def test_a_step_without_active_tokens_is_zero_with_a_gradient() -> None:
    values = NEW_VALUES.clone().requires_grad_()
    loss, metrics = value_loss(
        values,
        OLD_VALUES,
        RETURNS,
        MASK & False,
        cliprange_value=0.2,
        normaliser=LossNormaliser.from_mask(MASK & False),
    )
    (gradient,) = torch.autograd.grad(loss, values)
    assert loss.item() == 0.0 and (gradient == 0).all() and mean_metrics(metrics) == {}


def test_explained_variance_by_hand() -> None:
    mask = torch.tensor([[True, True, True, False]])
    returns = tensor([[1.0, 2.0, 6.0, math.nan]])  # mean 3, squared deviations 4 + 1 + 9
    values = tensor([[2.0, 2.0, 5.0, math.inf]])  # errors -1, 0, 1: squared 2
    name = "explained_variance"
    assert explained_variance(values, returns, mask)[name] == pytest.approx(1 - 2 / 14)
    assert explained_variance(returns - 5, returns, mask)[name] == 1.0  # a constant offset is no variance
    assert explained_variance(torch.full((1, 4), 3.0), returns, mask)[name] == 0.0
    assert explained_variance(-returns, returns, mask)[name] == pytest.approx(-3.0)


def test_explained_variance_is_left_out_where_there_is_none_to_explain() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert explained_variance(torch.randn(1, 4), torch.full((1, 4), 0.1), mask) == {}
    assert explained_variance(torch.randn(1, 4), torch.randn(1, 4), mask & False) == {}
