"""One text under several caches: the mean negative log-prob of the uncompressed model's own completions.

Nothing is sampled, so decodings differ by what they see alone: beacons in place of closed windows, nothing in place of
them, or the newest entries (and the sinks) as StreamingLLM keeps them. A policy that scores entries has no trace
without sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from kvrl.attention.replay import Backend
from kvrl.beacons.plan import Beacons
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.cache.policies.streaming import Streaming
from kvrl.cache.trace import event_dtype, num_events
from kvrl.learner import Scorer, completion_mask
from kvrl.sampler.types import Rollout
from kvrl.train.micro_batch import fed_lengths, micro_batches

TOKENS = 4096
"""Padded tokens of one forward."""


def by_position(cache: CacheConfig) -> bool:
    """Whether a policy keeps sinks and the newest entries, whatever they hold."""
    return isinstance(make_policy(cache), Streaming)


def newest(r: Rollout, cache: CacheConfig) -> Rollout:
    """A full-cache rollout as such a policy would have left it: the oldest entries behind the sinks go first."""
    policy, length = make_policy(cache), r.num_tokens
    assert policy is not None and r.trace.windows is not None
    sinks = max(policy.sinks, len(r.prompt_ids) if cache.protect_prompt else 0)
    count, buffer = num_events(length - 1, cache.budget, cache.buffer), cache.buffer
    events = torch.full((length,), -1, dtype=event_dtype(count))
    events[sinks : sinks + count * buffer] = (torch.arange(count * buffer) // buffer).to(events.dtype)
    at = cache.capacity + buffer * torch.arange(count, dtype=torch.int32)
    trace = replace(r.trace, evicted_at_event=at, budget=cache.budget, buffer=buffer)
    layers, heads, _ = r.trace.events.shape
    table = torch.where(trace.managed[:, None, None], events, -1).expand(layers, heads, -1).contiguous()
    return replace(r, trace=replace(trace, events=table))


def windows_alone(r: Rollout, beacons: Beacons) -> Rollout:
    """A full-cache rollout whose windows close as they would with beacons, and leave none: prompt and open window stay.

    What the beacons carry is the difference to this.
    """
    prompt, raw = len(r.prompt_ids), len(r.completion_ids)
    ends = torch.tensor([beacons.end(window) for window in range(beacons.count(raw))], dtype=torch.int32)
    window = torch.bucketize(torch.arange(raw), ends, right=True)  # [raw]
    events = torch.full((r.num_tokens,), -1, dtype=event_dtype(len(ends)))
    closed = window < len(ends)
    events[prompt:][closed] = window[closed].to(events.dtype)
    layers, heads, _ = r.trace.events.shape
    table = events.expand(layers, heads, -1).contiguous()
    return replace(r, trace=replace(r.trace, events=table, evicted_at_event=prompt + ends))


@torch.no_grad()
def negative_logprob(
    model: nn.Module, rollouts: Sequence[Rollout], changed: Callable[[Rollout], Rollout], backend: Backend = "mask"
) -> float:
    """Nats a sampled token, mean over all, of rollouts each changed first."""
    given = [changed(r) for r in rollouts]
    scorer, total, tokens = Scorer(model, backend=backend), 0.0, 0
    for micro in micro_batches(fed_lengths(given), TOKENS):
        part = [given[i] for i in micro]
        mask = completion_mask(part)
        total -= float(scorer(part, view="sparse").logps.cpu()[mask].double().sum())
        tokens += int(mask.sum())
    return total / max(1, tokens)
