"""Contract 5 and 6: the recorded evictions are what the policy's scores say, recomputed from a replayed forward."""

from __future__ import annotations

import pytest
import torch

from helpers import cache, make_prompts, model, sample
from kvrl.attention.replay import attend_mask
from kvrl.cache.policies import Entries, make_policy
from kvrl.streams import fold, stream_key

NEAR_TIE = 1e-4  # the forwards round differently; scores closer than this may swap


def recorded_calls(lm, r):
    """The attention calls of a replay by lifetimes, one for each layer."""
    tokens, calls = r.num_tokens - 1, []
    lifetimes = r.trace.evicted_at()[..., :tokens]

    class Record:
        def attend(self, call):
            calls.append(call)
            return attend_mask(call, lifetimes[call.layer][None])

    with torch.no_grad():
        lm(
            input_ids=torch.tensor([r.token_ids[:-1]]),
            position_ids=torch.arange(tokens)[None],
            use_cache=False,
            kv=Record(),
        )
    return calls


def entries_at(call, position, at, prompt_length, policy, stream):
    """What the policy must have been given at an eviction: position [H, n] of the entries alive in one layer."""
    heads = torch.arange(len(position))[:, None]
    candidate = (position >= policy.sinks) & (position < at - policy.window_at(at <= prompt_length))
    w = max(policy.num_queries, 1)
    return Entries(
        keys=call.k[0][heads, position][None],
        values=call.v[0][heads, position][None],
        queries=call.q[:, :, at - w : at],
        state=None,
        position=position[None].to(torch.int32),
        candidate=candidate[None],
        stream=stream[None],
        scaling=call.scaling,
        softcap=call.softcap,
        in_prompt=at <= prompt_length,
    )


@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 40)])
@pytest.mark.parametrize("policy_name", ["rkv", "snapkv", "tova", "keydiff", "knorm", "streaming", "recent", "random"])
def test_evictions_follow_from_the_scores(policy_name, name, window):
    config = cache(policy_name, granularity="per_head")
    policy, lm = make_policy(config), model(name, window)
    checked = 0
    for i, r in enumerate(sample(lm, make_prompts([18, 50]), config)):
        streams = {True: stream_key(0, i), False: stream_key(0, i, 0)}  # a group shares its prompt's evictions
        calls = recorded_calls(lm, r)
        for event, at in enumerate(r.trace.evicted_at_event.tolist()):
            in_prompt = at <= len(r.prompt_ids)
            for layer, call in enumerate(calls):
                events = r.trace.events[layer, :, :at]
                position = ((events < 0) | (events >= event)).nonzero()[:, 1].view(len(events), -1)  # [H, n]
                stream = fold(fold(torch.tensor(streams[in_prompt]), event), layer)
                e = entries_at(call, position, at, len(r.prompt_ids), policy, stream)
                score = policy.score(e)[0]
                gone = events.gather(1, position) == event
                if call.window is not None:  # what the window hides goes first, whatever its score
                    score = score.masked_fill(position <= at - call.window, float("-inf"))
                kept = e.candidate[0] & ~gone
                assert bool((gone <= e.candidate[0]).all())
                worst_kept = score.masked_fill(~kept, float("inf")).amin(-1)
                best_gone = score.masked_fill(~gone, float("-inf")).amax(-1)
                tie = NEAR_TIE * score[score.isfinite()].abs().max()
                assert bool((best_gone <= worst_kept + tie).all()), (event, layer)
                checked += 1
    assert checked > 10
