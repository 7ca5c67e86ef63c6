"""Rollout: what the sampler hands to the learner, token ids in and token ids out."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvrl.beacons.plan import Beacons, Fed
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

    C is the completion's length. Token ids are raw: what the policy sampled. With `beacons` more was fed to the model
    (`fed`), and the trace covers all that was fed; without, it covers prompt and completion.
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
    routing: Tensor | None = None  # int16 [moe_layers, fed tokens - 1, top_k], the experts that the sampler chose
    stats: dict[str, float] = field(default_factory=dict)
    beacons: Beacons | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @functools.cached_property
    def fed(self) -> Fed:
        """What the sampler fed to the model: the raw tokens, and between them the beacons, if there were any."""
        if self.beacons is None:
            return Fed.raw(self.prompt_ids, self.completion_ids)
        return self.beacons.fed(self.prompt_ids, self.completion_ids)

    @functools.cached_property
    def keeps_to_beacons(self) -> bool:
        """Whether the trace is that of the beacons: decisions that nobody scored can be checked."""
        if self.beacons is None:
            return True
        events = self.trace.events
        layers, heads, _ = events.shape
        own = self.beacons.trace(layers, heads, len(self.prompt_ids), len(self.completion_ids))
        return torch.equal(events, own.events) and torch.equal(self.trace.evicted_at_event, own.evicted_at_event)
