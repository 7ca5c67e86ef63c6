"""DPO and IPO against closed forms, and pairs against an independent enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives import dpo_loss, make_pairs, mean_metrics, merge_metrics, sequence_logps

NAN = math.nan


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Policy minus reference: 2 and -1, 0.5 and 0.5, -1 and 1; so d = 3, 0, -2.
CHOSEN, REF_CHOSEN = tensor(-10.0, -5.0, -8.0), tensor(-12.0, -5.5, -7.0)
REJECTED, REF_REJECTED = tensor(-20.0, -6.0, -4.0), tensor(-19.0, -6.5, -5.0)


def loss_of(chosen: Tensor, rejected: Tensor = REJECTED, rows: slice = slice(None), **changes: Any):
    arguments: dict[str, Any] = {"beta": 0.5, "pairs": 3} | changes
    return dpo_loss(chosen[rows], rejected[rows], REF_CHOSEN[rows], REF_REJECTED[rows], **arguments)


def test_sigmoid_by_hand() -> None:
    # -log sigmoid(x) = log(1 + e^-x) at beta d = 1.5, 0, -1.
    expected = (math.log(1 + math.exp(-1.5)) + math.log(2) + math.log(1 + math.e)) / 3
    assert loss_of(CHOSEN)[0].item() == pytest.approx(expected, rel=1e-12)


def test_ipo_by_hand() -> None:
    # The target is 1 / (2 * 0.5) = 1: (3 - 1)^2, (0 - 1)^2, (-2 - 1)^2.
    assert loss_of(CHOSEN, loss_type="ipo")[0].item() == pytest.approx((4 + 1 + 9) / 3, rel=1e-12)
    # beta 0.1: the target is 5.
    assert loss_of(CHOSEN, loss_type="ipo", beta=0.1)[0].item() == pytest.approx((4 + 25 + 49) / 3, rel=1e-12)


def test_metrics_by_hand() -> None:
    _, metrics = loss_of(CHOSEN)
    assert mean_metrics(metrics) == pytest.approx(
        {
            "rewards/chosen/mean": 0.5 * (2 + 0.5 - 1) / 3,
            "rewards/rejected/mean": 0.5 * (-1 + 0.5 + 1) / 3,
            "rewards/margins/mean": 0.5 * (3 + 0 - 2) / 3,
            "rewards/accuracies/mean": 1 / 3,  # a margin of 0 is no success
            "logps/chosen/mean": -23 / 3,
            "logps/rejected/mean": -10.0,
        }
    )


def test_gradient_by_hand() -> None:
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    gradients = torch.autograd.grad(loss_of(chosen, rejected)[0], (chosen, rejected))
    # Eq. 7's: -beta sigmoid(-beta d) for the chosen, the opposite for the rejected.
    expected = -0.5 * torch.sigmoid(-tensor(1.5, 0.0, -1.0)) / 3
    torch.testing.assert_close(gradients[0], expected)
    torch.testing.assert_close(gradients[1], -expected)
    gradients = torch.autograd.grad(loss_of(chosen, rejected, loss_type="ipo")[0], (chosen, rejected))
    torch.testing.assert_close(gradients[0], 2 * tensor(2.0, -1.0, -3.0) / 3)
    torch.testing.assert_close(gradients[1], -gradients[0])


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_gradient_against_finite_differences(loss_type: str) -> None:
    inputs = (CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda c, r: loss_of(c, r, loss_type=loss_type)[0], inputs)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("cut", [[1, 2], [1, 1, 1], [0, 3]])
def test_any_cut_gives_the_same_loss_gradient_and_metrics(loss_type: str, cut: list[int]) -> None:
    chosen = CHOSEN.clone().requires_grad_()
    whole, whole_metrics = loss_of(chosen, loss_type=loss_type)
    (whole_gradient,) = torch.autograd.grad(whole, chosen)
    parts, start = [], 0
    for size in cut:
        parts.append(loss_of(chosen, rows=slice(start, start + size), loss_type=loss_type))
        start += size
    loss = sum(part[0] for part in parts)
    torch.testing.assert_close(loss, whole)
    (gradient,) = torch.autograd.grad(loss, chosen)
    torch.testing.assert_close(gradient, whole_gradient)
    assert mean_metrics(merge_metrics(part[1] for part in parts)) == pytest.approx(mean_metrics(whole_metrics))


def test_policy_equal_to_reference_is_log_two_with_all_rewards_zero() -> None:
    """The first optimiser step: every ratio of policy to reference is 1."""
    arguments = (REF_CHOSEN, REF_REJECTED, REF_CHOSEN, REF_REJECTED)
    loss, metrics = dpo_loss(*arguments, beta=0.5, pairs=3)
    assert loss.item() == pytest.approx(math.log(2), rel=1e-12)
    summary = mean_metrics(metrics)
    assert summary["rewards/chosen/mean"] == summary["rewards/rejected/mean"] == summary["rewards/margins/mean"] == 0
    loss, _ = dpo_loss(*arguments, beta=0.5, pairs=3, loss_type="ipo")
    assert loss.item() == pytest.approx(1.0)


def test_extreme_margins_stay_finite() -> None:
    chosen = tensor(1e4, -1e4, 0.0).requires_grad_()
    loss, _ = loss_of(chosen)
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient.tolist()[:2] == pytest.approx([0.0, -0.5 / 3])


def test_a_step_without_pairs_is_zero_with_a_gradient() -> None:
    chosen = CHOSEN.clone().requires_grad_()
    loss, metrics = loss_of(chosen, rows=slice(0, 0), pairs=0)
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert loss.item() == 0.0 and (gradient == 0).all() and mean_metrics(metrics) == {}


@pytest.mark.parametrize("padding", [math.inf, -math.inf, NAN])
def test_sequence_logps_by_hand_and_clean_of_padding(padding: float) -> None:
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    logps = torch.where(mask, torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, -5.0], [0.0] * 3]), padding)
    logps.requires_grad_()
    assert sequence_logps(logps, mask).tolist() == [-3.0, -8.0, 0.0]
    averaged = sequence_logps(logps, mask, average=True)
    assert averaged.tolist() == [-1.5, -4.0, 0.0]
    (gradient,) = torch.autograd.grad(averaged.sum(), logps)
    assert gradient.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0] * 3]


def test_the_averaged_ipo_aims_at_a_margin_per_token() -> None:
    """TRL's DPOTrainer: both sides divided by their own length before the square."""
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    logps = tensor(-1.0, -1.0, -1.0, -1.0, -3.0, -3.0, 0.0, 0.0).view(2, 4)
    policy = sequence_logps(logps, mask, average=True)
    reference = sequence_logps(logps - tensor(0.5, 1.0, 1.5, 1.0, 0.25, 0.75, 0.0, 0.0).view(2, 4), mask, average=True)
    loss, _ = dpo_loss(policy[:1], policy[1:], reference[:1], reference[1:], beta=0.25, loss_type="ipo", pairs=1)
    assert loss.item() == pytest.approx(((4.0 / 4 - 1.0 / 2) - 2.0) ** 2)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(KvrlError, match="loss_type: 'hinge' is unknown; use one of 'sigmoid', 'ipo'"):
        loss_of(CHOSEN, loss_type="hinge")


