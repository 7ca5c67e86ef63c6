"""The arithmetic of attention against loops over heads and queries; segment replay against mask replay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers import cache, gap, make_prompts, model, random_trace, replay, sample
from kvrl.attention.kernels import attend
from kvrl.attention.replay import ReplayContext, attend_mask
from kvrl.attention.seam import AttentionCall
from kvrl.attention.segments import Plan, attend_band, attend_segments, survivors
from kvrl.cache.trace import KVTrace
from kvrl.errors import KvrlError

HQ, HKV, D = 4, 2, 8


def slow(q, k, v, visible, *, scaling, softcap=None, s_aux=None):
    """One query of one head at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                those = visible[b, kv, i].nonzero()[:, 0]
                x = scaling * (k[b, kv, those] @ q[b, h, i])
                x = x if softcap is None else softcap * torch.tanh(x / softcap)
                weight = x.exp()
                total = weight.sum() + (0 if s_aux is None else math.exp(s_aux[h]))
                out[b, h, i] = (weight / total) @ v[b, kv, those]
    return out


def qkv(length, keys=None, seed=0, batch=2):
    g = torch.Generator().manual_seed(seed)
    shape = {"q": (HQ, length), "k": (HKV, keys or length), "v": (HKV, keys or length)}
    return [torch.randn(batch, h, t, D, generator=g, dtype=torch.float64) for h, t in shape.values()]


KINDS = [{}, {"softcap": 1.3}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
         {"softcap": 2.0, "s_aux": torch.tensor([0.1, 0.2, 3.0, -2.0], dtype=torch.float64)}]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("queries, keys", [(1, 9), (5, 9), (9, 9)])
