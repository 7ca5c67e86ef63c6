"""Saved tensors counted without memory, against autograd's own on the CPU and against formulas by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from kvrl.activations import Saved, planned_trace, saved_bytes
from kvrl.attention.probe import prepare, probe
from kvrl.attention.replay import ReplayContext
from kvrl.cache.trace import num_events
from kvrl.head import decoder
from kvrl.models.tiny_families import build_family
from memory import PeakMemory, saved_by_autograd

T, BUDGET, BUFFER = 90, 24, 8


def build(family: str, dtype: torch.dtype = torch.float32):
    return prepare(build_family(family, dtype=dtype))


def trace_of(lm):
    return planned_trace(probe(lm), T, BUDGET, BUFFER)


def forward(lm, trace, backend="segments"):
    context = ReplayContext(None if trace is None else [trace], T, backend=backend)
    ids = torch.zeros(1, T, dtype=torch.long)
    positions = torch.arange(T)[None]
    return decoder(lm)(input_ids=ids, position_ids=positions, use_cache=False, kv=context).last_hidden_state


def survivors_bytes(lm) -> int:
    return 4 * lm.config.num_hidden_layers * 2 * num_events(T - 1, BUDGET, BUFFER) * BUDGET


def planned(lm, trace, backend="segments") -> Saved:
    return saved_bytes(copy.deepcopy(lm).to("meta"), T, trace, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2", "mistral"])
def test_saved_tensors_are_those_of_the_real_forward(family, dtype):
    lm = build(family, dtype)
    assert planned(lm, None).kept == saved_by_autograd(lm, lambda: forward(lm, None))
    sparse = saved_by_autograd(lm, lambda: forward(lm, trace_of(lm)))
    assert planned(lm, trace_of(lm)).kept == sparse + survivors_bytes(lm)


def test_the_mask_backend_keeps_its_mask():
    lm = build("llama")
    kept = saved_by_autograd(lm, lambda: forward(lm, trace_of(lm), "mask"))
    lifetimes = 4 * 2 * 2 * T  # int32 [layers, KV heads, T]
    assert planned(lm, trace_of(lm), "mask").kept == kept + lifetimes
    assert kept > 2 * 4 * 4 * T * T  # a [heads, T, T] mask for each layer


def llama_layer(bf16: bool) -> int:
    e, a, f, heads = 64, 64, 96, 4
    return T * (16 * e + 8 * a + 8 * f if bf16 else 24 * e + 16 * a + 16 * f) + T * (4 * heads + 8)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_formula_of_a_llama_layer(bf16):
    saved = planned(build("llama", torch.bfloat16 if bf16 else torch.float32), None)
    size, e, d = (2, 64, 16) if bf16 else (4, 64, 16)
    rope = 2 * T * d * size  # cos and sin, which the first layer meets first
    outside = T * (4 * e + 4 + size * e) + 8 * T  # the last norm: input in fp32, scale, normalised; the token ids
    assert saved.layer == llama_layer(bf16) + rope
    assert saved.kept == 2 * llama_layer(bf16) + rope + outside
    assert saved.inputs == 2 * T * e * size + outside


def test_under_a_trace_no_gathered_key_is_kept():
    vector, heads, kv_heads = 4 * 16, 4, 2
    capacity, segments = BUDGET + BUFFER, -(-(T - BUDGET - BUFFER) // BUFFER)
    dense = T * (4 * heads * vector + 4 * heads)  # q, repeated k and v, output; a number for each query
    first = T * heads * vector + capacity * (3 * heads * vector + 4 * heads)  # q is a view of all queries
    later = segments * heads * BUFFER * vector  # queries by segments; keys and values are gathered again
    mask = BUFFER * capacity  # booleans, the same for all segments and heads
    index = 4 * kv_heads * segments * capacity
    joined = T * heads * vector  # both parts in order, for the output projection
    gathered_from = 2 * T * kv_heads * vector
    lm = build("llama")
    attention = planned(lm, trace_of(lm)).layer - (planned(lm, None).layer - dense)
    assert attention == first + later + mask + index + joined + gathered_from


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family, dtype", [("llama", torch.bfloat16), ("qwen3", torch.float32)])
def test_peak_of_forward_and_backward_is_within_the_plan(family, dtype, checkpointing):
    """The tensors kept, and half of the largest layer for what the backward pass makes, which is generous."""
    lm = build(family, dtype).train()
    trace = trace_of(lm)
    saved = planned(lm, trace)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    for p in lm.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with PeakMemory() as memory:
        forward(lm, trace).float().sum().backward()
    plan = (saved.inputs + saved.layer if checkpointing else saved.kept) + saved.layer // 2
    assert (0.65 if checkpointing else 0.75) * plan <= memory.peak <= plan


def test_a_planned_trace_is_a_valid_one_with_the_rollouts_evictions():
    spec = probe(build("gemma3_text"))  # its second layer is a ring
    trace = planned_trace(spec, T, BUDGET, BUFFER).validate()
    assert trace.events.shape == (3, 2, T) and trace.num_events == num_events(T - 1, BUDGET, BUFFER) == 8
    assert int((trace.events[0, 0] >= 0).sum()) == 8 * BUFFER
    assert int((trace.events[1] >= 0).sum()) == 0
    assert [planned_trace(spec, n, BUDGET, BUFFER).num_events for n in (20, 32, 33, 41)] == [0, 0, 1, 2]
