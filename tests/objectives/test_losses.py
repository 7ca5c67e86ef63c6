"""Every loss against closed forms, its gradient against finite differences, and any cut of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives import LossNormaliser, mean_metrics, merge_metrics, policy_loss

LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"]
MAX_LENGTH = 10

# Two sequences of 3 and 1 tokens and one masked out. Ratios 1.5, 0.5, 1 and 2; A = 1 and -2; e = h = 0.2.
RATIOS = torch.tensor([[1.5, 0.5, 1.0], [2.0, 1.0, 1.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, 0.0, 0.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
ADVANTAGES = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


def loss_of(logps: Tensor, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    arguments: dict[str, Any] = {
        "old_logps": OLD,
        "advantages": ADVANTAGES,
        "mask": MASK,
        "epsilon": 0.2,
        "max_completion_length": MAX_LENGTH,
    } | changes
    arguments.setdefault("normaliser", LossNormaliser.from_mask(arguments["mask"]))
    return policy_loss(logps, **arguments)


def hand_value(loss_type: str) -> float:
    # Clipped terms: min(1.5, 1.2) = 1.2, min(0.5, 0.8) = 0.5, 1; second sequence min(2 * -2, 1.2 * -2) = -4.
    first, second = 1.2 + 0.5 + 1.0, -4.0
    if loss_type == "grpo":
        return -(first / 3 + second / 1) / 2
    if loss_type == "dr_grpo":
        return -(first + second) / (2 * 10)
    if loss_type == "dapo":
        return -(first + second) / 4
    if loss_type == "gspo":
        # Geometric mean (1.5 * 0.5 * 1)^(1/3) = 0.9086 is inside the range; 2 with A < 0 is not cut.
        return -(0.75 ** (1 / 3) - 4.0) / 2
    if loss_type == "rloo":  # the product 0.75 is below the range, which A > 0 does not mind; once for each token
        return -(3 * 0.75 + 1 * -4.0) / 2
    # cispo: min(r, 1.2) * A * logp.
    logps = [-1.0 + math.log(1.5), -2.0 + math.log(0.5), -3.0, -0.5 + math.log(2.0)]
    return -(1.2 * logps[0] + 0.5 * logps[1] + 1.0 * logps[2] + 1.2 * -2.0 * logps[3]) / 4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_value_by_hand(loss_type: str) -> None:
    loss, _ = loss_of(OLD + RATIOS.log(), loss_type=loss_type)
    assert loss.item() == pytest.approx(hand_value(loss_type), rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_by_hand_at_ratio_one(loss_type: str) -> None:
    """On-policy, every loss has the gradient -A * weight of the token, whatever is clipped elsewhere."""
    logps = OLD.clone().requires_grad_()
    loss, metrics = loss_of(logps, old_logps=logps.detach(), loss_type=loss_type)
    (gradient,) = torch.autograd.grad(loss, logps)
    per_token = {
        "grpo": [1 / 6, 1 / 2],
        "gspo": [1 / 6, 1 / 2],
        "dr_grpo": [1 / 20, 1 / 20],
        "dapo": [1 / 4, 1 / 4],
        "cispo": [1 / 4, 1 / 4],
        "rloo": [1 / 2, 1 / 2],
    }[loss_type]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    expected[0] = -1.0 * per_token[0]
    expected[1, 0] = 2.0 * per_token[1]
    torch.testing.assert_close(gradient, expected)
    summary = mean_metrics(metrics)
    assert summary["ratio/min"] == summary["ratio/mean"] == summary["ratio/max"] == 1.0
    assert summary["clip_low/mean"] == summary["clip_high/mean"] == 0.0


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_gradient_against_finite_differences(loss_type: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logps = (OLD + RATIOS.log()).requires_grad_()
    weights = torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.5
    reference = OLD + 0.3 * torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return loss_of(x, loss_type=loss_type, token_weights=weights, ref_logps=reference, beta=0.7)[0]

    assert torch.autograd.gradcheck(value, (logps,), atol=1e-8)
    (gradient,) = torch.autograd.grad(value(logps), logps)
    assert gradient[MASK].abs().min() > 1e-3 and (gradient[~MASK] == 0).all()


def test_cispo_gradient_against_finite_differences() -> None:
    """cispo stops its weight's gradient, so the differences are those of the loss with the weight held."""
    logps = (OLD + RATIOS.log()).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(logps, loss_type="cispo")[0], logps)
    held = RATIOS.clamp(max=1.2) * ADVANTAGES[:, None] * MASK

    def value(x: Tensor) -> Tensor:
        return -(held * x).sum() / 4

    step = 1e-6
    for i, j in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]:
        shift = torch.zeros_like(logps)
        shift[i, j] = step
        difference = (value(logps.detach() + shift) - value(logps.detach() - shift)) / (2 * step)
        assert gradient[i, j].item() == pytest.approx(difference.item(), abs=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rloo_gradient_is_that_of_one_ratio_per_completion(sign: float, weighted: bool) -> None:
    """Finite differences of mean(-min(R A, clip(R) A)), R the product of the tokens' ratios; weights weigh tokens."""
    logps = (OLD + RATIOS.log()).requires_grad_()
    weights = torch.tensor([[2.0, 0.0, 3.0], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    given = {"token_weights": weights} if weighted else {}
    loss, metrics = loss_of(logps, loss_type="rloo", advantages=sign * ADVANTAGES, **given)
    (gradient,) = torch.autograd.grad(loss, logps)

    def value(x: Tensor) -> float:
        total = 0.0
        for row, length, advantage in ((0, 3, 1.0), (1, 1, -2.0)):
            ratio, a = math.exp(float((x - OLD)[row, :length].sum())), sign * advantage
            total -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / 2
        return total

    step = 1e-6
    for i, j in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]:
        shift = torch.zeros(3, 3, dtype=torch.float64)
        shift[i, j] = step
        slope = (value(logps.detach() + shift) - value(logps.detach() - shift)) / (2 * step)
        expected = slope * (float(weights[i, j]) if weighted else 1.0)
        assert gradient[i, j].item() == pytest.approx(expected, abs=1e-8)
    summary = mean_metrics(metrics)
    assert summary["ratio/mean"] == pytest.approx((0.75 + 2.0) / 2)  # of the completions, whatever their length
    assert summary["clip_low/mean"] == (0.0 if sign > 0 else 1 / 2)  # 0.75 with A < 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("cut", [[6], [1, 5], [2, 2, 2], [1, 1, 1, 1, 1, 1]])
def test_any_cut_gives_the_same_loss_gradient_and_metrics(loss_type: str, cut: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logps = (random(6, 7) - 2).requires_grad_()
    lengths = torch.tensor([7, 1, 4, 0, 2, 5])  # one sequence has left the loss
    mask = torch.arange(7) < lengths[:, None]
    tensors = {
        "old_logps": logps.detach() + 0.3 * random(6, 7),
        "advantages": random(6),
        "mask": mask,
        "token_weights": random(6, 7).abs(),
        "ref_logps": logps.detach() + 0.2 * random(6, 7),
    }
    common: dict[str, Any] = {
        "loss_type": loss_type,
        "beta": 0.5,
        "epsilon_high": 0.3,
        "normaliser": LossNormaliser.from_mask(mask),
    }
    whole, whole_metrics = loss_of(logps, **tensors, **common)
    (whole_gradient,) = torch.autograd.grad(whole, logps)

    shares, metrics, start = [], [], 0
    for size in cut:
        rows = slice(start, start + size)
        width = max(int(lengths[rows].max()), 1)  # each micro-batch is padded to its own longest sequence
        part = {k: v[rows, :width] if v.dim() == 2 else v[rows] for k, v in tensors.items()}
        share, metric = loss_of(logps[rows, :width], **part, **common)
        shares.append(share)
        metrics.append(metric)
        start += size
    torch.testing.assert_close(sum(shares), whole, rtol=1e-12, atol=1e-14)
    (gradient,) = torch.autograd.grad(sum(shares), logps)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-12, atol=1e-14)
    assert mean_metrics(merge_metrics(metrics)) == pytest.approx(mean_metrics(whole_metrics), rel=1e-12)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_sequences_and_padding_change_nothing(loss_type: str) -> None:
    logps = OLD + RATIOS.log()
    alone, _ = loss_of(logps[:2], old_logps=OLD[:2], advantages=ADVANTAGES[:2], mask=MASK[:2], loss_type=loss_type)
    with_masked, _ = loss_of(logps, loss_type=loss_type)
    assert with_masked.item() == pytest.approx(alone.item(), rel=1e-12)

    # Garbage outside the mask reaches neither the loss nor the gradient.
    dirty = torch.where(MASK, logps, -torch.inf).requires_grad_()
    loss, _ = loss_of(dirty, loss_type=loss_type, ref_logps=torch.where(MASK, OLD, -torch.inf), beta=0.1)
    (gradient,) = torch.autograd.grad(loss, dirty)
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_active_tokens_is_zero_with_a_gradient(loss_type: str) -> None:
    logps = OLD.clone().requires_grad_()
    loss, metrics = loss_of(logps, mask=torch.zeros_like(MASK), loss_type=loss_type)
    (gradient,) = torch.autograd.grad(loss, logps)
    assert loss.item() == 0.0 and (gradient == 0).all()
    assert mean_metrics(metrics) == {}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_advantage_zero_leaves_the_kl_term(loss_type: str) -> None:
    """A group without signal: its tokens stay in the denominator, its KL terms stay in the numerator."""
    reference = OLD - math.log(2.0)
    # k3 at policy / reference = 2 * ratio: 1 / (2 r) + log(2 r) - 1.
    kl = [0.5 / r + math.log(2 * r) - 1 for r in (1.5, 0.5, 1.0, 2.0)]
    loss, metrics = loss_of(
        OLD + RATIOS.log(),
        advantages=torch.zeros(3, dtype=torch.float64),
        loss_type=loss_type,
        ref_logps=reference,
        beta=0.1,
        token_weights=torch.full((3, 3), 5.0, dtype=torch.float64),  # weighs the clipped term only
    )
    expected = {
        "grpo": (sum(kl[:3]) / 3 + kl[3]) / 2,
        "gspo": (sum(kl[:3]) / 3 + kl[3]) / 2,
        "dr_grpo": sum(kl) / 20,
        "dapo": sum(kl) / 4,
        "cispo": sum(kl) / 4,
        "rloo": sum(kl) / 2,
    }[loss_type]
    assert loss.item() == pytest.approx(0.1 * expected, rel=1e-12)
    assert mean_metrics(metrics)["kl/mean"] == pytest.approx(sum(kl) / 4, rel=1e-12)


def test_token_weights_multiply_the_clipped_term() -> None:
    weights = torch.tensor([[2.0, 0.0, 3.0], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    loss, _ = loss_of(OLD + RATIOS.log(), loss_type="dapo", token_weights=weights)
    assert loss.item() == pytest.approx(-(2 * 1.2 + 0 * 0.5 + 3 * 1.0 + 0.5 * -4.0) / 4, rel=1e-12)


def test_metrics_are_raw_ratios_and_the_shares_that_clipping_changes() -> None:
    _, metrics = loss_of(OLD + RATIOS.log(), loss_type="grpo")
    summary = mean_metrics(metrics)
    # 1.5 with A > 0 is cut above; 0.5 with A > 0 and 2 with A < 0 are not cut.
    assert summary == pytest.approx(
        {
            "ratio/min": 0.5,
            "ratio/mean": 5.0 / 4,
            "ratio/max": 2.0,
            "clip_low/mean": 0.0,
            "clip_high/mean": 1 / 4,
        }
    )
    _, metrics = loss_of(OLD + RATIOS.log(), loss_type="grpo", advantages=-ADVANTAGES)
    assert mean_metrics(metrics)["clip_low/mean"] == 1 / 4  # 0.5 with A < 0
    assert mean_metrics(metrics)["clip_high/mean"] == 1 / 4  # 2 with A > 0
    _, metrics = loss_of(OLD + RATIOS.log(), loss_type="cispo")
    assert mean_metrics(metrics)["clip_high/mean"] == 2 / 4  # 1.5 and 2, whatever the advantage
    _, metrics = loss_of(OLD + RATIOS.log(), loss_type="gspo")
    assert mean_metrics(metrics)["ratio/mean"] == pytest.approx((0.75 ** (1 / 3) + 2.0) / 2)


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
@pytest.mark.parametrize("ratio", [0.25, 4.0])
def test_padding_is_no_extreme(loss_type: str, ratio: float) -> None:
    _, metrics = loss_of(OLD + math.log(ratio), loss_type=loss_type)
    summary = mean_metrics(metrics)
    assert summary["ratio/min"] == pytest.approx(ratio) and summary["ratio/max"] == pytest.approx(ratio)


def test_epsilon_high_moves_the_upper_bound_alone() -> None:
    logps = OLD + RATIOS.log()
    loss, _ = loss_of(logps, loss_type="dapo", epsilon_high=0.4)
    assert loss.item() == pytest.approx(-(1.4 + 0.5 + 1.0 - 4.0) / 4, rel=1e-12)
    loss, _ = loss_of(logps, loss_type="dapo", epsilon_high=0.4, advantages=-ADVANTAGES)
    assert loss.item() == pytest.approx(-(-1.5 - 0.8 - 1.0 + 2 * 1.4) / 4, rel=1e-12)


def test_normalisers_of_parts_add_up() -> None:
    parts = [LossNormaliser.from_mask(MASK[:1]), LossNormaliser.from_mask(MASK[1:])]
    assert parts[0] + parts[1] == LossNormaliser.from_mask(MASK) == LossNormaliser(sequences=2, tokens=4)


TOKEN_ADVANTAGES = torch.tensor([[1.0, -1.0, 2.0], [-2.0, 5.0, 5.0], [7.0, 7.0, 7.0]], dtype=torch.float64)
PER_TOKEN_TYPES = ["grpo", "dr_grpo", "dapo", "cispo"]


@pytest.mark.parametrize("loss_type", PER_TOKEN_TYPES)
def test_an_advantage_per_token_by_hand(loss_type: str) -> None:
    # Ratios 1.5, 0.5, 1 and 2, range [0.8, 1.2]: min(1.5, 1.2) * 1; min(-0.5, -0.8); 1 * 2; min(-4, -2.4).
    first, second = 1.2 - 0.8 + 2.0, -4.0
    # cispo: min(r, 1.2) * A * logp.
    logps = [-1.0 + math.log(1.5), -2.0 + math.log(0.5), -3.0, -0.5 + math.log(2.0)]
    expected = {
        "grpo": -(first / 3 + second) / 2,
        "dr_grpo": -(first + second) / 20,
        "dapo": -(first + second) / 4,
        "cispo": -(1.2 * logps[0] - 0.5 * logps[1] + 2.0 * logps[2] - 1.2 * 2.0 * logps[3]) / 4,
    }[loss_type]
    loss, metrics = loss_of(OLD + RATIOS.log(), advantages=TOKEN_ADVANTAGES, loss_type=loss_type)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    if loss_type != "cispo":  # 0.5 with A < 0 is cut below, 1.5 with A > 0 above, 2 with A < 0 not
        summary = mean_metrics(metrics)
        assert summary["clip_low/mean"] == summary["clip_high/mean"] == 1 / 4


@pytest.mark.parametrize("loss_type", PER_TOKEN_TYPES)
def test_equal_advantages_per_token_are_the_sequences_advantage(loss_type: str) -> None:
    logps = (OLD + RATIOS.log()).requires_grad_()
    spread = ADVANTAGES[:, None].expand(3, 3)
    loss, metrics = loss_of(logps, advantages=spread, loss_type=loss_type)
    expected, expected_metrics = loss_of(logps, loss_type=loss_type)
    assert torch.equal(loss, expected) and mean_metrics(metrics) == mean_metrics(expected_metrics)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_gradient_with_an_advantage_per_token_against_finite_differences(loss_type: str) -> None:
    logps = (OLD + RATIOS.log()).requires_grad_()

    def value(x: Tensor) -> Tensor:
        return loss_of(x, advantages=TOKEN_ADVANTAGES, loss_type=loss_type)[0]

    assert torch.autograd.gradcheck(value, (logps,), atol=1e-8)


@pytest.mark.parametrize("loss_type", PER_TOKEN_TYPES)
def test_any_cut_with_an_advantage_per_token_gives_the_same_loss(loss_type: str) -> None:
    normaliser = LossNormaliser.from_mask(MASK)
    logps = OLD + RATIOS.log()
    whole, _ = loss_of(logps, advantages=TOKEN_ADVANTAGES, loss_type=loss_type)
    parts = [
        loss_of(
            logps[rows, :width],
            old_logps=OLD[rows, :width],
            advantages=TOKEN_ADVANTAGES[rows, :width],
            mask=MASK[rows, :width],
            loss_type=loss_type,
            normaliser=normaliser,
        )[0]
        for rows, width in ((slice(0, 1), 3), (slice(1, 3), 1))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("padding", [math.inf, -math.inf, math.nan])
def test_garbage_outside_the_mask_reaches_nothing(loss_type: str, padding: float) -> None:
    def dirty(x: Tensor) -> Tensor:
        return torch.where(MASK, x, padding)

    whole = loss_type in ("gspo", "rloo")
    advantages = ADVANTAGES.clone() if whole else dirty(TOKEN_ADVANTAGES)
    if whole:
        advantages[2] = padding  # of a sequence without active tokens
    weights = torch.full((3, 3), 0.5, dtype=torch.float64)
    arguments: dict[str, Any] = {"loss_type": loss_type, "beta": 0.1}
    clean = OLD + RATIOS.log()
    expected, expected_metrics = loss_of(
        clean.requires_grad_(),
        advantages=ADVANTAGES if whole else TOKEN_ADVANTAGES,
        token_weights=weights,
        ref_logps=OLD,
        **arguments,
    )
    (expected_gradient,) = torch.autograd.grad(expected, clean)
    logps = dirty(clean.detach()).requires_grad_()
    loss, metrics = loss_of(
        logps,
        old_logps=dirty(OLD),
        advantages=advantages,
        token_weights=dirty(weights),
        ref_logps=dirty(OLD),
        **arguments,
    )
    (gradient,) = torch.autograd.grad(loss, logps)
    assert torch.equal(loss, expected) and torch.equal(gradient, expected_gradient)
    assert mean_metrics(metrics) == mean_metrics(expected_metrics)


def test_wrong_arguments_are_refused() -> None:
    for loss_type in ("gspo", "rloo"):
        with pytest.raises(KvrlError, match=rf"loss_type: {loss_type} has one ratio per sequence"):
            loss_of(OLD, advantages=TOKEN_ADVANTAGES, loss_type=loss_type)
    with pytest.raises(KvrlError, match=r"loss_type: 'ppo' is unknown"):
        loss_of(OLD, loss_type="ppo")
    with pytest.raises(KvrlError, match=r"beta: 0\.1 needs the reference"):
        loss_of(OLD, loss_type="grpo", beta=0.1)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("moved", [95.0, -95.0])
def test_ratios_that_exp_cannot_hold_give_finite_gradients(loss_type, advantage, moved):
    logps = torch.tensor([[-1.0, -95.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -95.0 - moved]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(
        logps, old, torch.tensor([advantage]), mask, loss_type=loss_type, epsilon=0.2, max_completion_length=2,
        normaliser=LossNormaliser.from_mask(mask),
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logps.grad).all()