def pairs_of(rewards: list[float], size: int, mode: str = "best_worst") -> list[tuple[int, int]]:
    pairs = make_pairs(torch.tensor(rewards), size, mode)
    return list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True))


def test_best_against_worst_by_hand() -> None:
    assert pairs_of([1.0, 3.0, 2.0, 0.0, -1.0, -3.0], 3) == [(1, 0), (3, 5)]
    assert pairs_of([0.0, 1.0, 5.0, 4.0], 2) == [(1, 0), (2, 3)]


def test_ties_go_to_the_first_sample() -> None:
    assert pairs_of([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], 6) == [(0, 1)]
    assert pairs_of([0.0, 0.0, 1.0, 1.0], 4) == [(2, 0)]


def test_equal_and_missing_rewards_give_no_pair() -> None:
    assert pairs_of([0.1, 0.1, 0.1, NAN, 0.5, NAN, NAN, NAN, NAN], 3) == []
    assert pairs_of([NAN, 0.5, 0.25, NAN, NAN, 7.0], 3) == [(1, 2)]
    result = make_pairs(torch.tensor([0.1, 0.1, NAN, 0.5, 1.0, 0.0, NAN, NAN]), 2)
    assert result.groups_without_pair == 3
    assert result.metrics() == {"pairs": 1.0, "groups_without_pair": 3.0}
    assert result.chosen.dtype == torch.int64


def test_all_pairs_against_an_enumeration() -> None:
    rewards = [1.0, NAN, 2.0, 1.0, 0.0, 0.0, 0.0, 3.0]
    expected = [
        (i, j) for i in range(8) for j in range(8) if i // 4 == j // 4 and rewards[i] > rewards[j]
    ]  # NaN compares False
    assert pairs_of(rewards, 4, "all") == expected == [(2, 0), (2, 3), (7, 4), (7, 5), (7, 6)]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(KvrlError, match="num_generations: 4 does not divide the 6 rewards"):
        make_pairs(torch.zeros(6), 4)
    with pytest.raises(KvrlError, match="pairs: 'random' is unknown"):
        make_pairs(torch.zeros(6), 3, "random")
