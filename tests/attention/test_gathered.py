"""Attention over gathered entries: against attention over copies made by hand, and its gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvrl.attention import gathered
from kvrl.attention.gathered import attend_gathered

B, C, HQ, H, M, ENTRIES, D, T = 2, 5, 4, 2, 3, 6, 8, 11
START, TQ = -1, 12  # one query of the first block is missing, two of the last


def make(dtype=torch.float64, sinks=False):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(B, HQ, TQ, D, generator=g, dtype=dtype)
    k, v = (torch.randn(B, H, T, D, generator=g, dtype=dtype) for _ in range(2))
    index = torch.randint(T, (B, C, H, ENTRIES), generator=g, dtype=torch.int32)
    visible = torch.rand(B, C, 1, M, ENTRIES, generator=g) < 0.7
    visible[..., 0] = True
    s_aux = torch.randn(HQ, generator=g, dtype=torch.float32) if sinks else None
    return [
        x if x is None or not x.is_floating_point() else x.requires_grad_() for x in (q, k, v, index, visible, s_aux)
    ]


def by_hand(q, k, v, index, visible, s_aux, scaling, softcap):
    """Entry by entry with a softmax over the visible ones."""
    out = torch.empty(B, HQ, TQ, D, dtype=q.dtype)
    for b, hq, t in itertools.product(range(B), range(HQ), range(TQ)):
        block, m = divmod(t - START, M)
        h = hq // (HQ // H)
        seen = index[b, block, h].long()[visible[b, block, 0, m]]
        logits = k[b, h, seen] @ q[b, hq, t] * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if s_aux is not None:
            logits = torch.cat([logits, s_aux[hq : hq + 1].to(logits.dtype)])
        out[b, hq, t] = logits.softmax(dim=0)[: len(seen)] @ v[b, h, seen]
    return out


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("part_bytes", [1, 1 << 30])  # one block at a time, and all at once
def test_values_and_gradients_by_hand(monkeypatch, softcap, sinks, part_bytes):
    monkeypatch.setattr(gathered, "GATHERED_BYTES", part_bytes)
    q, k, v, index, visible, s_aux = make(sinks=sinks)
    leaves = [x for x in (q, k, v, s_aux) if x is not None]
    out = attend_gathered(q, k, v, index, visible, scaling=0.3, softcap=softcap, s_aux=s_aux, start=START)
    expected = by_hand(q, k, v, index, visible, s_aux, 0.3, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_one_mask_for_all_blocks():
    q, k, v, index, visible, _ = make()
    shared = visible[:1, :1]
    out = attend_gathered(q, k, v, index, shared, scaling=0.3, start=START)
    torch.testing.assert_close(out, by_hand(q, k, v, index, shared.expand(B, C, -1, -1, -1), None, 0.3, None))


def test_nothing_gathered_is_kept_for_the_backward_pass():
    q, k, v, index, visible, _ = make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        attend_gathered(q, k, v, index, visible, scaling=0.3, start=START)
    blocks = (B * C, HQ, M, D)
    assert kept == [blocks, k.shape, v.shape, (B * C, *index.shape[2:]), (B * C, *visible.shape[2:])]


def test_bf16_gradients_are_summed_in_fp32(monkeypatch):
    """An entry that 1,024 blocks read, one by one: sums in bf16 would stop growing at 256 times one share."""
    n = 1024
    monkeypatch.setattr(gathered, "GATHERED_BYTES", 1)
    q = torch.zeros(1, 1, n, D, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 2, D, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, 2, D, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1, n, 1, 1, dtype=torch.int32)
    out = attend_gathered(q, k, v, index, torch.ones(1, 1, 1, 1, 1, dtype=torch.bool), scaling=1.0)
    out.sum().backward()
    assert v.grad[0, 0, 0].tolist() == [n] * D and v.grad[0, 0, 1].tolist() == [0] * D


def test_autocast_acts_in_both_passes():
    q, k, v, index, visible, _ = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_gathered(q, k, v, index, visible, scaling=0.3, start=START)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32 and k.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 alone
        out = attend_gathered(q.double(), k.double(), v.double(), index, visible, scaling=0.3, start=START)
    assert out.dtype is torch.float64
