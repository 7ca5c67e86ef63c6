"""The compiled head: exact products, float32 sums, rows that do not depend on each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers import gap
from kvrl.native.head import PackedHead, packable


def linear(n: int, k: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(k, n, bias=False, dtype=torch.bfloat16)


pytestmark = pytest.mark.skipif(not packable(linear(64, 16)), reason="needs g++ and a CPU with AVX512-BF16")


@pytest.mark.parametrize("m", [1, 2, 5, 6, 13])
@pytest.mark.parametrize("n, k", [(64, 16), (97, 64), (500, 30), (1, 2), (130, 576)])
def test_equals_the_exact_product(m, n, k):
    head = linear(n, k)
    hidden = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = PackedHead(head.weight)(hidden)
    exact = hidden.double() @ head.weight.detach().double().T
    assert out.dtype == torch.float32 and out.shape == (m, n)
    assert gap(out, exact) < 3e-6 * max(1.0, exact.abs().max().item())


def test_rows_and_threads_do_not_change_bits():
    head = PackedHead(linear(500, 64).weight)
    hidden = torch.randn(13, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = head(hidden)
    torch.set_num_threads(3)
    threads = head(hidden)
    torch.set_num_threads(1)
    assert torch.equal(threads, whole)
    assert torch.equal(torch.cat([head(row[None]) for row in hidden]), whole)
    assert torch.equal(head(hidden.view(1, 13, 64)), whole[None])


def test_what_is_packed():
    assert not packable(nn.Linear(16, 64, bias=True, dtype=torch.bfloat16))
    assert not packable(nn.Linear(16, 64, bias=False)) and not packable(linear(64, 15))
    assert not packable(nn.Sequential(linear(64, 16)))  # an adapter around the head
