"""Log-probs, entropies and gradients of the compiled head and softmax, against float64 and the general path."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from helpers import gap, make_prompts, model, sample
from kvrl.learner import Scorer
from kvrl.native import score as native
from kvrl.native.score import scorable, score_tokens


def linear(n: int, k: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, dtype=torch.bfloat16)


pytestmark = pytest.mark.skipif(
    not scorable(linear(64, 16), torch.zeros(1, dtype=torch.bfloat16)), reason="needs g++ and a CPU with AVX512-BF16"
)


def exact(head, hidden, tokens, temperature, grad, banned):
    """The same in float64 by autograd: log-probs, entropies, gradients of hidden states and weight."""
    hidden = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    logits = hidden @ weight.T / temperature.double()[:, None]
    if banned is not None:
        logits = logits.masked_fill(torch.arange(len(weight)) == banned, -torch.inf)
    logps = logits.log_softmax(-1)
    chosen = logps.gather(-1, tokens[:, None])[:, 0]
    chosen.backward(grad.double())
    return chosen.detach(), torch.special.entr(logps.exp()).sum(-1).detach(), hidden.grad, weight.grad


def far(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("banned", [None, 3])
@pytest.mark.parametrize("rows", [7, 256])
@pytest.mark.parametrize("n", [48, 1000, 1003])
def test_equals_float64(monkeypatch, n, rows, banned):
    monkeypatch.setattr(native, "ROWS", rows)
    generator = torch.Generator().manual_seed(1)
    head, hidden = linear(n, 64), torch.randn(70, 64, generator=generator).mul(3).bfloat16().requires_grad_()
    tokens = torch.randint(4, n, (70,), generator=generator)
    temperature, grad = torch.rand(70, generator=generator) + 0.5, torch.randn(70, generator=generator)
    logps, entropies = score_tokens(head, hidden, tokens, temperature, chunk=30, banned=banned)
    logps.backward(grad)
    expected = exact(head, hidden, tokens, temperature, grad, banned)
    assert logps.dtype == entropies.dtype == torch.float32 and not entropies.requires_grad
    assert gap(logps, expected[0]) < 3e-6 and gap(entropies, expected[1]) < 3e-6
    # Two roundings to bfloat16, of 2^-9 at most each
    assert far(hidden.grad, expected[2]) < 4e-3 and far(head.weight.grad, expected[3]) < 4e-3
    if banned is not None:
        assert not head.weight.grad[banned].any()


def test_a_weight_that_is_stored_transposed():
    """Its gradient is in the order of its indices, not of its memory."""
    generator = torch.Generator().manual_seed(1)
    head, hidden = linear(64, 32), torch.randn(9, 32, generator=generator).bfloat16().requires_grad_()
    head.weight = nn.Parameter(head.weight.detach().T.contiguous().T)
    tokens, grad = torch.randint(64, (9,), generator=generator), torch.randn(9, generator=generator)
    score_tokens(head, hidden, tokens, torch.ones(9), chunk=4)[0].backward(grad)
    expected = exact(head, hidden, tokens, torch.ones(9), grad, None)
    assert far(hidden.grad, expected[2]) < 4e-3 and far(head.weight.grad, expected[3]) < 4e-3


def test_a_sure_token_has_neither_entropy_nor_gradient():
    head = linear(64, 16)
    with torch.no_grad():
        head.weight.zero_()[5] = 100.0
    hidden = torch.ones(1, 16, dtype=torch.bfloat16, requires_grad=True)
    logps, entropies = score_tokens(head, hidden, torch.tensor([5]), torch.ones(1), chunk=8)
    logps.sum().backward()
    assert logps.item() == entropies.item() == 0.0 and not hidden.grad.any() and not head.weight.grad.any()


def test_of_equal_logits():
    head = linear(50, 16)
    hidden = torch.zeros(2, 16, dtype=torch.bfloat16)
    for banned, count in ((None, 50), (49, 49)):
        logps, entropies = score_tokens(head, hidden, torch.tensor([0, 7]), torch.ones(2), chunk=8, banned=banned)
        assert gap(logps, torch.full((2,), -math.log(count))) < 1e-6
        assert gap(entropies, torch.full((2,), math.log(count))) < 1e-6


def test_what_is_not_a_number_stays_so():
    head, hidden = linear(64, 16), torch.zeros(3, 16, dtype=torch.bfloat16)
    hidden[1, 4] = torch.nan
    logps, entropies = score_tokens(head, hidden, torch.zeros(3, dtype=torch.long), torch.ones(3), chunk=8)
    assert logps.isnan().tolist() == entropies.isnan().tolist() == [False, True, False]


def test_the_weights_gradient_is_summed_in_float32():
    """Of 300 chunks with a gradient of 1 and one of 256: a bfloat16 sum would lose the ones."""
    head = linear(2, 2)
    with torch.no_grad():
        head.weight.zero_()
    count = 301
    hidden = torch.tensor([[1.0, 0.0]]).bfloat16().repeat(count, 1)
    logps, _ = score_tokens(head, hidden, torch.zeros(count, dtype=torch.long), torch.ones(count), chunk=1)
    grad = torch.full((count,), 2.0)
    grad[0] = 512.0  # (1 - 1/2) of it: 256, then 300 times 1
    logps.backward(grad)
    assert head.weight.grad[:, 0].tolist() == [556.0, -556.0]


@pytest.mark.parametrize("name", ["llama", "granite", "cohere2", "gemma2"])
@pytest.mark.parametrize("view", ["sparse", "dense"])
def test_the_learner_scores_the_same_either_way(name, view):
    """gemma2 has a soft-cap, which the kernel does not know; granite and cohere2 a scale."""
    lm = copy.deepcopy(model(name)).bfloat16()  # the model is shared by the tests
    rollouts = sample(lm, make_prompts([5, 9]), new=30)
    found = []
    for kernels in (True, False):
        lm.zero_grad()
        scored = Scorer(lm, chunk=16, native_kernels=kernels)(rollouts, view=view)
        scored.logps.sum().backward()
        found.append((scored.logps.detach(), scored.entropy, lm.get_input_embeddings().weight.grad.clone()))
    (logps, entropy, grad), (plain_logps, plain_entropy, plain_grad) = found
    assert gap(logps, plain_logps) < 1e-5 and gap(entropy, plain_entropy) < 1e-5
    assert far(grad, plain_grad.double()) < 2e-2  # the trunk runs in bfloat16
