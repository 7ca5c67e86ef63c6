"""Sparse-RL's rejection and weights against values worked out by hand, and in the loss against its J."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kvrl.objectives import LossNormaliser, SparseRLConfig, group_advantages, policy_loss, sparse_rl

# Sequence 0 is kept; 1 is rejected by its second token; 2 is kept, with one token and a rejecting pad.
XI = torch.tensor([[1.2, 0.8, 1.8, 0.4], [1.0, 5e-5, 1.4, 0.6], [0.6, 1e-9, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, True], [True, True, True, False], [True, False, False, False]])
PURE: dict[str, Any] = {"band": None, "normalize": False}


def result_of(xi: Tensor = XI, mask: Tensor = MASK, **settings: Any):
    return sparse_rl(xi.log(), mask, SparseRLConfig(**settings))


def expect(weights: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_released_settings_by_hand() -> None:
    result = result_of()
    assert result.keep.tolist() == [True, False, True]
    # In the band [0.5, 1.5] remain 1.2, 0.8 and 0.6: mean 2.6 / 3.
    mean = 2.6 / 3
    expect(result.weights, [[1.2 / mean, 0.8 / mean, 0.0, 0.0], [0.0] * 4, [0.6 / mean, 0.0, 0.0, 0.0]])
    # 1.8 and 0.4 have left the denominators; the rejected sequence stays in them, whole.
    assert result.mask.tolist() == [[True, True, False, False], [True, True, True, False], [True, False, False, False]]
    # What the band masks is not clipped as well.
    assert result.metrics["correction/share_masked"] == 2 / 5 and result.metrics["correction/share_clipped"] == 0.0


def test_the_papers_text_by_hand() -> None:
    result = result_of(**PURE)
    expect(result.weights, [[1.2, 0.8, 1.5, 0.4], [0.0] * 4, [0.6, 0.0, 0.0, 0.0]])
    assert torch.equal(result.mask, MASK)
    assert result_of(reject_below=4e-5, **PURE).keep.all()  # 5e-5 is not below
    assert result_of(reject_below=0.5, **PURE).keep.tolist() == [False, False, True]
    expect(
        result_of(max_weight=1.0, **PURE).weights,
        [[1.0, 0.8, 1.0, 0.4], [0.0] * 4, [0.6, 0.0, 0.0, 0.0]],
    )


def test_truncation_comes_before_the_mean() -> None:
    # min(xi, 1.5): 1.2, 0.8, 1.5, 0.4, 0.6, mean 0.9; the rejected sequence has no part in it.
    result = result_of(band=None)
    expect(
        result.weights,
        [[1.2 / 0.9, 0.8 / 0.9, 1.5 / 0.9, 0.4 / 0.9], [0.0] * 4, [0.6 / 0.9, 0.0, 0.0, 0.0]],
    )
    # A band wider than max_weight: 1.8 remains and is truncated, 0.4 is masked. Mean (1.2 + .8 + 1.5 + .6) / 4.
    mean = 4.1 / 4
    expect(
        result_of(band=(0.5, 2.0)).weights,
        [[1.2 / mean, 0.8 / mean, 1.5 / mean, 0.0], [0.0] * 4, [0.6 / mean, 0.0, 0.0, 0.0]],
    )


def test_bounds_are_inclusive() -> None:
    log_xi = torch.tensor([[math.log(0.5), math.log(1.5), math.log(1e-4)]], dtype=torch.float64)
    result = sparse_rl(log_xi, torch.ones(1, 3, dtype=torch.bool), SparseRLConfig(normalize=False))
    assert result.keep.all()
    expect(result.weights, [[0.5, 1.5, 0.0]])
    assert result.metrics["correction/share_masked"] == 1 / 3 and result.metrics["correction/share_clipped"] == 0.0


def test_metrics_are_of_the_raw_ratios() -> None:
    metrics = result_of(band=(0.5, 2.0)).metrics
    raw = [1.2, 0.8, 1.8, 0.4, 1.0, 5e-5, 1.4, 0.6]
    assert metrics == pytest.approx(
        {
            "correction/ratio_min": 5e-5,
            "correction/ratio_mean": sum(raw) / 8,
            "correction/ratio_max": 1.8,
            "correction/effective_sample_size": sum(raw) ** 2 / sum(x * x for x in raw) / 8,
            "correction/share_rejected": 1 / 3,
            "correction/share_masked": 1 / 5,  # 0.4, of the five tokens of kept sequences
            "correction/share_clipped": 1 / 5,  # 1.8
        }
    )


def test_a_sequence_wholly_outside_the_band_stays_in_the_denominators() -> None:
    xi = torch.tensor([[1.9, 0.3], [1.0, 1.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    result = result_of(xi, mask)
    assert result.keep.all() and torch.equal(result.mask, mask)
    expect(result.weights, [[0.0, 0.0], [1.0, 1.0]])
    assert result.metrics["correction/share_masked"] == 1 / 2


@pytest.mark.parametrize("settings", [{}, PURE, {"band": None}, {"normalize": False}])
def test_equal_log_probs_change_nothing(settings: dict[str, Any]) -> None:
    """Replay, one optimiser step, detached: weights exactly 1, nothing rejected, nothing masked."""
    logps = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) - 2
    mask = torch.arange(11) < torch.tensor([11, 1, 4, 0, 7, 3, 10])[:, None]
    result = sparse_rl(logps.detach() - logps, mask, SparseRLConfig(**settings))
    assert torch.equal(result.weights, mask.float()) and torch.equal(result.mask, mask)
    assert result.keep.all()
    assert result.metrics["correction/ratio_min"] == result.metrics["correction/ratio_max"] == 1.0
    assert not any(value for name, value in result.metrics.items() if "share" in name)


def test_everything_rejected_is_said_and_has_no_weight() -> None:
    xi = torch.full((2, 2), 1e-9, dtype=torch.float64)
    mask = torch.tensor([[True, True], [False, False]])
    result = result_of(xi, mask)
    assert result.keep.tolist() == [False, True]
    assert (result.weights == 0).all() and torch.equal(result.mask, mask)
    assert result.metrics["correction/share_rejected"] == 1.0  # of the sequences with tokens
    assert result.metrics["correction/share_masked"] == result.metrics["correction/share_clipped"] == 0.0


def test_no_active_token_at_all() -> None:
    result = result_of(mask=MASK & False)
    assert result.keep.all() and (result.weights == 0).all()
    assert "correction/ratio_mean" not in result.metrics


@pytest.mark.parametrize("padding", [math.inf, -math.inf, math.nan])
def test_padding_may_hold_anything(padding: float) -> None:
    dirty = sparse_rl(torch.where(MASK, XI.log(), padding), MASK, SparseRLConfig())
    clean = result_of()
    assert torch.equal(dirty.weights, clean.weights) and torch.equal(dirty.mask, clean.mask)
    assert dirty.metrics == clean.metrics


def test_a_token_that_the_dense_policy_excludes_rejects_without_nan() -> None:
    xi = torch.tensor([[0.0, 1.0], [1.2, 0.8]], dtype=torch.float64)
    result = result_of(xi, torch.ones(2, 2, dtype=torch.bool))
    assert result.keep.tolist() == [False, True]
    expect(result.weights, [[0.0, 0.0], [1.2, 0.8]])
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_weights_carry_no_gradient() -> None:
    log_ratio = XI.log().requires_grad_()
    assert not sparse_rl(log_ratio, MASK, SparseRLConfig()).weights.requires_grad


def test_in_the_loss_it_is_the_papers_objective() -> None:
    """J by hand: advantages over all G, 1/G over all G, 1/|o_i| over what remains, min of clipped terms, KL."""
    result = result_of(band=(0.5, 1.5), normalize=False)
    advantages = group_advantages(torch.tensor([2.0, 0.0, 1.0]), 3, "none").values.double()  # 1, -1, 0
    advantages[2] = -2.0  # so that the third term counts
    w = torch.tensor([[1.5, 0.9, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]], dtype=torch.float64)
    old = torch.full((3, 4), -1.0, dtype=torch.float64)
    loss, _ = policy_loss(
        old + w.log(),
        old,
        advantages,
        result.mask,
        loss_type="grpo",
        epsilon=0.2,
        normaliser=LossNormaliser.from_mask(result.mask),
        max_completion_length=4,
        token_weights=result.weights,
        ref_logps=old + w.log() - math.log(2.0),
        beta=0.1,
    )
    kl = 0.5 + math.log(2) - 1  # k3 at policy / reference = 2, the same at every token
    first = (1.2 * 1.2 + 0.8 * 0.9) / 2  # A = 1: min(1.5, 1.2), 0.9
    third = 0.6 * -2 * 0.8  # A = -2: min(0.5 * -2, 0.8 * -2)
    assert loss.item() == pytest.approx(-(first + 0 + third) / 3 + 0.1 * kl, rel=1e-12)


def test_any_cut_of_the_corrected_batch_gives_the_same_loss() -> None:
    generator = torch.Generator().manual_seed(3)
    logps = (torch.randn(6, 5, generator=generator, dtype=torch.float64) - 2).requires_grad_()
    old = logps.detach() + 0.2 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    log_xi = 0.5 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    log_xi[2, 1] = -12.0
    mask = torch.arange(5) < torch.tensor([5, 1, 4, 0, 2, 5])[:, None]
    result = sparse_rl(log_xi, mask, SparseRLConfig())
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    normaliser = LossNormaliser.from_mask(result.mask)

    def share(rows: slice) -> Tensor:
        return policy_loss(
            logps[rows], old[rows], advantages[rows], result.mask[rows], loss_type="grpo", epsilon=0.2,
            normaliser=normaliser, max_completion_length=5, token_weights=result.weights[rows],
        )[0]  # fmt: skip

    whole = share(slice(None))
    parts = share(slice(0, 1)) + share(slice(1, 4)) + share(slice(4, 6))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(parts, logps)
    (whole_gradient,) = torch.autograd.grad(whole, logps)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-14)
    assert (gradient[2] == 0).all() and gradient[0].abs().sum() > 0  # the rejected one, and a kept one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"band": (0.0, 1.5)}, r"sparse_rl\.band: \[0\.0, 1\.5\] does not hold the ratio 1"),
        ({"band": (1.1, 1.5)}, "does not hold the ratio 1"),
        ({"band": (0.5, 0.9)}, "does not hold the ratio 1"),
        ({"reject_below": 0.0}, "greater than 0"),
        ({"reject_below": 1.0}, "less than 1"),
        ({"max_weight": 0.9}, "greater than or equal to 1"),
        ({"max_weight": math.inf}, "finite"),
        ({"cap": 2.0}, "Extra inputs"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SparseRLConfig(**settings)


def test_config_defaults_are_the_released_settings() -> None:
    assert SparseRLConfig().model_dump() == {
        "reject_below": 1e-4,
        "max_weight": 1.5,
        "band": (0.5, 1.5),
        "normalize": True,
    }
    assert all(field.description for field in SparseRLConfig.model_fields.values())
    assert torch.equal(SparseRLConfig()(XI.log(), MASK).weights, result_of().weights)
