"""Compaction: score the full slots, keep `budget` entries of each in place, record what went (contract 1, 5, 6)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrl.cache.policies import Entries
from kvrl.cache.select import pool_scores, split_slots
from kvrl.cache.slots import KVSlots
from kvrl.cuda_graph import Captured
from kvrl.errors import KvrlError
from kvrl.native.compaction import keep
from kvrl.streams import fold

MAX_GROUP = 16  # more rows in one call amortise nothing and waste work when few rows are full


class Compactor:
    """Compacts rows of a KVSlots in groups of one fixed width, so that bits do not depend on who is full too.

    scratch_bytes bounds what scoring may hold at once: first rows, then layers are taken in turns. native: use the
    compiled CPU kernels.
    """

    def __init__(self, slots: KVSlots, *, protect_prompt: bool, scratch_bytes: int, native: bool = False) -> None:
        assert slots.policy is not None
        self.native = native
        self.slots, self.policy, self.protect_prompt = slots, slots.policy, protect_prompt
        spec, layers = slots.spec, max(1, len(slots.managed))
        group = spec.query_heads // spec.kv_heads
        self.layer_bytes = 4 * self.policy.scratch_floats(
            spec.kv_heads, group, slots.capacity, spec.head_dim, native=native
        )
        self.width = max(1, min(scratch_bytes // (layers * self.layer_bytes), slots.num_slots, MAX_GROUP))
        self.layers_at_once = max(1, min(layers, scratch_bytes // self.layer_bytes))
        device, endless = slots.k.device, torch.iinfo(torch.int32).max
        windows = [spec.windows[layer] for layer in slots.managed]
        self.reach = torch.tensor([endless if w is None else w for w in windows], device=device)  # [layers]
        self.invalid = torch.zeros((), dtype=torch.bool, device=device)
        self.graph: Captured[None] | None = None

    @property
    def scratch_bytes(self) -> int:
        """What scoring holds at once, at most."""
        return self.width * self.layers_at_once * self.layer_bytes

    def compact(
        self, rows: list[int], tokens: list[int], prompt_lengths: list[int], streams: list[int], *, in_prompt: bool
    ) -> None:
        """Compact full rows: tokens forwarded, prompt length and random stream of each row's request.

        Raises KvrlError if the policy's scores are not numbers.
        """
        for start in range(0, len(rows), self.width):
            part = slice(start, start + self.width)
            real = len(rows[part])
            pad = [start] * (self.width - real) if not in_prompt else []  # repeats a row: same values, written twice
            pick = [*range(start, start + real), *pad]
            given = torch.tensor(
                [[x[i] for i in pick] for x in (rows, tokens, prompt_lengths, streams)], device=self.slots.k.device
            )  # [4, g]
            if self.graph is not None and not in_prompt:
                self.graph(given)
            else:
                self._compact_group(given, in_prompt=in_prompt)
        if bool(self.invalid):
            self.invalid.zero_()
            raise KvrlError(
                f"cache.policy: {self.policy.name} gave scores that are not numbers at token {tokens[0]}; "
                "the model's keys or queries overflow: try model.dtype float32"
            )

    def capture(self) -> None:
        """From now on full slots are compacted by a CUDA graph. No slot may be in use yet."""
        step = partial(self._compact_group, in_prompt=False)
        self.graph = Captured(step, (4, self.width), self.slots.k.device, "compaction")
        self.invalid.zero_()

    def _compact_group(self, given: Tensor, *, in_prompt: bool) -> None:
        """given: rows, tokens, prompt lengths and streams, int64 [4, g]. Without a sync or a copy from the host."""
        rows, tokens, prompt_lengths, streams = given
        s, budget, n = self.slots, self.slots.budget, self.slots.capacity
        event = (tokens - n) // s.buffer  # [g]
        streams = fold(streams, event)
        position = s.position[:, rows]  # [layers, g, H, n]
        protected = position < self.policy.sinks
        protected |= torch.arange(n, device=rows.device) >= n - self.policy.window_at(in_prompt)
        if self.protect_prompt:
            protected |= position < prompt_lengths[:, None, None]
        step = self.layers_at_once
        score = torch.cat(
            [self._score(slice(i, i + step), rows, position, protected, streams, in_prompt)
             for i in range(0, len(s.managed), step)]
        )  # [layers, g, H, n]  # fmt: skip
        score = score.masked_fill(protected, 0.0)  # protected entries do not vote where scores are pooled
        self.invalid |= torch.isnan(score).any()
        score = pool_scores(score, self.policy.granularity)
        if self.policy.granularity != "shared":
            score = score.masked_fill(self._expired(position, tokens), float("-inf"))
        kept, gone = split_slots(score, protected, budget)  # [layers, g, H, budget] and [..., buffer]
        self._record(rows, position.gather(-1, gone), event)
        self._move(rows, position, kept)

    def _score(
        self, layers: slice, rows: Tensor, position: Tensor, protected: Tensor, streams: Tensor, in_prompt: bool
    ) -> Tensor:
        """Scores of some managed layers, [layers, g, H, n]."""
        s = self.slots
        k = s.k[layers][:, rows]  # [l, g, H, n, D]
        shape = k.shape[:2]  # [l, g]
        layer_ids = torch.arange(len(s.managed), device=rows.device)[layers]
        queries = None
        if w := s.queries.shape[3]:
            tokens = position[layers][:, :, 0, -1].long() + 1  # the newest entry is the newest token
            oldest_first = (tokens[..., None] + torch.arange(w, device=rows.device)) % w  # [l, g, w]
            index = oldest_first[:, :, None, :, None].expand(-1, -1, s.spec.query_heads, -1, s.spec.head_dim)
            queries = s.queries[layers][:, rows].gather(3, index).flatten(0, 1).float()
        entries = Entries(
            keys=k.flatten(0, 1).float(),
            values=s.v[layers][:, rows].flatten(0, 1).float() if self.policy.reads_values else None,
            queries=queries,
            state=s.state[layers][:, rows].flatten(0, 1) if s.state.shape[3] else None,
            position=position[layers].flatten(0, 1),
            candidate=~protected[layers].flatten(0, 1),
            stream=fold(streams[None, :], layer_ids[:, None]).flatten(),
            scaling=s.spec.scaling,
            softcap=s.spec.softcap,
            in_prompt=in_prompt,
            native=self.native,
        )
        with torch.autocast(k.device.type, enabled=False):  # scores are fp32
            return self.policy.score(entries).view(*shape, s.spec.kv_heads, -1)

    def _expired(self, position: Tensor, tokens: Tensor) -> Tensor:
        """Entries that the layer's own sliding window no longer shows to the next query: they go first."""
        return position <= tokens[None, :, None, None] - self.reach[:, None, None, None]

    def _record(self, rows: Tensor, position: Tensor, event: Tensor) -> None:
        """Write the eviction's index to the trace at the evicted positions [layers, g, H, buffer]."""
        layers, _, heads = position.shape[:3]
        layer = torch.arange(layers, device=rows.device)[:, None, None, None]
        head = torch.arange(heads, device=rows.device)[None, None, :, None]
        self.slots.events[layer, rows[None, :, None, None], head, position.long()] = event.to(self.slots.events.dtype)[
            None, :, None, None
        ]

    def _move(self, rows: Tensor, position: Tensor, kept: Tensor) -> None:
        """Move the kept entries [layers, g, H, budget] to the front, one layer after the other."""
        s, budget = self.slots, self.slots.budget
        s.position[:, rows, :, :budget] = position.gather(-1, kept)
        if s.state.shape[3]:
            s.state[:, rows] = F.pad(s.state[:, rows].gather(-1, kept), (0, s.buffer))
        if self.native:
            keep(s.k, rows, kept)
            keep(s.v, rows, kept)
            return
        for i in range(len(s.managed)):
            index = kept[i, ..., None].expand(-1, -1, -1, s.spec.head_dim)  # [g, H, budget, D]
            for t in (s.k[i], s.v[i]):
                t[rows, :, :budget] = t[rows].gather(2, index)
