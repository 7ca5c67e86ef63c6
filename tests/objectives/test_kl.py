from __future__ import annotations

import math

import pytest
import torch

from kvrl.objectives import ESTIMATORS, k1, k2, k3

P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_values_of_one_token() -> None:
    logps, ref_logps = (
        torch.tensor(math.log(0.5)),
        torch.tensor(math.log(0.2)),
    )  # ratio policy / reference = 2.5
    assert k1(logps, ref_logps).item() == pytest.approx(math.log(2.5))
    assert k2(logps, ref_logps).item() == pytest.approx(math.log(2.5) ** 2 / 2)
    assert k3(logps, ref_logps).item() == pytest.approx(0.4 + math.log(2.5) - 1)


def test_k1_and_k3_are_unbiased() -> None:
    kl = (P * (P / Q).log()).sum()
    assert torch.allclose((P * k1(P.log(), Q.log())).sum(), kl)
    assert torch.allclose((P * k3(P.log(), Q.log())).sum(), kl)


def test_k2_has_the_gradient_of_the_kl_and_k1_has_none() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(-1)
    probs = logps.exp()
    (exact,) = torch.autograd.grad((probs * (logps - Q.log())).sum(), logits, retain_graph=True)
    fixed = probs.detach()
    (from_k2,) = torch.autograd.grad((fixed * k2(logps, Q.log())).sum(), logits, retain_graph=True)
    (from_k1,) = torch.autograd.grad((fixed * k1(logps, Q.log())).sum(), logits)
    assert torch.allclose(from_k2, exact)
    assert torch.allclose(from_k1, torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_k3_keeps_its_digits_near_zero() -> None:
    # d^2 / 2 + d^3 / 6; exp(d) - d - 1 loses it to float32 rounding.
    for d in (1e-3, 1.7e-3, 2.3e-3):
        value = k3(torch.tensor(0.0), torch.tensor(d)).item()
        assert value == pytest.approx(d * d / 2 + d**3 / 6, rel=2e-3)


def test_estimators_have_their_names() -> None:
    assert {name: f(torch.tensor(0.0), torch.tensor(-1.0)).item() for name, f in ESTIMATORS.items()} == pytest.approx(
        {"k1": 1.0, "k2": 0.5, "k3": math.exp(-1)}
    )
