"""Contract 10: a policy that never fires = dense = the stock model."""

from __future__ import annotations

import pytest
import torch

import kvrl
from helpers import (
    LENGTHS,
    NEW,
    assert_same_bits,
    bar,
    cache,
    gap,
    make_prompts,
    model,
    oracle,
    replay,
    sample,
    stock,
)
from kvrl.cache.policies import POLICIES


def never_fires(policy: str) -> kvrl.CacheConfig:
    """The dense engine's own capacity: one entry for each token."""
    return cache(policy, budget=max(LENGTHS) + NEW - 1, buffer=1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_never_firing_equals_dense(policy):
    for a, b in zip(sample(config=never_fires(policy)), sample(config=cache("dense")), strict=True):
        assert_same_bits(a, b)
        assert a.trace.num_events == 0


@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 8), ("gemma2", 40), ("gpt_oss", 8), ("mistral", 8)])
def test_dense_equals_stock(name, window):
    lm, twin = model(name, window), stock(name, window)
    for a, b in zip(rollouts := sample(lm, config=cache("dense")), sample(lm, config=never_fires("rkv")), strict=True):
        assert_same_bits(a, b)
    sampled, limit = kvrl.sampler_logprobs(rollouts), bar(twin, rollouts)
    assert gap(sampled, oracle(twin, rollouts)) <= limit
    for backend in ("mask", "segments"):
        for view in ("sparse", "dense"):
            assert gap(sampled, replay(lm, rollouts, backend=backend, view=view)) <= limit


def test_greedy_equals_stock_generate():
    """transformers' own generation, token for token."""
    prompts = make_prompts([9, 30])
    rollouts = sample(prompts=prompts, config=cache("dense"), sampling_fields={"temperature": 0.0})
    for prompt, r in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt])
        out = stock().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
        )
        assert eos_free(r.completion_ids) == eos_free(out[0, len(prompt) :].tolist())


def eos_free(ids: list[int]) -> list[int]:
    """The tokens before the first EOS: generate() suppresses it to reach its minimum length."""
    return ids[: ids.index(2)] if 2 in ids else ids
