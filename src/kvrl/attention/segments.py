"""Replay by segments: ordinary attention over gathered survivors, O(T * (budget + buffer)).

Evictions happen at the same positions for all layers and heads. Between two of them, `buffer` queries see
the survivors (exactly `budget` entries, different for every layer and head) and their own segment causally:
bottom-right-aligned causal attention of `buffer` queries over `budget + buffer` keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrl.attention.kernels import attend
from kvrl.attention.seam import AttentionCall
from kvrl.cache.trace import KVTrace, num_events
from kvrl.errors import KvrlError


@dataclass(frozen=True)
class Plan:
    """The survivors of every eviction of a batch.

    survivors: int32 [layers, B, kv_heads, events, budget], positions in order. Rows of the batch with fewer
    evictions than `events` are filled with valid positions; only padding reads them.
    """

    survivors: Tensor
    budget: int
    buffer: int

    @property
    def capacity(self) -> int:
        return self.budget + self.buffer

    @classmethod
    def from_traces(cls, traces: Sequence[KVTrace], length: int, device: torch.device | str) -> Plan:
        """Survivors of traces that share one schedule; KvrlError if they do not or if one does not keep it."""
        schedules = {(t.budget, t.buffer) for t in traces if t.num_events}
        if len(schedules) != 1:
            raise KvrlError(
                f"replay.backend: segments needs one budget and buffer in a batch, got {sorted(schedules)}; "
                "split the batch or use 'mask'"
            )
        budget, buffer = schedules.pop()
        for b, trace in enumerate(traces):
            if not trace.num_events and trace.num_tokens - 1 > budget + buffer:
                raise KvrlError(
                    f"replay.backend: segments replays {budget} + {buffer} entries in this batch, but row {b} kept all "
                    f"of its {trace.num_tokens}; score rollouts of different caches apart, or use 'mask'"
                )
        layers, heads, _ = traces[0].events.shape
        most = max(t.num_events for t in traces)
        out = torch.arange(budget, dtype=torch.int32).repeat(layers, len(traces), heads, most, 1)
        for b, trace in enumerate(traces):
            if trace.num_events:
                out[:, b, :, : trace.num_events] = survivors(trace)
        return cls(out.to(device), budget, buffer)


def survivors(trace: KVTrace) -> Tensor:
    """Positions alive after each eviction: int32 [layers, kv_heads, events, budget].

    Raises KvrlError for a trace whose evictions do not follow its schedule or do not leave `budget` entries.
    """
    budget, buffer, events = trace.budget, trace.buffer, trace.events
    expected = budget + buffer + buffer * torch.arange(trace.num_events, dtype=torch.int32)
    if not torch.equal(trace.evicted_at_event.cpu(), expected):
        raise KvrlError(
            f"trace.evicted_at_event: evictions are not every {buffer} tokens after {budget + buffer}; "
            "replay this trace with backend 'mask'"
        )
    if num_events(trace.num_tokens - 1, budget, buffer) != trace.num_events:
        raise KvrlError(
            f"trace: {trace.num_events} evictions in {trace.num_tokens} tokens, but budget {budget}, buffer {buffer} "
            f"make {num_events(trace.num_tokens - 1, budget, buffer)}; it was cut or belongs to other tokens"
        )
    layers, heads, tokens = events.shape
    managed = (events >= 0).any(dim=-1)  # [L, H]; sliding layers with a ring record nothing
    out = torch.arange(budget, dtype=torch.int32).expand(layers, heads, trace.num_events, budget).clone()
    if not bool(managed.any()):
        return out
    rows = events[managed]  # [R, T]
    index = torch.arange(tokens)
    for i in range(trace.num_events):
        alive = ((rows < 0) | (rows > i)) & (index < int(expected[i]))  # [R, T]
        if not bool((alive.sum(dim=-1) == budget).all()):
            raise KvrlError(f"trace.events: eviction {i} does not leave {budget} entries in every head; it is corrupt")
        out[managed, i] = alive.nonzero()[:, 1].view(-1, budget).to(torch.int32)
    return out


def attend_segments(call: AttentionCall, plan: Plan | None) -> Tensor:
    """Attention of a batch under a plan, or the dense view without one: q [B, Hq, T, D] -> [B, Hq, T, D]."""
    capacity = call.q.shape[2] if plan is None else plan.capacity
    if call.window is not None and call.window <= capacity and call.window < call.q.shape[2]:
        return attend_band(call)  # a ring in the sampler: no policy ever touched it
    if plan is None or call.q.shape[2] <= capacity:
        return attend(call.q, call.k, call.v, _causal(call, call.q.shape[2]), **call.kernel())
    first = attend(
        call.q[:, :, :capacity], call.k[:, :, :capacity], call.v[:, :, :capacity],
        _causal(call, capacity), **call.kernel(),
    )  # fmt: skip
    return torch.cat([first, _later_segments(call, plan)], dim=2)


def _causal(call: AttentionCall, length: int) -> Tensor | None:
    """The mask of a first segment: None (plain causal) unless the layer's window is shorter than it."""
    if call.window is None or call.window >= length:
        return None
    q = torch.arange(length, device=call.q.device)[:, None]
    k = torch.arange(length, device=call.q.device)
    return (k <= q) & (k > q - call.window)