def test_visible_entries(queries, keys, kind):
    q, k, v = qkv(queries, keys)
    visible = torch.rand(2, HKV, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.5
    visible[..., 3] = True
    expected = slow(q, k, v, visible, scaling=0.4, **kind)
    assert gap(attend(q, k, v, visible, scaling=0.4, **kind), expected) < 1e-6  # sinks are fp32
    shared = visible[:1, :1]
    expected = slow(q, k, v, shared.expand_as(visible), scaling=0.4, **kind)
    assert gap(attend(q, k, v, shared, scaling=0.4, **kind), expected) < 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("length", [1, 7])
def test_no_mask_is_causal(length, kind):
    q, k, v = qkv(length)
    causal = torch.ones(length, length, dtype=torch.bool).tril().expand(2, HKV, -1, -1)
    assert gap(attend(q, k, v, None, scaling=0.4, **kind), slow(q, k, v, causal, scaling=0.4, **kind)) < 1e-6


def run(call_fields, tokens, kind, make):
    q, k, v = (x.requires_grad_() for x in qkv(max(tokens), batch=len(tokens)))
    call = AttentionCall(
        layer=0,
        q=q,
        k=k,
        v=v,
        scaling=0.4,
        **{"window": None, "softcap": None, "s_aux": None, **kind, **call_fields},
    )
    out = make(call)
    real = torch.arange(max(tokens)) < torch.tensor(tokens)[:, None]  # padding is nobody's business
    (
        out * real[:, None, :, None] * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    ).sum().backward()
    return out.detach() * real[:, None, :, None], q.grad, k.grad, v.grad


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("window", [None, 3, 16, 17, 25])
@pytest.mark.parametrize("budget, buffer, tokens", [(12, 4, (40, 41, 17, 9)), (5, 11, (50, 16)), (15, 1, (30, 33))])
def test_segments_equal_the_mask_with_gradients(budget, buffer, tokens, window, kind):
    traces = [random_trace(t, budget, buffer, seed=t) for t in tokens]
    if window is not None and window <= budget + buffer:  # a ring: the sampler's trace records nothing there
        lifetimes = None
    else:
        lifetimes = torch.stack(
            [torch.nn.functional.pad(t.evicted_at()[0], (0, max(tokens) - t.num_tokens)) for t in traces]
        )
        lifetimes = lifetimes.masked_fill(lifetimes == 0, 10**6)
    plan = Plan.from_traces(traces, max(tokens), "cpu")
    expected = run({"window": window}, tokens, kind, lambda call: attend_mask(call, lifetimes))
    got = run({"window": window}, tokens, kind, lambda call: attend_segments(call, plan))
    for a, b in zip(got, expected, strict=True):
        assert gap(a, b) < 1e-9


@pytest.mark.parametrize("length, window", [(1, 1), (5, 1), (7, 3), (9, 3), (20, 7), (6, 6), (6, 5)])
def test_band(length, window):
    fields = {"window": window}
    mask = run(fields, (length,), {}, lambda call: attend_mask(call, None))
    for a, b in zip(run(fields, (length,), {}, attend_band), mask, strict=True):
        assert gap(a, b) < 1e-12


def test_survivors_by_hand():
    """Budget 2, buffer 1, events at 3, 4, 5 of 7 tokens (the last has no forward)."""
    events = torch.tensor([[[0, 1, -1, 2, -1, 3, -1]]], dtype=torch.int16)
    trace = KVTrace(events, torch.tensor([3, 4, 5, 6], dtype=torch.int32), 2, 1)
    assert survivors(trace).tolist() == [[[[1, 2], [2, 3], [2, 4], [2, 4]]]]


@pytest.mark.parametrize("change, message", [
    (lambda t: KVTrace(t.events, t.evicted_at_event + 1, t.budget, t.buffer), "not every 8 tokens after 32"),
    (lambda t: KVTrace(t.events[..., :-20], t.evicted_at_event, t.budget, t.buffer),
     "cut or belongs to other tokens"),
    (lambda t: KVTrace(t.events.where(t.events != 0, -1), t.evicted_at_event, t.budget, t.buffer),
     "eviction 0 takes 0 entries of layer 0, head 0, and not 8"),
    (lambda t: KVTrace(wiped(t.events), t.evicted_at_event, t.budget, t.buffer), "takes 0 entries of layer 1, head 1"),
    (lambda t: replace(t, events=wiped(t.events)), "takes 0 entries of layer 1, head 1"),
    (lambda t: replace(t, events=torch.full_like(t.events, -1)), "takes 0 entries of layer 0"),
    (lambda t: KVTrace(t.events[..., :20].fill_(-1), t.evicted_at_event[:0], 4, 8), "0 evictions in 20 tokens"),
    (lambda t: replace(t, evicted_at_event=t.evicted_at_event.float()), "is torch.float32"),
    (lambda t: replace(t, buffer=-8), "buffer -8, is no schedule"),
    (lambda t: replace(t, events=t.events.where(t.events != t.num_events - 1, -1),
                       evicted_at_event=t.evicted_at_event[:-1]), "it was cut"),
])  # fmt: skip
@pytest.mark.parametrize("backend", ["mask", "segments"])
def test_a_trace_off_its_schedule_is_refused(change, message, backend):
    with pytest.raises(KvrlError, match=message):
        ReplayContext([change(sample()[2].trace)], 72, backend=backend)


def wiped(events: torch.Tensor) -> torch.Tensor:
    """One head of one layer lost its record."""
    events = events.clone()
    events[1, 1] = -1
    return events


@pytest.mark.parametrize("sampled, here", [(8, None), (40, None), (8, 40), (40, 8), (8, 16), (None, 8)])
@pytest.mark.parametrize("backend", ["mask", "segments"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_trace_of_a_model_with_other_windows_is_refused(sampled, here, backend, recorded):
    def mistral(window):
        return model("llama") if window is None else model("mistral", window)

    if not recorded and {sampled, here} in ({8, 16}, {40, None}):
        return  # both rings, or both the policy's: without a record it cannot be told
    (r,) = sample(mistral(sampled), prompts=make_prompts([30]))
    if not recorded:
        r = replace(r, trace=replace(r.trace, windows=None))
        if not r.trace.managed.any():
            return
    with pytest.raises(KvrlError, match="trace"):
        replay(mistral(here), [r], backend=backend)


def test_one_schedule_in_a_batch():
    traces = [sample()[2].trace, sample(config=cache(budget=20))[2].trace]
    with pytest.raises(KvrlError, match=r"one budget and buffer in a batch, got \[\(20, 8\), \(24, 8\)\]"):
        ReplayContext(traces, 100)
    ReplayContext(traces, 100, backend="mask")


def test_flex_is_for_cuda():
    with pytest.raises(KvrlError, match="flex has no backward on CPU"):
        ReplayContext([sample()[2].trace], 72, backend="flex")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex needs CUDA")
@pytest.mark.parametrize("kind", [{}, {"softcap": 1.3}], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 16, 25])
def test_flex_equals_the_mask(window, kind):
    from kvrl.attention.flex import attend_flex

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 300, 64, generator=g).cuda() for h in (HQ, HKV, HKV))
    lifetimes = torch.stack([random_trace(300, 100, 28, seed=s).evicted_at()[0] for s in (1, 2)]).cuda()
    results = []
    for function in (attend_mask, attend_flex):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        call = AttentionCall(0, *given, scaling=0.125, **{"window": window, "softcap": None, "s_aux": None, **kind})
        out = function(call, lifetimes)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in given)])
    for a, b in zip(*results, strict=True):
        assert gap(a, b) < 2e-3 * max(1.0, b.abs().max().item())
