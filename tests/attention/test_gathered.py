"""Attention over gathered entries: against attention over copies made by hand, and its gradients."""

from __future__ import annotations

import pytest
import torch

from kvrl.attention import gathered
from kvrl.attention.gathered import attend_gathered

N, HQ, H, M, ENTRIES, D, B, T = 5, 4, 2, 3, 6, 8, 2, 11


def make(dtype=torch.float64, sinks=False):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(N, HQ, M, D, generator=g, dtype=dtype)
    k, v = (torch.randn(B, H, T, D, generator=g, dtype=dtype) for _ in range(2))
    index = torch.randint(B * H * T, (N, H, ENTRIES), generator=g, dtype=torch.int32)
    visible = torch.rand(N, 1, M, ENTRIES, generator=g) < 0.7
    visible[..., 0] = True
    s_aux = torch.randn(HQ, generator=g, dtype=torch.float32) if sinks else None
    return [
        x if x is None or not x.is_floating_point() else x.requires_grad_() for x in (q, k, v, index, visible, s_aux)
    ]


def by_hand(q, k, v, index, visible, s_aux, scaling, softcap):
    """Entry by entry with a softmax over the visible ones."""
    rows_k, rows_v = k.reshape(-1, D), v.reshape(-1, D)
    out = []
    for n in range(N):
        for hq in range(HQ):
            at = index[n, hq // (HQ // H)].long()
            for m in range(M):
                seen = at[visible[n, 0, m]]
                logits = rows_k[seen] @ q[n, hq, m] * scaling
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if s_aux is not None:
                    logits = torch.cat([logits, s_aux[hq : hq + 1].to(logits.dtype)])
                weights = logits.softmax(dim=0)[: len(seen)]
                out.append(weights @ rows_v[seen])
    return torch.stack(out).view(N, HQ, M, D)


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True)])
@pytest.mark.parametrize("part_bytes", [1, 1 << 30])  # one segment at a time, and all at once
def test_values_and_gradients_by_hand(monkeypatch, softcap, sinks, part_bytes):
    monkeypatch.setattr(gathered, "GATHERED_BYTES", part_bytes)
    q, k, v, index, visible, s_aux = make(sinks=sinks)
    leaves = [x for x in (q, k, v, s_aux) if x is not None]
    out = attend_gathered(q, k, v, index, visible, scaling=0.3, softcap=softcap, s_aux=s_aux)
    expected = by_hand(q, k, v, index, visible, s_aux, 0.3, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-8)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, weight), torch.autograd.grad(expected, leaves, weight), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_one_mask_for_all_segments():
    q, k, v, index, visible, _ = make()
    shared = visible[:1]
    out = attend_gathered(q, k, v, index, shared, scaling=0.3)
    torch.testing.assert_close(out, by_hand(q, k, v, index, shared.expand(N, -1, -1, -1), None, 0.3, None))


def test_nothing_gathered_is_kept_for_the_backward_pass():
    q, k, v, index, visible, _ = make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        attend_gathered(q, k, v, index, visible, scaling=0.3)
    assert kept == [q.shape, k.shape, v.shape, index.shape, visible.shape]


def test_bf16_gradients_are_summed_in_fp32(monkeypatch):
    """An entry that 1,024 segments read, one by one: sums in bf16 would stop growing at 256 times one share."""
    n = 1024
    monkeypatch.setattr(gathered, "GATHERED_BYTES", 1)
    q = torch.zeros(n, 1, 1, D, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 2, D, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, 2, D, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(n, 1, 1, dtype=torch.int32)
    out = attend_gathered(q, k, v, index, torch.ones(1, 1, 1, 1, dtype=torch.bool), scaling=1.0)
    out.sum().backward()
    assert v.grad[0, 0, 0].tolist() == [n] * D and v.grad[0, 0, 1].tolist() == [0] * D


def test_autocast_acts_in_both_passes():
    q, k, v, index, visible, _ = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend_gathered(q, k, v, index, visible, scaling=0.3)
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32 and k.grad.abs().sum() > 0