def _later_segments(call: AttentionCall, plan: Plan) -> Tensor:
    """Attention of all queries after the first eviction, [B, Hq, T - capacity, D]."""
    batch, hq, length, d = call.q.shape
    heads, budget, buffer, capacity = call.k.shape[1], plan.budget, plan.buffer, plan.capacity
    count = -(-(length - capacity) // buffer)
    fill = count * buffer - (length - capacity)
    kept = plan.survivors[call.layer].long()  # [B, H, E, budget]
    if kept.shape[2] < count:  # queries after the last eviction on record are padding, or the last token's
        kept = torch.cat([kept, kept[:, :, -1:].expand(-1, -1, count - kept.shape[2], -1)], dim=2)
    kept = kept[:, :, :count]

    def split(x: Tensor) -> Tensor:
        """[B, h, T, D] -> [B, h, count, buffer, D] of the tokens after the first segment."""
        return F.pad(x[:, :, capacity:], (0, 0, 0, fill)).view(batch, -1, count, buffer, d)

    def gather(x: Tensor) -> Tensor:
        """Survivors and own segment as keys or values: [B * count, H, capacity, D]."""
        index = kept.flatten(2)[..., None].expand(-1, -1, -1, d)
        old = x.gather(2, index).view(batch, heads, count, budget, d)
        return torch.cat([old, split(x)], dim=3).transpose(1, 2).flatten(0, 1)

    q = split(call.q).transpose(1, 2).flatten(0, 1)  # [B * count, Hq, buffer, D]
    entry = torch.arange(capacity, device=q.device)
    row = torch.arange(buffer, device=q.device)[:, None]
    visible = (entry <= budget + row)[None, None]  # causal, aligned to the bottom right
    if call.window is not None:  # a window longer than the slot: lifetime = min(policy's, k + window)
        start = capacity + buffer * torch.arange(count, device=q.device)
        own = (start[:, None] + torch.arange(buffer, device=q.device)).expand(batch, heads, count, buffer)
        position = torch.cat([kept, own], dim=3).transpose(1, 2)  # [B, count, H, capacity]
        oldest = start[:, None] + row.T - call.window  # [count, buffer]
        inside = position[..., None, :] > oldest[:, None, :, None]  # [B, count, H, buffer, capacity]
        visible = visible & inside.flatten(0, 1)
    out = attend(q, gather(call.k), gather(call.v), visible, **call.kernel())  # [B * count, Hq, buffer, D]
    out = out.view(batch, count, hq, buffer, d).transpose(1, 2).reshape(batch, hq, count * buffer, d)
    return out[:, :, : length - capacity]


def attend_band(call: AttentionCall) -> Tensor:
    """A sliding window alone, in blocks of `window` queries over two blocks of keys: O(T * window)."""
    batch, hq, length, d = call.q.shape
    window = call.window
    assert window is not None
    count = -(-length // window)
    fill = count * window - length

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, fill)).view(batch, -1, count, window, d).transpose(1, 2)  # [B, count, h, window, D]

    def with_previous(x: Tensor) -> Tensor:
        b = blocks(x)
        return torch.cat([F.pad(b[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), b], dim=3).flatten(0, 1)

    row = torch.arange(window, device=call.q.device)[:, None]
    entry = torch.arange(2 * window, device=call.q.device)
    visible = (entry > row) & (entry <= row + window)  # [window, 2 * window]
    real = entry >= window * (torch.arange(count, device=call.q.device) == 0)[:, None]  # the first has no previous
    visible = (visible & real[:, None, :]).repeat(batch, 1, 1)[:, None]  # [B * count, 1, window, 2 * window]
    out = attend(blocks(call.q).flatten(0, 1), with_previous(call.k), with_previous(call.v), visible, **call.kernel())
    return out.view(batch, count, hq, window, d).transpose(1, 2).reshape(batch, hq, count * window, d)[:, :, :length]
