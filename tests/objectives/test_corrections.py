from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kvrl.errors import KvrlError
from kvrl.objectives import PRESETS, CorrectionConfig, correction

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


def test_bounds_are_inclusive() -> None:
    log_ratio = torch.tensor([[math.log(0.5), math.log(2.0)]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = correction(log_ratio, mask, level="token", action="mask", bounds=(0.5, 2.0))
    torch.testing.assert_close(result.weights, torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    assert result.metrics["correction/share_below"] == result.metrics["correction/share_above"] == 0.0


def test_normalize_survives_weights_that_all_underflow() -> None:
    log_ratio = torch.tensor([[-4000.0, -4000.0 + math.log(3.0)]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = correction(log_ratio, mask, level="token", action="truncate", bounds=(None, 2.0), normalize=True)
    torch.testing.assert_close(result.weights, torch.tensor([[0.5, 1.5]]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
@pytest.mark.parametrize(
    ("action", "normalize"),
    [("truncate", False), ("truncate", True), ("mask", False), ("mask", True), ("reject", False)],
)
def test_equal_log_probs_change_nothing(level: str, action: str, normalize: bool) -> None:
    """Replay, one optimiser step, detached: old log-probs are the sampler's, and all weights are 1, to the bit."""
    logps = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) - 2
    mask = torch.arange(11) < torch.tensor([11, 1, 4, 0, 7, 3, 10])[:, None]
    result = correction(
        logps.detach() - logps, mask, level=level, action=action, bounds=(0.5, 2.0), normalize=normalize
    )
    assert torch.equal(result.weights, mask.float()) and torch.equal(result.mask, mask)
    assert result.keep.all()
    names = ("ratio_min", "ratio_mean", "ratio_max", "effective_sample_size")
    assert [result.metrics[f"correction/{name}"] for name in names] == pytest.approx([1.0] * 4, rel=1e-6)
    assert not any(value for name, value in result.metrics.items() if "share" in name)


@pytest.mark.parametrize("name", PRESETS)
def test_equal_log_probs_leave_every_preset_at_weight_one(name: str) -> None:
    result = CorrectionConfig(preset=name)(torch.zeros(2, 3), MASK)
    assert torch.equal(result.weights, MASK.float()) and result.keep.all()


def test_what_is_masked_or_rejected_stays_in_the_denominators() -> None:
    for action in ("truncate", "mask", "reject"):
        result = correct(level="token", action=action, bounds=(0.6, 0.7))
        assert torch.equal(result.mask, MASK)


@pytest.mark.parametrize("padding", [math.inf, -math.inf, math.nan, 1e30])
def test_padding_may_hold_anything(padding: float) -> None:
    log_ratio = torch.where(MASK, RATIOS.log(), padding)
    for level in ("token", "sequence_sum", "sequence_mean"):
        for action in ("truncate", "mask", "reject"):
            settings: dict[str, Any] = {"level": level, "action": action, "bounds": (0.3, 2.0)}
            dirty, clean = correction(log_ratio, MASK, **settings), correct(**settings)
            assert torch.equal(dirty.weights, clean.weights) and torch.equal(dirty.keep, clean.keep)
            assert dirty.metrics == clean.metrics


def test_a_sequence_without_tokens_is_not_rejected() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    log_ratio = torch.tensor([[0.0, -9.0], [-9.0, 0.0], [0.0, 0.0]])
    both = correction(log_ratio, mask, level="token", action="reject", bounds=(0.5, None))
    assert both.keep.tolist() == [False, False, True]  # the third has no tokens, so nothing to reject
    one = correction(log_ratio.roll(1, 1), mask, level="token", action="reject", bounds=(0.5, None))
    assert one.keep.tolist() == [False, True, True]


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


# Token ratios 3, 0.5, 1 and 0.25, 0.5; products 1.5 and 0.125.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tis", [[2.0, 0.5, 1.0], [0.25, 0.5, 0.0]]),
        ("mis", [[0.0, 0.5, 1.0], [0.0, 0.5, 0.0]]),
        ("icepop", [[3.0, 0.5, 1.0], [0.0, 0.5, 0.0]]),
        ("geometric", [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ("sequence_mask", [[1.5, 1.5, 1.5], [0.125, 0.125, 0.0]]),
    ],
)
def test_presets_by_hand(name: str, expected: list[list[float]]) -> None:
    config = CorrectionConfig(preset=name)
    expect(config(RATIOS.log(), MASK).weights, expected)
    assert (config.level, config.action, config.bounds, config.normalize) == PRESETS[name]


def test_the_upper_bounds_of_the_presets_by_hand() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)

    def weights(name: str, *ratios: float) -> list[float]:
        return CorrectionConfig(preset=name)(torch.tensor([ratios]).log(), mask).weights[0].tolist()

    assert weights("mis", 1.9, 2.1) == pytest.approx([1.9, 0.0])
    assert weights("icepop", 4.9, 5.1) == pytest.approx([4.9, 0.0])
    assert weights("sequence_mask", 4.0, 0.7) == pytest.approx([2.8, 2.8])
    assert weights("sequence_mask", 4.0, 0.8) == [0.0, 0.0]  # 3.2 is above 3
    # Geometric means 1.0009, 1.0011 and 0.9989.
    assert weights("geometric", 1.0009**3, 1.0009**-1) == [1.0, 1.0]
    assert weights("geometric", 1.0011**3, 1.0011**-1) == [0.0, 0.0]
    assert weights("geometric", 0.9989**3, 0.9989**-1) == [0.0, 0.0]


def test_fields_beside_a_preset_override_it() -> None:
    config = CorrectionConfig(preset="icepop", bounds=(0.2, 5.0))
    assert (config.level, config.action, config.bounds, config.normalize) == ("token", "mask", (0.2, 5.0), False)
    assert CorrectionConfig(preset="icepop", normalize=True).normalize
    # A field given is a field given, though its value is the default without a preset.
    assert CorrectionConfig(preset="sequence_mask", level="token").level == "token"
    assert CorrectionConfig(preset="mis", action="truncate").action == "truncate"


@pytest.mark.parametrize("name", [*PRESETS, None])
def test_a_preset_survives_being_written_out_and_read(name: str | None) -> None:
    config = CorrectionConfig(preset=name)
    assert CorrectionConfig.model_validate(config.model_dump()) == config
    assert CorrectionConfig.model_validate_json(config.model_dump_json()) == config


def test_no_preset_is_tis() -> None:
    assert CorrectionConfig().model_dump() == CorrectionConfig(preset="tis").model_dump() | {"preset": None}


def test_a_preset_that_does_not_exist_or_fit_is_refused() -> None:
    with pytest.raises(ValidationError, match="'tis', 'mis', 'icepop', 'geometric' or 'sequence_mask'"):
        CorrectionConfig(preset="seq-mis")
    with pytest.raises(ValidationError, match="no effect with action reject"):
        CorrectionConfig(preset="geometric", normalize=True)


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
