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

from kvrl.attention.gathered import attend_gathered, takes
from kvrl.attention.kernels import attend
from kvrl.attention.seam import AttentionCall
from kvrl.cache.trace import KVTrace
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
        """Survivors of valid traces that share one schedule; KvrlError if they do not."""
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
    """Positions alive after each eviction, in order: int32 [layers, kv_heads, events, budget]."""
    trace.validate()
    budget, buffer, events = trace.budget, trace.buffer, trace.events
    layers, heads, _ = events.shape
    out = torch.arange(budget, dtype=torch.int32).expand(layers, heads, trace.num_events, budget).clone()
    rows = events[trace.managed].flatten(0, 1)  # [R, T]; sliding layers with a ring record nothing
    found = out.new_empty(len(rows), trace.num_events, budget)
    alive = torch.arange(trace.capacity).expand(len(rows), -1)  # [R, capacity]
    for i, at in enumerate(trace.evicted_at_event.tolist()):
        kept = alive[rows.gather(1, alive) != i].view(len(rows), budget)
        found[:, i] = kept.to(torch.int32)
        alive = torch.cat([kept, torch.arange(at, at + buffer).expand(len(rows), -1)], dim=1)
        alive = alive.clamp(max=trace.num_tokens - 1)  # beyond the last eviction nothing is read
    out[trace.managed] = found.view(-1, heads, trace.num_events, budget)
    return out


def attend_segments(call: AttentionCall, plan: Plan | None, *, native: bool = True) -> Tensor:
    """Attention of a batch under a plan, or the dense view without one: q [B, Hq, T, D] -> [B, Hq, T, D]."""
    capacity = call.q.shape[2] if plan is None else plan.capacity
    if call.window is not None and call.window <= capacity and call.window < call.q.shape[2]:
        return attend_band(call)  # a ring in the sampler: no policy ever touched it
    if plan is None:
        return attend(call.q, call.k, call.v, _causal(call, call.q.shape[2]), **call.kernel())
    if native and takes(call.q, call.k, call.v, plan.buffer, softcap=call.softcap, s_aux=call.s_aux):
        return _from(-(-capacity % plan.buffer), call, plan, native)
    first = attend(
        call.q[:, :, :capacity], call.k[:, :, :capacity], call.v[:, :, :capacity],
        _causal(call, min(capacity, call.q.shape[2])), **call.kernel(),
    )  # fmt: skip
    return first if call.q.shape[2] <= capacity else torch.cat([first, _from(capacity, call, plan, native)], dim=2)


def _causal(call: AttentionCall, length: int) -> Tensor | None:
    """The mask of a first segment: None (plain causal) unless the layer's window is shorter than it."""
    if call.window is None or call.window >= length:
        return None
    q = torch.arange(length, device=call.q.device)[:, None]
    k = torch.arange(length, device=call.q.device)
    return (k <= q) & (k > q - call.window)


def _from(begin: int, call: AttentionCall, plan: Plan, native: bool) -> Tensor:
    """Attention of all queries from `begin` on, in blocks of `buffer`: [B, Hq, T - max(begin, 0), D].

    begin: the first eviction, or whole blocks before it so that all tokens are among them; it may be negative then.
    """
    batch, heads, length, _ = call.k.shape
    budget, buffer, capacity = plan.budget, plan.buffer, plan.capacity
    count = -(-(length - begin) // buffer)
    early = min(count, (capacity - begin) // buffer)  # blocks before the first eviction
    kept = plan.survivors[call.layer]  # [B, H, E, budget]
    if kept.shape[2] < count - early:  # queries after the last eviction on record are padding, or the last token's
        kept = torch.cat([kept, kept[:, :, -1:].expand(-1, -1, count - early - kept.shape[2], -1)], dim=2)
    kept = kept[:, :, : count - early]

    device = call.q.device
    # All tokens up to the block's last, or survivors and the block's own; beyond the last token only padding looks
    start = begin + buffer * torch.arange(count, device=device, dtype=torch.int32)
    all_so_far = (start[:early, None] + buffer - capacity) + torch.arange(capacity, device=device, dtype=torch.int32)
    own = start[early:, None] + torch.arange(buffer, device=device, dtype=torch.int32)
    position = torch.cat([
        all_so_far.expand(batch, heads, -1, -1), torch.cat([kept, own.expand(batch, heads, -1, -1)], dim=3)
    ], dim=2).transpose(1, 2)  # [B, count, H, capacity]  # fmt: skip
    index = position.clamp(0, length - 1).contiguous()
    counts = None  # of entries, the last ones
    if early:
        counts = (start.long() + buffer).clamp(max=capacity).repeat(batch, 1)
    entry = torch.arange(capacity, device=device)
    row = torch.arange(buffer, device=device)[:, None]
    visible = (entry <= budget + row)[None, None, None]  # causal, aligned to the bottom right
    if call.window is not None:  # a window longer than the slot: lifetime = min(policy's, k + window)
        oldest = start[:, None] + row.T - call.window  # [count, buffer]
        visible = visible & (position[..., None, :] > oldest[:, None, :, None])  # [B, count, H, buffer, capacity]
    queries = call.q[:, :, max(0, begin) :]
    return attend_gathered(
        queries, call.k, call.v, index, visible, start=min(0, begin), native=native, counts=counts, **call.kernel()
    )


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
