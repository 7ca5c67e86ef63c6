"""The sampler's side of the seam: append the new entries, attend to what is alive, let the policy observe."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrl.attention.kernels import attend
from kvrl.attention.seam import AttentionCall
from kvrl.cache.slots import KVSlots


class DecodeContext:
    """One token in every slot, at the fixed width of the engine (contract 4).

    tokens: tokens forwarded in each slot before this one, [S] int64 on the device (their logical positions).
    slots_at: the storage slot of each new entry, [S] int64.
    """

    def __init__(self, slots: KVSlots, tokens: Tensor, slots_at: Tensor) -> None:
        self.slots, self.tokens, self.slots_at = slots, tokens, slots_at
        self.rows = torch.arange(slots.num_slots, device=tokens.device)
        held = torch.arange(slots.capacity, device=tokens.device)
        self.alive = (held <= slots_at[:, None])[:, None, None, :]  # [S, 1, 1, capacity]
        slots.append_positions(self.rows, slots_at, tokens)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of one token a slot: q [S, Hq, 1, D] -> [S, Hq, 1, D]."""
        ring = self.slots.rings.get(call.layer)
        if ring is not None:
            ring.append(self.rows, self.tokens, call.k[:, :, 0], call.v[:, :, 0])
            return attend(call.q, ring.k[:-1], ring.v[:-1], ring.held(self.tokens), **call.kernel())
        i = self.slots.index[call.layer]
        k, v = self.slots.k[i], self.slots.v[i]  # [rows, Hkv, capacity, D]
        k[self.rows, :, self.slots_at] = call.k[:, :, 0]
        v[self.rows, :, self.slots_at] = call.v[:, :, 0]
        visible = self.alive
        if call.window is not None:
            position = self.slots.position[i, :-1]  # [S, Hkv, capacity]
            visible = visible & (position > (self.tokens - call.window)[:, None, None])[:, :, None]
        out = attend(call.q, k[:-1], v[:-1], visible, **call.kernel())
        self.slots.observe_decode(i, call, self.rows, self.tokens, visible)
        return out


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
        self.slots.observe_prefill(i, call, self.row, self.query_position, visible)
        return out
