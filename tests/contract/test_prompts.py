"""Contract 12: long prompts are prefilled in chunks; turns that were not sampled are inserted alike."""

from __future__ import annotations

import pytest
import torch

import kvrl
from helpers import (
    DENSE_MISMATCH,
    bar,
    cache,
    gap,
    make_prompts,
    model,
    oracle,
    replay,
    sample,
    sampling,
    stock,
)
from kvrl.errors import KvrlError
from kvrl.sampler.engine import Engine

CAPACITY = 32  # of helpers.cache: budget 24, buffer 8


def assert_parity(rollouts, name="llama", window=8):
    lm, twin = model(name, window), stock(name, window)
    sampled, limit = kvrl.sampler_logprobs(rollouts), bar(twin, rollouts)
    assert gap(sampled, oracle(twin, rollouts) * kvrl.completion_mask(rollouts)) <= limit
    for backend in ("mask", "segments"):
        assert gap(sampled, replay(lm, rollouts, backend=backend)) <= limit


@pytest.mark.parametrize("policy", ["rkv", "h2o"])
@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 40), ("gpt_oss", 8)])
def test_lengths_around_the_capacity(name, window, policy):
    lengths = (1, CAPACITY - 1, CAPACITY, CAPACITY + 1, CAPACITY + 8, CAPACITY + 9, 3 * CAPACITY)
    rollouts = sample(model(name, window), make_prompts(lengths), cache(policy), new=10)
    assert [r.trace.num_events for r in rollouts] == [0, 2, 2, 2, 3, 3, 10]
    assert_parity(rollouts, name, window)


@pytest.mark.parametrize("policy", ["rkv", "h2o", "tova", "random", "snapkv"])
def test_the_chunk_size_decides_nothing(policy):
    """Any cut of the prompt gives the same entries to the same decisions; only kernels round differently."""
    whole = engine(policy, 512).run(make_prompts([90]), seed=1)[0]
    for chunk in (1, 3, 8, 31):
        cut = engine(policy, chunk).run(make_prompts([90]), seed=1)[0]
        assert torch.equal(cut.trace.events, whole.trace.events)
        assert cut.completion_ids == whole.completion_ids
        assert gap(cut.logprobs, whole.logprobs) < 5e-5


def engine(policy="rkv", chunk=512, new=12, name="llama", window=8, **fields) -> Engine:
    config = cache(policy, **fields)
    return Engine(model(name, window), config, sampling(new), num_slots=2, max_prompt_length=100, prefill_chunk=chunk)


@pytest.mark.parametrize("policy", ["rkv", "h2o", "snapkv"])
@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 40), ("gpt_oss", 8)])
def test_inserted_turns(name, window, policy):
    """Two turns, the second longer than a slot; tokens, mask, log-probs and trace stay in step."""
    turns = {}

    def on_turn(request):
        turns[id(request)] = turns.get(id(request), 0) + 1
        return {1: [11, 12, 13], 2: list(range(20, 60))}.get(turns[id(request)])

    lm = model(name, window)
    eos = list(range(3, 60))  # more than half of all draws
    config = sampling(90, eos_token_ids=eos)
    rollouts = kvrl.rollout(
        lm, make_prompts([6, 18, 42]), cache=cache(policy), sampling=config, slots=2, on_turn=on_turn
    )
    for r in rollouts:
        inserted = [t for t, sampled in zip(r.completion_ids, r.loss_mask.tolist(), strict=True) if not sampled]
        assert inserted == [11, 12, 13, *range(20, 60)]
        assert r.finish_reason == "eos" and r.completion_ids[-1] in eos
        assert bool((r.logprobs[~r.loss_mask] == 0).all()) and bool((r.logprobs[r.loss_mask] < 0).all())
        first = r.loss_mask.tolist().index(False)
        assert r.completion_ids[first - 1] in eos and not any(t in eos for t in r.completion_ids[: first - 1])
        assert r.trace.num_tokens == r.num_tokens
    assert_parity(rollouts, name, window)
    dense = replay(lm, rollouts, view="dense")
    assert gap(dense, kvrl.sampler_logprobs(rollouts)) > DENSE_MISMATCH or name == "gpt_oss"


def test_a_turn_that_does_not_fit_ends_the_completion():
    config = sampling(10, eos_token_ids=list(range(97)))
    for length, expected in ((8, 1), (9, 1), (10, 1)):
        (r,) = kvrl.rollout(
            model(), make_prompts([6]), cache=cache(), sampling=config, on_turn=lambda q, n=length: [5] * n
        )
        if length == 8:  # room for the turn and one token after it
            assert r.loss_mask.tolist() == [True] + [False] * 8 + [True]
        else:
            assert len(r.completion_ids) == expected
        assert r.trace.num_tokens == r.num_tokens


def test_prompts_that_do_not_fit_are_named():
    with pytest.raises(KvrlError, match=r"prompts\[1\]: is empty"):
        sample(prompts=[[1], []])
    with pytest.raises(KvrlError, match=r"prompts\[1\].*budget.*24.*44 entries.*at least 44"):
        sample(prompts=make_prompts([5, 40]), config=cache(protect_prompt=True))
    with pytest.raises(KvrlError, match=r"prompts\[0\].*68 entries"):
        sample(prompts=make_prompts([40]), config=cache("snapkv", params={}))
