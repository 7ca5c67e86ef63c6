"""Contract 3: RoPE that depends on the longest position is exact up to its limit and refused beyond."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvrl
from helpers import bar, cache, gap, make_prompts, oracle, replay, sample
from kvrl.errors import KvrlError
from kvrl.models.tiny_families import build_family

LIMIT = 64
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": LIMIT,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONG, "max_position_embeddings": 256, "original_max_position_embeddings": LIMIT},
    ),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
}


def twins(kind: str):
    name, fields = CASES[kind]
    lm, twin = build_family(name, **fields), build_family(name, **fields).eval()
    twin.set_attn_implementation("eager")
    return lm, twin


@pytest.mark.parametrize("kind", sorted(CASES))
def test_exact_up_to_the_limit(kind):
    lm, twin = twins(kind)
    rollouts = sample(lm, make_prompts([4, 18, LIMIT - 20]), new=20)
    assert rollouts[2].num_tokens == LIMIT
    sampled, limit = kvrl.sampler_logprobs(rollouts), bar(twin, rollouts)
    assert gap(sampled, oracle(twin, rollouts)) <= limit
    assert gap(sampled, replay(lm, rollouts)) <= limit


@pytest.mark.parametrize("config", [cache("rkv"), cache("dense")], ids=["rkv", "dense"])
@pytest.mark.parametrize("kind", sorted(CASES))
def test_refused_beyond_the_limit(kind, config):
    lm, _ = twins(kind)
    with pytest.raises(KvrlError, match=rf"{LIMIT + 1} tokens are over {LIMIT}"):
        sample(lm, make_prompts([4, LIMIT - 19]), config, new=20)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_the_learner_refuses_too(kind):
    """A rollout that another engine sampled could be too long."""
    lm, _ = twins(kind)
    (r,) = sample(lm, make_prompts([LIMIT - 20]), cache("dense"), new=20)
    ids = [*r.prompt_ids, 5]
    longer = dataclasses.replace(r, prompt_ids=ids, trace=kvrl.KVTrace.dense(2, 2, LIMIT + 1))
    with pytest.raises(KvrlError, match=rf"{LIMIT + 1} tokens are over {LIMIT}"):
        replay(lm, [longer])


@pytest.mark.parametrize("kind", sorted(CASES))
def test_the_limit_is_real(kind):
    """One token over it, the stock model itself rotates every key anew: what kvrl guards against."""
    _, twin = twins(kind)
    (ids,) = make_prompts([LIMIT + 1])
    with torch.no_grad():
        short = twin(torch.tensor([ids[:LIMIT]])).logits[0]
        long = twin(torch.tensor([ids])).logits[0, :LIMIT]
    assert gap(short, long) > 0.1


def test_other_rope_types_have_no_limit():
    fields = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
    lm = build_family("llama", rope_parameters=fields)
    rollouts = sample(lm, make_prompts([40]), new=10)
    assert gap(kvrl.sampler_logprobs(rollouts), replay(lm, rollouts)) < 1e-4
