"""Rollout: what the sampler hands to the learner, token ids in and token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvrl.cache.trace import KVTrace

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, eq=False)
class Support:
    """The kept ids of a truncated distribution at each completion token, ragged.

    ids:     int32 [sum of sizes], most likely first.
    offsets: int32 [C + 1]; the ids of completion token t are ids[offsets[t]:offsets[t + 1]]
             (none at inserted tokens).
    """

    ids: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled sequence with everything that the learner needs to be on-policy with it.

    C is the completion's length; the trace covers prompt and completion.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: Tensor  # f32 [C], the sampler's log-prob of each token; 0 where loss_mask is False
    loss_mask: Tensor  # bool [C], False for tokens that the policy did not sample
    trace: KVTrace
    finish_reason: FinishReason
    temperature: float = 1.0
    support: Support | None = None
    prompt_index: int = 0
    sample_index: int = 0
    routing: Tensor | None = None  # int16 [moe_layers, tokens - 1, top_k], the experts that the sampler chose
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)
