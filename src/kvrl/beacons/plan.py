"""Where beacons stand in a completion, what they make of positions and lifetimes, and how large the cache is.

Raw tokens are those that the policy samples; the fed sequence is what goes through the model: the prompt, raw tokens,
and a beacon after every window of raw tokens. A beacon sees its whole window, then the window's raw entries go. It is
fed when the raw token after its window was sampled (at the window's last raw token) and is about to be forwarded, so
that a completion which ends there needs none. Lifetimes are the same in all layers and heads.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
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
    windows: tuple[int, ...]
    """Raw tokens of the first window, the second and so on (c in the paper); all further ones are as the last."""
    positions: Positions = "sequence"

    def __post_init__(self) -> None:
        if not self.windows or min(self.windows) < 1:
            raise KvrlError(
                f"beacons.windows: {self.windows} has a window below 1, or none; a beacon stands for one raw token at "
                "least"
            )

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Where the listed windows end."""
        return tuple(accumulate(self.windows))

    def size(self, window: int) -> int:
        """Raw tokens of a window, counted from 0."""
        return self.windows[min(window, len(self.windows) - 1)]

    def end(self, window: int) -> int:
        """Raw tokens up to the end of a window, counted from 0."""
        beyond = max(0, window + 1 - len(self.windows))
        return self._ends[min(window, len(self.windows) - 1)] + beyond * self.windows[-1]

    def closed(self, raw: int) -> int:
        """Windows that end within so many raw tokens."""
        beyond = max(0, raw - self._ends[-1]) // self.windows[-1]
        return bisect_right(self._ends, raw) + beyond

    def count(self, raw: int) -> int:
        """Beacons fed for a completion of `raw` tokens, of which the last has no forward (contract 2)."""
        return self.closed(max(0, raw - 2))

    def _places(self, raw: int) -> tuple[Tensor, Tensor, Tensor]:
        """Places after the prompt of raw tokens [raw] and of beacons [beacons], beacons before each raw token [raw]."""
        ends = torch.tensor([self.end(window) for window in range(self.count(raw))], dtype=torch.int64)  # [beacons]
        index = torch.arange(raw)
        before = torch.bucketize(index, ends, right=True)  # [raw]
        return index + before, ends + torch.arange(len(ends)), before

    def fed(self, prompt_ids: list[int], completion_ids: list[int]) -> Fed:
        """What goes through the model for a prompt and a completion."""
        prompt, raw = len(prompt_ids), len(completion_ids)
        at, beacon, before = self._places(raw)
        at, beacon = prompt + at, prompt + beacon
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
        at, beacon, window = self._places(raw)
        count = len(beacon)
        events = torch.full((prompt + raw + count,), -1, dtype=event_dtype(count))
        closed = window < count
        events[prompt + at[closed]] = window[closed].to(events.dtype)
        gone = (prompt + beacon + 1).to(torch.int32)  # the first query that does not see a window
        return KVTrace(events.expand(layers, kv_heads, -1).contiguous(), gone)

    def held(self, prompt: int, forwarded: int) -> int:
        """KV entries after n `forwarded` raw tokens: of the prompt, a beacon for each window closed, the open window.

        With windows of c tokens |prompt| + floor(n / c) + n mod c (section 3 of the paper). A window that has just
        closed still has its raw entries until its beacon, one entry more, was read.
        """
        closed = self.closed(forwarded)
        return prompt + closed + forwarded - (self.end(closed - 1) if closed else 0)


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
