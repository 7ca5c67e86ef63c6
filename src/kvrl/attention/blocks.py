"""Replay of evictions without a schedule (beacons): blocks of queries over what is alive when a block begins.

Lifetimes are the same in all layers and heads, so one choice of keys serves every call: a block sees the entries
that were alive at its first query, and its own tokens; a mask of a block's size says which of them each query sees.
With windows of c tokens that is O(T * (|prompt| + T / c + block)) instead of O(T^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvrl.attention.gathered import attend_gathered
from kvrl.attention.seam import AttentionCall
from kvrl.cache.trace import NEVER, KVTrace
from kvrl.errors import KvrlError

SIZE = 64
"""Queries of a block: fewer gather the living entries more often, more of them see what others do not."""


@dataclass(frozen=True)
class Block:
    """Queries `start` to `stop` of a batch, and their keys."""

    start: int
    stop: int
    keys: Tensor  # int64 [B, n], places in order, T where a row has fewer
    visible: Tensor  # bool [B, 1, stop - start, n]


def make_blocks(traces: Sequence[KVTrace], length: int, device: torch.device | str) -> list[Block]:
    """The blocks of a right-padded batch. KvrlError for a trace whose layers or heads lost different entries."""
    rows = [one_lifetime(trace) for trace in traces]
    evicted_at = pad_sequence(rows, batch_first=True, padding_value=NEVER)  # [B, T]
    evicted_at = torch.cat([evicted_at, evicted_at.new_full((len(rows), length + 1 - evicted_at.shape[1]), NEVER)], 1)
    place = torch.arange(length)
    blocks = []
    for start in range(0, length, SIZE):
        stop = min(start + SIZE, length)
        alive = evicted_at[:, :start] > start  # [B, start]
        kept = pad_sequence([place[:start][a] for a in alive], batch_first=True, padding_value=length)
        keys = torch.cat([kept, place[start:stop].expand(len(rows), -1)], dim=1)  # [B, n]
        query = place[start:stop, None]
        visible = (keys[:, None] <= query) & (query < evicted_at.gather(1, keys)[:, None])  # [B, m, n]
        blocks.append(Block(start, stop, keys.to(device), visible[:, None].to(device)))
    return blocks


def one_lifetime(trace: KVTrace) -> Tensor:
    """`evicted_at` of every layer and head, int32 [tokens]."""
    if bool((trace.events != trace.events[:1, :1]).any()):
        raise KvrlError(
            "replay.backend: segments replays evictions without a schedule only if all layers and heads lose the same "
            "entries; use 'mask'"
        )
    table = torch.cat([trace.evicted_at_event, trace.evicted_at_event.new_tensor([NEVER])])
    return table[trace.events[0, 0].long()]


def attend_blocks(
    call: AttentionCall, blocks: Sequence[Block], positions: Tensor | None, *, native: bool = True
) -> Tensor:
    """Attention block by block: q [B, Hq, T, D] -> [B, Hq, T, D]; positions as in `attend_mask`."""
    heads, length = call.k.shape[1:3]
    out = []
    for block in blocks:
        keys = block.keys.clamp(max=length - 1)
        index = keys.int()[:, None, None].repeat(1, 1, heads, 1)  # [B, 1, H, n]
        visible = block.visible
        if call.window is not None:
            at = keys if positions is None else positions.gather(1, keys)  # [B, n]
            own = at[:, block.start - block.stop :]  # the block's tokens are its last keys
            visible = visible & (at[:, None] > own[:, :, None] - call.window)[:, None]
        q = call.q[:, :, block.start : block.stop]
        out.append(attend_gathered(q, call.k, call.v, index, visible[:, None], native=native, **call.kernel()))
    return torch.cat(out, dim=2)
