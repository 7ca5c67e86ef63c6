from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kvrl.errors import KvrlError
from kvrl.objectives import CorrectionConfig, correction

# Token ratios 3, 0.5, 1 (product 1.5, geometric mean 1.1447) and 0.25, 0.5 (product 1/8, mean 0.3536).
RATIOS = torch.tensor([[3.0, 0.5, 1.0], [0.25, 0.5, 77.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
MEANS = [1.5 ** (1 / 3), 0.125**0.5]


def correct(**settings: Any):
    return correction(RATIOS.log(), MASK, **settings)


def expect(weights: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_truncate_by_hand() -> None:
    result = correct(level="token", action="truncate", bounds=(None, 2.0))
    expect(result.weights, [[2.0, 0.5, 1.0], [0.25, 0.5, 0.0]])
    assert result.keep.all()
    expect(
        correct(level="token", action="truncate", bounds=(0.4, 2.0)).weights,
        [[2.0, 0.5, 1.0], [0.4, 0.5, 0.0]],
    )
    expect(
        correct(level="sequence_sum", action="truncate", bounds=(None, 1.2)).weights,
        [[1.2, 1.2, 1.2], [0.125, 0.125, 0.0]],
    )
    expect(
        correct(level="sequence_mean", action="truncate", bounds=(0.5, 2.0)).weights,
        [[MEANS[0]] * 3, [0.5, 0.5, 0.0]],
    )


def test_mask_by_hand() -> None:
    result = correct(level="token", action="mask", bounds=(0.5, 2.0))
    expect(result.weights, [[0.0, 0.5, 1.0], [0.0, 0.5, 0.0]])
    assert result.keep.all()
    expect(
        correct(level="sequence_sum", action="mask", bounds=(0.2, 2.0)).weights,
        [[1.5, 1.5, 1.5], [0.0, 0.0, 0.0]],
    )
    expect(
        correct(level="sequence_mean", action="mask", bounds=(None, 1.1)).weights,
        [[0.0, 0.0, 0.0], [MEANS[1], MEANS[1], 0.0]],
    )


def test_reject_by_hand() -> None:
    result = correct(level="token", action="reject", bounds=(0.3, None))
    expect(result.weights, [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert result.keep.tolist() == [True, False]
    # The third token of the second sequence (77) is padding and rejects nothing.
    assert correct(level="token", action="reject", bounds=(None, 2.0)).keep.tolist() == [False, True]
    assert correct(level="sequence_sum", action="reject", bounds=(0.2, None)).keep.tolist() == [True, False]
    assert correct(level="sequence_mean", action="reject", bounds=(0.2, 1.2)).keep.tolist() == [True, True]
    assert correct(level="sequence_mean", action="reject", bounds=(None, 1.1)).keep.tolist() == [False, True]


def test_normalize_by_hand() -> None:
    # Token weights 2, 0.5, 1, 0.25, 0.5: mean 0.85.
    result = correct(level="token", action="truncate", bounds=(None, 2.0), normalize=True)
    torch.testing.assert_close(result.weights, torch.tensor([[2.0, 0.5, 1.0], [0.25, 0.5, 0.0]]) / torch.tensor(0.85))
    # Masked tokens leave the mean: 0.5, 1, 0.5.
    result = correct(level="token", action="mask", bounds=(0.5, 2.0), normalize=True)
    expect(result.weights, [[0.0, 0.75, 1.5], [0.0, 0.75, 0.0]])
    # Sequences count once each, however long: 1.2 and 0.125.
    result = correct(level="sequence_sum", action="truncate", bounds=(None, 1.2), normalize=True)
    expect(result.weights, [[1.2 / 0.6625] * 3, [0.125 / 0.6625, 0.125 / 0.6625, 0.0]])


def test_metrics_are_raw_and_say_what_was_done() -> None:
    metrics = correct(level="token", action="truncate", bounds=(0.3, 2.0)).metrics
    ratios = [3.0, 0.5, 1.0, 0.25, 0.5]
    ess = sum(ratios) ** 2 / sum(r * r for r in ratios) / 5
    assert metrics == pytest.approx(
        {
            "correction/ratio_min": 0.25,
            "correction/ratio_mean": sum(ratios) / 5,
            "correction/ratio_max": 3.0,
            "correction/effective_sample_size": ess,
            "correction/share_below": 1 / 5,
            "correction/share_above": 1 / 5,
            "correction/share_clipped": 2 / 5,
            "correction/share_masked": 0.0,
            "correction/share_rejected": 0.0,
        }
    )
    metrics = correct(level="sequence_sum", action="mask", bounds=(None, 1.2)).metrics
    assert metrics["correction/ratio_max"] == pytest.approx(1.5)
    assert metrics["correction/share_masked"] == 1 / 2 and metrics["correction/share_clipped"] == 0.0
    metrics = correct(level="token", action="reject", bounds=(0.3, None)).metrics
    assert metrics["correction/share_rejected"] == 1 / 2 and metrics["correction/share_masked"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
@pytest.mark.parametrize("action", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("nats", [500.0, -500.0, 20_000.0])
def test_huge_ratios_stay_finite(level: str, action: str, nats: float) -> None:
    log_ratio = torch.tensor([[nats, nats], [0.0, 0.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    result = correction(log_ratio, mask, level=level, action=action, bounds=(0.5, 2.0), normalize=action != "reject")
    assert result.weights.isfinite().all() and (result.weights >= 0).all()
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_normalize_survives_weights_that_all_underflow() -> None:
    log_ratio = torch.tensor([[-400.0, -400.0 + math.log(3.0)]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = correction(log_ratio, mask, level="token", action="truncate", bounds=(None, 2.0), normalize=True)
    torch.testing.assert_close(result.weights, torch.tensor([[0.5, 1.5]]), rtol=1e-4, atol=0)


def test_equal_views_change_nothing() -> None:
    for level in ("token", "sequence_sum", "sequence_mean"):
        for action in ("truncate", "mask", "reject"):
            result = correction(torch.zeros(2, 3), MASK, level=level, action=action, bounds=(0.5, 2.0))
            assert torch.equal(result.weights, MASK.float()) and result.keep.all()
            assert result.metrics["correction/effective_sample_size"] == pytest.approx(1.0)


def test_sequences_without_active_tokens_are_neither_counted_nor_rejected() -> None:
    mask = torch.tensor([[False, False, False], [True, True, False]])
    for level in ("token", "sequence_sum", "sequence_mean"):
        # The ratio 1 that a sum over nothing has lies outside both bounds.
        result = correction(RATIOS.log(), mask, level=level, action="reject", bounds=(0.01, 0.9))
        assert result.keep.tolist() == [True, True]
        result = correction(RATIOS.log(), mask, level=level, action="reject", bounds=(1.1, 2.0))
        assert result.keep.tolist() == [True, False]
        result = correction(RATIOS.log(), mask & False, level=level, action="truncate", bounds=(None, 2.0))
        assert (result.weights == 0).all() and "correction/ratio_mean" not in result.metrics


def test_weights_carry_no_gradient() -> None:
    log_ratio = RATIOS.log().requires_grad_()
    assert not correction(log_ratio, MASK, level="token", action="truncate", bounds=(None, 2.0)).weights.requires_grad


def test_config_defaults_to_token_tis_at_two() -> None:
    config = CorrectionConfig()
    expected = correct(level="token", action="truncate", bounds=(None, 2.0), normalize=False)
    assert torch.equal(config(RATIOS.log(), MASK).weights, expected.weights)
    assert all(field.description for field in CorrectionConfig.model_fields.values())
    assert CorrectionConfig(level="token", action="mask", bounds=[0.5, 5]).bounds == (0.5, 5.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bounds": (3.0, 2.0)}, "lower bound 3.0 is above the upper bound 2.0"),
        ({"bounds": (0.0, 2.0)}, "0.0 is no positive finite ratio"),
        ({"bounds": (None, -1.0)}, "-1.0 is no positive finite ratio"),
        ({"bounds": (None, math.inf)}, "inf is no positive finite ratio"),
        ({"bounds": (None, math.nan)}, "nan is no positive finite ratio"),
        ({"bounds": (None, None), "action": "reject"}, "both are null"),
        ({"bounds": (0.5, None)}, "action truncate has no upper bound"),
        ({"bounds": (0.5, None), "action": "mask"}, "action mask has no upper bound"),
        ({"action": "reject", "normalize": True}, "no effect with action reject"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorrectionConfig(**settings)
    with pytest.raises(KvrlError, match=message):
        correct(**({"level": "token", "action": "truncate", "bounds": (None, 2.0)} | settings))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KvrlError, match=r"correction\.level: 'sequence'"):
        correct(level="sequence", action="truncate", bounds=(None, 2.0))
    with pytest.raises(KvrlError, match=r"correction\.action: 'clip'"):
        correct(level="token", action="clip", bounds=(None, 2.0))
    with pytest.raises(ValidationError, match="Extra inputs"):
        CorrectionConfig(cap=2.0)
