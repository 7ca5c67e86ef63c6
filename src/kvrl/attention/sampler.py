"""The sampler's side of the seam: append the new entries, attend to what is alive, let the policy observe."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from kvrl.attention.kernels import attend
from kvrl.attention.seam import AttentionCall
from kvrl.cache.slots import KVSlots
from kvrl.native.decode_attention import decode_attention


class DecodeContext:
    """One token in every slot, at the fixed width of the engine (contract 4).

    tokens: tokens forwarded in each slot before this one, [S] int64 on the device (their logical positions).
    slots_at: the storage slot of each new entry, [S] int64. native: attend by the compiled CPU kernel.
    """

    def __init__(self, slots: KVSlots, tokens: Tensor, slots_at: Tensor, *, native: bool = False) -> None:
        self.slots, self.tokens, self.slots_at, self.native = slots, tokens, slots_at, native
        self.rows = torch.arange(slots.num_slots, device=tokens.device)
        slots.append_positions(self.rows, slots_at, tokens)

    @functools.cached_property
    def alive(self) -> Tensor:
        """Entries that a slot holds: bool [S, 1, 1, capacity]."""
        held = torch.arange(self.slots.capacity, device=self.tokens.device)
        return (held <= self.slots_at[:, None])[:, None, None, :]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of one token a slot: q [S, Hq, 1, D] -> [S, Hq, 1, D]."""
        call = call.to(self.slots.k.dtype)
        ring = self.slots.rings.get(call.layer)
        if ring is not None:
            if self.native:
                at, count = self.tokens % ring.window, (self.tokens + 1).clamp(max=ring.window)
                return self._native(call, ring.k[:-1], ring.v[:-1], at, count)
            ring.append(self.rows, self.tokens, call.k[:, :, 0], call.v[:, :, 0])
            return attend(call.q, ring.k[:-1], ring.v[:-1], ring.held(self.tokens), **call.kernel())
        i = self.slots.index[call.layer]
        k, v = self.slots.k[i, :-1], self.slots.v[i, :-1]  # [S, Hkv, capacity, D]
        position = None if call.window is None else self.slots.position[i, :-1]  # [S, Hkv, capacity]
        if self.native:
            out = self._native(call, k, v, self.slots_at, self.slots_at + 1, position)
        else:
            k[self.rows, :, self.slots_at] = call.k[:, :, 0]
            v[self.rows, :, self.slots_at] = call.v[:, :, 0]
            out = attend(call.q, k, v, self._visible(call, position), **call.kernel())
        if self.slots.state.shape[3]:
            with torch.autocast(call.q.device.type, enabled=False):  # scores are fp32
                self.slots.observe_decode(i, call, self._visible(call, position))
        if self.slots.queries.shape[3]:
            self.slots.keep_queries(i, call, self.rows, self.tokens)
        return out

    def _visible(self, call: AttentionCall, position: Tensor | None) -> Tensor:
        """Entries that each slot's query sees: bool, broadcastable to [S, Hkv, 1, capacity]."""
        if call.window is None or position is None:
            return self.alive
        return self.alive & (position > (self.tokens - call.window)[:, None, None])[:, :, None]

    def _native(
        self, call: AttentionCall, k: Tensor, v: Tensor, at: Tensor, count: Tensor, position: Tensor | None = None
    ) -> Tensor:
        oldest = None if position is None or call.window is None else self.tokens - call.window
        return decode_attention(
            call.q[:, :, 0], call.k[:, :, 0], call.v[:, :, 0], k, v, at, count, position=position, oldest=oldest,
            scaling=call.scaling, softcap=call.softcap, sinks=None if call.s_aux is None else call.s_aux.float(),
        )[:, :, None]  # fmt: skip


class PrefillContext:
    """A chunk of one sequence, alone, into one row of the storage; the chunk ends at or before a compaction.

    row: row of the storage. start: tokens of the sequence forwarded before. held: entries alive before.
    """

    def __init__(self, slots: KVSlots, row: int, start: int, held: int, length: int) -> None:
        self.slots, self.row, self.start, self.held, self.length = slots, row, start, held, length
        device = slots.k.device
        self.query_position = torch.arange(start, start + length, device=device)
        entry = torch.arange(held + length, device=device)
        self.causal = entry <= held + torch.arange(length, device=device)[:, None]  # [m, held + m]
        slots.position[:, row, :, held : held + length] = self.query_position

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the chunk over the survivors and causally over itself: q [1, Hq, m, D] -> the same."""
        call = call.to(self.slots.k.dtype)
        ring = self.slots.rings.get(call.layer)
        if ring is not None:
            return ring.prefill(call, self.row, self.start)
        i, end = self.slots.index[call.layer], self.held + self.length
        k, v = self.slots.k[i, self.row, :, :end], self.slots.v[i, self.row, :, :end]  # [Hkv, held + m, D]
        k[:, self.held :] = call.k[0]
        v[:, self.held :] = call.v[0]
        visible = self.causal[None, None]
        if call.window is not None:
            position = self.slots.position[i, self.row, :, None, :end]  # [Hkv, 1, held + m]
            visible = visible & (position > self.query_position[:, None] - call.window)[None]
        out = attend(call.q, k[None], v[None], visible, **call.kernel())
        with torch.autocast(call.q.device.type, enabled=False):
            self.slots.observe_prefill(i, call, self.row, self.query_position, visible)
        return out
