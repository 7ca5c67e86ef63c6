"""Where beacons stand in a completion, what they make of positions and lifetimes, and how large the cache is.

Raw tokens are those that the policy samples; the fed sequence is what goes through the model: the prompt, raw tokens,
and a beacon after every `every` raw tokens. A beacon sees its whole window, then the window's raw entries go. It is fed
when the raw token after its window was sampled (at the window's last raw token) and is about to be forwarded, so
that a completion which ends there needs none. Lifetimes are the same in all layers and heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvrl.cache.trace import KVTrace, event_dtype
from kvrl.errors import KvrlError

Positions = Literal["sequence", "shared"]
"""`sequence`: a beacon takes the next position. `shared`: it has its window's last one, and raw tokens count on."""


@dataclass(frozen=True)
class Beacons:
    """The beacons of one completion."""

    token_id: int
    every: int
    """Raw tokens of a window, c in the paper."""
    positions: Positions = "sequence"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise KvrlError(f"beacons.every: {self.every} is below 1; a beacon stands for one raw token at least")

    def count(self, raw: int) -> int:
        """Beacons fed for a completion of `raw` tokens, of which the last has no forward (contract 2)."""
        return max(0, raw - 2) // self.every

    def fed(self, prompt_ids: list[int], completion_ids: list[int]) -> Fed:
        """What goes through the model for a prompt and a completion."""
        prompt, raw = len(prompt_ids), len(completion_ids)
        index = torch.arange(raw)
        before = torch.clamp(index // self.every, max=self.count(raw))  # beacons in front of each raw token
        at = prompt + index + before  # [raw], place of each raw token
        beacon = prompt + (torch.arange(self.count(raw)) + 1) * (self.every + 1) - 1  # [beacons]
        ids = torch.full((prompt + raw + len(beacon),), self.token_id)
        ids[:prompt], ids[at] = torch.tensor(prompt_ids), torch.tensor(completion_ids)
        positions = torch.arange(len(ids))
        if self.positions == "shared":
            positions[at] -= before
            positions[beacon] = positions[beacon - 1]
        # The raw token before it predicts a raw token, though a beacon may stand between them.
        predictor = torch.cat([torch.tensor([prompt - 1]), at[:-1]])
        return Fed(ids, positions, predictor, at, beacon)

    def trace(self, layers: int, kv_heads: int, prompt: int, raw: int) -> KVTrace:
        """The lifetimes: a raw entry goes when its window's beacon was read, prompt and beacons stay."""
        count = self.count(raw)
        length = prompt + raw + count
        events = torch.full((length,), -1, dtype=event_dtype(count))
        place = torch.arange(length - prompt)
        window = place // (self.every + 1)
        closed = (window < count) & (place % (self.every + 1) < self.every)
        events[prompt:][closed] = window[closed].to(events.dtype)
        at = prompt + (torch.arange(count, dtype=torch.int32) + 1) * (self.every + 1)
        return KVTrace(events.expand(layers, kv_heads, -1).contiguous(), at)

    def held(self, prompt: int, forwarded: int) -> int:
        """KV entries after `forwarded` raw tokens: |prompt| + floor(n / c) + n mod c (section 3 of the paper).

        A window that has just closed still has its raw entries until its beacon, one entry more, was read.
        """
        return prompt + forwarded // self.every + forwarded % self.every

    def slots(self, prompt: int, max_completion_length: int) -> int:
        """Entries of storage that a request may need, the fed beacon's included."""
        return prompt + -(-max_completion_length // self.every) + self.every + 1


@dataclass(frozen=True)
class Fed:
    """A sequence as the model sees it, T tokens for R raw ones."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    predictor: Tensor  # int64 [R], the fed token whose hidden state predicts each raw token
    at: Tensor  # int64 [R], where each raw token stands
    beacons: Tensor  # int64 [beacons], where each beacon stands

    @classmethod
    def raw(cls, prompt_ids: list[int], completion_ids: list[int]) -> Fed:
        """A sequence without beacons: each token is predicted by the one before it."""
        prompt, ids = len(prompt_ids), torch.tensor(prompt_ids + completion_ids)
        index = torch.arange(len(ids))
        return cls(ids, index, index[prompt - 1 : -1], index[prompt:], index[:0])
