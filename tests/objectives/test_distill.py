"""Divergences against closed forms, their gradients, truncated supports, the top-k form and the weight's rules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives import controlled_weight, kl_divergence, top_k_error, warmup

KINDS = ["forward", "reverse", "js"]
INF = math.inf

# Student q = (1/2, 1/4, 1/4), teacher p = (1/4, 1/4, 1/2), and an excluded fourth id; any shift of the logits is moot.
STUDENT = torch.tensor([[math.log(2), 0.0, 0.0, -INF]], dtype=torch.float64) + 3.0
TEACHER = torch.tensor([[0.0, 0.0, math.log(2), -INF]], dtype=torch.float64) - 1.0


def random_logits(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return student, teacher


def value(kind: str, student: Tensor = STUDENT, teacher: Tensor = TEACHER, **arguments: Any) -> float:
    return kl_divergence(student, teacher, kind, **arguments).item()


def test_values_by_hand() -> None:
    # p log(p / q): -1/4 log 2 + 0 + 1/2 log 2; the same mirrored.
    assert value("forward") == pytest.approx(math.log(2) / 4)
    assert value("reverse") == pytest.approx(math.log(2) / 4)
    # m = (3/8, 1/4, 3/8).
    half = 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)
    assert value("js") == pytest.approx(half)
    # Uneven: p = (1/2, 1/2), q = (1/4, 3/4): the directions differ.
    student, teacher = torch.tensor([[0.25, 0.75]]).log(), torch.zeros(1, 2)
    assert value("forward", student, teacher) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    assert value("reverse", student, teacher) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-5)


def test_against_torch_distributions() -> None:
    student, teacher = random_logits(5, 7)
    q, p = torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    kl = torch.distributions.kl_divergence
    torch.testing.assert_close(kl_divergence(student, teacher, "forward"), kl(p, q))
    torch.testing.assert_close(kl_divergence(student, teacher, "reverse"), kl(q, p))
    m = torch.distributions.Categorical(probs=(p.probs + q.probs) / 2)
    torch.testing.assert_close(kl_divergence(student, teacher, "js"), (kl(p, m) + kl(q, m)) / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 1, 3, 6, 7, 50])
def test_gradient_against_finite_differences_and_none_for_the_teacher(kind: str, top_k: int | None) -> None:
    student, teacher = random_logits(3, 7)
    student.requires_grad_()
    teacher.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: kl_divergence(s, teacher.detach(), kind, top_k), (student,))
    (gradient, none) = torch.autograd.grad(
        kl_divergence(student, teacher, kind, top_k).sum(), (student, teacher), allow_unused=True
    )
    assert none is None and gradient.abs().max() > 1e-3


def test_gradient_by_hand() -> None:
    """Forward: q - p. Reverse: q (log(q / p) - KL)."""
    student = STUDENT.clone().requires_grad_()
    q, p = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([0.25, 0.25, 0.5, 0.0])
    (gradient,) = torch.autograd.grad(kl_divergence(student, TEACHER, "forward").sum(), student)
    torch.testing.assert_close(gradient[0], (q - p).double())
    (gradient,) = torch.autograd.grad(kl_divergence(student, TEACHER, "reverse").sum(), student)
    log_ratio = torch.tensor([math.log(2), 0.0, -math.log(2), 0.0])
    torch.testing.assert_close(gradient[0], (q * (log_ratio - math.log(2) / 4)).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 2, 4])
def test_equal_logits_give_zero_with_gradient_zero(kind: str, top_k: int | None) -> None:
    student, _ = random_logits(4, 9)
    student[:, 5] = -INF
    student.requires_grad_()
    divergence = kl_divergence(student, student.detach(), kind, top_k)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.abs().max() < 1e-15 and gradient.abs().max() < 1e-15
    if kind != "js":
        assert (divergence == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
def test_a_support_truncated_on_both_sides_is_that_of_the_rest(kind: str, top_k: int | None) -> None:
    student, teacher = random_logits(6, 5, seed=1)
    kept = torch.tensor([0, 2, 3])
    excluded = torch.full((6, 5), -INF, dtype=torch.float64)
    small = student[:, kept].clone().requires_grad_()
    large = excluded.index_copy(1, kept, student[:, kept]).requires_grad_()
    expected = kl_divergence(small, teacher[:, kept], kind, top_k)
    result = kl_divergence(large, excluded.index_copy(1, kept, teacher[:, kept]), kind, top_k)
    torch.testing.assert_close(result, expected)
    (small_gradient,) = torch.autograd.grad(expected.sum(), small)
    (large_gradient,) = torch.autograd.grad(result.sum(), large)
    torch.testing.assert_close(large_gradient[:, kept], small_gradient)
    assert (large_gradient[:, [1, 4]] == 0).all()


@pytest.mark.parametrize("top_k", [None, 2, 3])
def test_supports_that_differ_give_infinity_without_nan(top_k: int | None) -> None:
    # Rows: the student excludes id 2, the teacher excludes id 0, both are whole.
    student = torch.tensor([[1.0, 0.0, -INF, 0.5], [1.0, 0.0, 2.0, 0.5], [1.0, 0.0, 2.0, 0.5]]).double()
    teacher = torch.tensor([[1.0, 0.0, 2.0, 0.5], [-INF, 0.0, 2.0, 0.5], [0.0, 0.0, 2.0, 0.5]]).double()
    infinite = {"forward": [True, False, False], "reverse": [False, top_k != 2, False], "js": [False, False, False]}
    for kind in KINDS:
        x = student.clone().requires_grad_()
        divergence = kl_divergence(x, teacher, kind, top_k)
        assert divergence.isinf().tolist() == infinite[kind] and not divergence.isnan().any()
        (gradient,) = torch.autograd.grad(divergence.sum(), x)
        assert gradient.isfinite().all()
        assert (gradient == 0).all(-1).tolist() == infinite[kind]


def test_disjoint_supports_are_log_two_apart_in_js() -> None:
    student = torch.tensor([[0.0, 0.0, -INF, -INF]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-INF, -INF, 0.0, 1.0]], dtype=torch.float64)
    divergence = kl_divergence(student, teacher, "js")
    assert divergence.item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert gradient.abs().max() < 1e-15


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_stay_finite(kind: str) -> None:
    student = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    divergence = kl_divergence(student, torch.tensor([[-1e4, 0.0, 1e4]]), kind)
    (gradient,) = torch.autograd.grad(divergence.sum(), student)
    assert divergence.isfinite().all() and gradient.isfinite().all()


def test_top_k_by_hand() -> None:
    # p = (5, 3, 1, 1) / 10 and q = (2, 2, 4, 2) / 10; the teacher's best two, and the rest 2/10 against 6/10.
    teacher, student = torch.tensor([[5.0, 3.0, 1.0, 1.0]]).log(), torch.tensor([[2.0, 2.0, 4.0, 2.0]]).log()
    expected = 0.5 * math.log(5 / 2) + 0.3 * math.log(3 / 2) + 0.2 * math.log(2 / 6)
    assert value("forward", student, teacher, top_k=2) == pytest.approx(expected, rel=1e-5)
    exact = 0.5 * math.log(5 / 2) + 0.3 * math.log(3 / 2) + 0.1 * math.log(1 / 4) + 0.1 * math.log(1 / 2)
    error = top_k_error(student.requires_grad_(), teacher, "forward", 2)
    assert error.item() == pytest.approx(exact - expected, rel=1e-4) and not error.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_a_lower_bound_that_rises_with_k_to_the_exact_value(kind: str) -> None:
    student, teacher = random_logits(20, 9, seed=2)
    exact = kl_divergence(student, teacher, kind)
    last = torch.zeros(20, dtype=torch.float64)
    for k in range(1, 8):
        bound = kl_divergence(student, teacher, kind, k)
        assert (bound >= last - 1e-12).all() and (bound < exact).all()
        torch.testing.assert_close(top_k_error(student, teacher, kind, k), exact - bound)
        last = bound
    for k in (8, 9, 100):  # one id in the bucket, or none
        torch.testing.assert_close(kl_divergence(student, teacher, kind, k), exact)


def test_the_rest_is_exact_where_its_mass_is_tiny() -> None:
    """1 - sum of the top k would lose it to rounding in float32."""
    teacher, student = torch.tensor([[20.0, 0.0, 0.0]]), torch.tensor([[20.0, 5.0, 5.0]])
    rest_p, rest_q = 2 / (math.exp(20) + 2), 2 * math.exp(5) / (math.exp(20) + 2 * math.exp(5))
    expected = rest_q * math.log(rest_q / rest_p) + (1 - rest_q) * (math.log1p(-rest_q) - math.log1p(-rest_p))
    assert value("reverse", student, teacher, top_k=1) == pytest.approx(expected, rel=2e-2)


def test_types() -> None:
    student, teacher = random_logits(2, 5)
    assert kl_divergence(student, teacher).dtype == torch.float64
    assert kl_divergence(student.float(), teacher.float()).dtype == torch.float32
    narrow = kl_divergence(student.bfloat16(), teacher.bfloat16())
    assert torch.equal(narrow, kl_divergence(student.bfloat16().float(), teacher.bfloat16().float()))


def test_positions_do_not_depend_on_each_other() -> None:
    student, teacher = random_logits(6, 5)
    for kind in KINDS:
        whole = kl_divergence(student, teacher, kind, 3)
        parts = [kl_divergence(student[i : i + 2], teacher[i : i + 2], kind, 3) for i in range(0, 6, 2)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=0)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KvrlError, match=r"distill\.kl: 'jeffreys' is unknown; use one of forward, reverse, js"):
        kl_divergence(STUDENT, TEACHER, "jeffreys")


def test_controlled_weight_by_hand() -> None:
    # The target is 0.5 * 2 / 10 = 0.1.
    assert controlled_weight(0.02, 2.0, 10.0, ratio=0.5, decay=0.75) == pytest.approx(0.75 * 0.02 + 0.25 * 0.1)
    assert controlled_weight(0.02, 2.0, 10.0, ratio=0.5, decay=0.0) == pytest.approx(0.1)


def test_controlled_weight_converges_to_the_ratio() -> None:
    weight = 1.0
    for _ in range(200):
        weight = controlled_weight(weight, 3.0, 40.0, ratio=0.2)
    assert weight * 40.0 / 3.0 == pytest.approx(0.2, rel=1e-6)


def test_controlled_weight_is_bounded_in_one_step_and_for_good() -> None:
    # A target of 1e9 counts as the upper bound, so that the step is at most (1 - decay) * bound.
    assert controlled_weight(0.1, 1.0, 1e-9, ratio=1.0, decay=0.9, bounds=(0.01, 2.0)) == pytest.approx(0.09 + 0.2)
    assert controlled_weight(0.1, 0.0, 1.0, ratio=1.0, decay=0.9, bounds=(0.01, 2.0)) == pytest.approx(0.09 + 0.001)
    assert controlled_weight(0.1, 1.0, 0.0, ratio=1.0) == 0.1


def test_warmup() -> None:
    assert [warmup(step, 4) for step in (0, 1, 2, 4, 5, 100)] == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]
    assert warmup(1, 0) == 1.0
