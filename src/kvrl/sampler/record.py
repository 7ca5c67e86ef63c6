"""What a finished request leaves: its rollout, with the trace cut out of the slots' record."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrl.cache.slots import KVSlots
from kvrl.cache.trace import KVTrace, num_events
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.request import Request
from kvrl.sampler.types import Rollout, Support


def make_rollout(slots: KVSlots, row: int, request: Request, sampling: SamplingConfig) -> Rollout:
    """The rollout of a request that has ended in a row of the slots."""
    support = None
    if sampling.truncates:
        sizes = torch.tensor([0, *(len(x) for x in request.support)], dtype=torch.int32)
        support = Support(torch.cat(request.support), sizes.cumsum(0, dtype=torch.int32))
    assert request.finish_reason is not None
    return Rollout(
        prompt_ids=request.prompt_ids,
        completion_ids=request.completion_ids,
        logprobs=torch.tensor(request.logprobs, dtype=torch.float32),
        loss_mask=torch.tensor(request.sampled, dtype=torch.bool),
        trace=make_trace(slots, row, request),
        finish_reason=request.finish_reason,
        temperature=sampling.temperature or 1.0,
        support=support,
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        routing=torch.stack(request.routing, dim=1) if request.routing else None,
        beacons=request.beacons,
    )


def make_trace(slots: KVSlots, row: int, request: Request) -> KVTrace:
    """The request's trace. Under beacons nothing was scored: what went follows from where they stand."""
    spec, prompt, raw = slots.spec, len(request.prompt_ids), len(request.completion_ids)
    windows = torch.tensor([w or 0 for w in spec.windows])
    if request.beacons is not None:
        return replace(request.beacons.trace(spec.num_layers, spec.kv_heads, prompt, raw), windows=windows)
    budget, buffer = (slots.budget, slots.buffer) if slots.policy else (0, 0)
    events = num_events(request.forwarded, budget, buffer) if slots.policy else 0
    table = torch.full((spec.num_layers, spec.kv_heads, prompt + raw), -1, dtype=slots.events.dtype)
    if events:
        table[slots.managed] = slots.events[:, row, :, : prompt + raw].cpu()
    at = slots.capacity + slots.buffer * torch.arange(events, dtype=torch.int32)
    return KVTrace(table, at, budget, buffer, windows)
