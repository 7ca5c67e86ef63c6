"""What a policy is: parameters, a score for every entry, and state where it needs some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from kvrl.attention.kernels import attention_logits
from kvrl.cache.config import Granularity


@dataclass(frozen=True)
class Entries:
    """The full slots of N (layer, sequence) pairs at a compaction: n = budget + buffer entries in position order.

    Everything is fp32 (contract 5). H counts KV heads, Hq query heads.
    """

    keys: Tensor  # [N, H, n, D]
    values: Tensor | None  # [N, H, n, D], for policies that read them
    queries: Tensor | None  # [N, Hq, w, D], the newest queries, oldest first
    state: Tensor | None  # [N, H, n], what observe() gathered
    position: Tensor  # int32 [N, H, n]
    candidate: Tensor  # bool [N, H, n], entries that may go
    stream: Tensor  # int64 [N], random stream of the (request, eviction, layer)
    scaling: float
    softcap: float | None
    in_prompt: bool  # the eviction happens between two chunks of a prompt
    native: bool = False  # on a CPU with compiled kernels


@dataclass(frozen=True)
class Observation:
    """What new queries see, for policies that gather state: m queries of N sequences in one layer."""

    q: Tensor  # [N, Hq, m, D]
    k: Tensor  # [N, H, n, D]
    visible: Tensor  # bool, broadcastable to [N, H, m, n]
    scaling: float
    softcap: float | None


class Policy(BaseModel):
    """Decides which entries go. A subclass sets the class variables and implements `score`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: ClassVar[str]
    paper: ClassVar[str]
    gathers_state: ClassVar[bool] = False
    """One fp32 number for each entry, filled by observe(), moved at compaction, reset with the slot."""
    reads_values: ClassVar[bool] = False
    """Whether score() reads the entries' values."""

    window: int = Field(8, ge=0, description="newest entries that always stay")
    sinks: int = Field(4, ge=0, description="first tokens that always stay")
    granularity: Granularity = Field("per_head", description="whose scores choose together")

    @classmethod
    def defaults(cls, budget: int) -> dict[str, int]:
        """Defaults that depend on the budget."""
        return {}

    @property
    def num_queries(self) -> int:
        """How many of the newest queries score() reads; the slots keep that many."""
        return 0

    def window_at(self, in_prompt: bool) -> int:
        """Newest entries that an eviction protects."""
        return self.window

    def scratch_floats(self, heads: int, group: int, n: int, head_dim: int, *, native: bool) -> int:
        """fp32 numbers that scoring one layer of one sequence may hold at once; native: by compiled kernels."""
        return heads * n * (4 * head_dim + 3 * group * self.num_queries + 8)

    def score(self, entries: Entries) -> Tensor:
        """Scores [N, H, n]; the lowest candidates go."""
        raise NotImplementedError

    def observe(self, state: Tensor, seen: Observation) -> None:
        """Update state [N, H, n] in place after new queries attended."""
        raise NotImplementedError


def attention_probs(q: Tensor, k: Tensor, visible: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """fp32 attention of every query head: q [N, Hq, m, D], k [N, H, n, D] -> [N, H, group, m, n]."""
    n_seq, hq, m, d = q.shape
    heads = k.shape[1]
    logits = attention_logits(
        q.float().reshape(n_seq, heads, hq // heads * m, d), k.float(), scaling=scaling, softcap=softcap
    ).view(n_seq, heads, hq // heads, m, -1)
    return logits.masked_fill(~visible.unsqueeze(2), float("-inf")).softmax(dim=-1)


def importance(e: Entries, num_queries: int, pooling: str, kernel: int) -> Tensor:
    """I of SnapKV and R-KV: pooled mean attention of the newest queries over the candidates, [N, H, n].

    The query group is reduced by its maximum before the softmax; entries that may not go count as padding.
    """
    assert e.queries is not None
    q = e.queries[:, :, -num_queries:]  # [N, Hq, w, D]
    n_seq, hq, w, d = q.shape
    heads = e.keys.shape[1]
    logits = attention_logits(q.reshape(n_seq, heads, -1, d), e.keys, scaling=e.scaling, softcap=e.softcap)
    logits = logits.view(n_seq, heads, hq // heads, w, -1).amax(dim=2)  # [N, H, w, n]
    attention = logits.masked_fill(~e.candidate[:, :, None], float("-inf")).softmax(dim=-1).mean(dim=-2)
    if pooling == "max":
        return F.max_pool1d(attention.masked_fill(~e.candidate, 0.0), kernel, stride=1, padding=kernel // 2)
    return F.avg_pool1d(attention.masked_fill(~e.candidate, 0.0), kernel, stride=1, padding=kernel // 2)


def masked_softmax(x: Tensor, keep: Tensor) -> Tensor:
    """Softmax over the last axis among the entries of `keep`; 0 elsewhere."""
    return torch.softmax(x.masked_fill(~keep, float("-inf")), dim=-1)
