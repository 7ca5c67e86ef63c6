"""How completions end, what a rollout carries, and what the engine reports."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import kvrl
from helpers import NEW, assert_same_bits, cache, make_prompts, model, sample, sampling
from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.models.tiny_families import build_family
from kvrl.sampler.engine import Engine, eos_ids


def test_every_eos_id_ends_a_completion():
    prompts = make_prompts([5] * 12)
    free = sample(prompts=prompts)
    ids = sorted({r.completion_ids[9] for r in free[:6]})
    assert len(ids) > 3
    ended = sample(prompts=prompts, sampling_fields={"eos_token_ids": ids})
    seen = set()
    for f, e in zip(free, ended, strict=True):
        first = next((i for i, t in enumerate(f.completion_ids) if t in ids), None)
        if first is None:
            assert e.completion_ids == f.completion_ids and e.finish_reason == "length"
        else:
            assert e.completion_ids == f.completion_ids[: first + 1] and e.finish_reason == "eos"
            seen.add(e.completion_ids[-1])
    assert len(seen) > 3


def test_eos_on_the_last_token_is_eos():
    free = sample(prompts=make_prompts([5]), new=6)[0]
    last = free.completion_ids[-1]
    assert free.finish_reason == "length" and free.completion_ids.index(last) == 5
    assert sample(prompts=make_prompts([5]), new=6, sampling_fields={"eos_token_ids": [last]})[0].finish_reason == "eos"


@pytest.mark.parametrize(
    "of_generation, of_config, expected",
    [([5, 7], 2, [5, 7]), (9, 2, [9]), (None, 2, [2]), (None, [3, 4], [3, 4]), (None, None, [])],
)
def test_where_eos_ids_come_from(of_generation, of_config, expected):
    lm = build_family("llama", eos_token_id=of_config)
    lm.generation_config.eos_token_id = of_generation
    assert eos_ids(lm) == expected


def test_stop_strings():
    tokenizer = build_tiny_tokenizer([chr(97 + i) for i in range(26)])
    lm = build_tiny_model(tokenizer, seed=3)
    prompts = [[1, 5, 9]] * 8
    given = {"cache": cache(), "seed": 2, "tokenizer": tokenizer}
    free = kvrl.rollout(lm, prompts, sampling=sampling(NEW), **given)
    texts = [tokenizer.decode(r.completion_ids) for r in free]
    stop = [texts[0][8:13], "never said"]  # three symbols in the middle of the first completion
    stopped = kvrl.rollout(lm, prompts, sampling=sampling(NEW, stop=stop), **given)
    for f, s, text in zip(free, stopped, texts, strict=True):
        ends = [n for n in range(1, NEW + 1) if stop[0] in tokenizer.decode(f.completion_ids[:n])]
        if ends:
            assert s.completion_ids == f.completion_ids[: ends[0]] and s.finish_reason == "stop"
        else:
            assert tokenizer.decode(s.completion_ids) == text and s.finish_reason == "length"
    assert stopped[0].finish_reason == "stop" and len(stopped[0].completion_ids) < NEW


def test_a_stop_string_in_the_prompt_does_not_count():
    tokenizer = build_tiny_tokenizer([chr(97 + i) for i in range(26)])
    lm = build_tiny_model(tokenizer, seed=3)
    (r,) = kvrl.rollout(
        lm,
        [tokenizer("a b c")["input_ids"]],
        cache=cache(),
        sampling=sampling(2, stop=["b c"]),
        tokenizer=tokenizer,
    )
    assert r.finish_reason == "length"


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(KvrlError, match=r"sampling\.stop: .*tokenizer="):
        sample(sampling_fields={"stop": ["x"]})


def test_what_a_rollout_carries():
    prompts = make_prompts([5, 18])
    for i, r in enumerate(sample(prompts=prompts, sampling_fields={"num_generations": 2})):
        assert r.prompt_ids == prompts[i // 2] and (r.prompt_index, r.sample_index) == divmod(i, 2)
        assert len(r.completion_ids) == len(r.logprobs) == len(r.loss_mask) == NEW
        assert r.logprobs.dtype == torch.float32 and bool(r.loss_mask.all()) and bool((r.logprobs < 0).all())
        assert r.trace.events.shape == (2, 2, len(prompts[i // 2]) + NEW)
        assert r.temperature == 1.0 and r.routing is None
        assert r.stats["tokens_per_second"] > 0 and r.stats["dense_kv_bytes"] > r.stats["kv_bytes"] * 0.5
    assert sample(prompts=[]) == []


def test_weights_and_gradients_are_untouched():
    lm = build_family("llama")
    before = {name: p.clone() for name, p in lm.named_parameters()}
    sample(lm, new=4)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in lm.named_parameters())


def test_logits_that_are_not_finite_stop_the_run():
    lm = build_family("llama")
    with torch.no_grad():
        lm.lm_head.weight[5, 0] = float("nan")
    with pytest.raises(KvrlError, match="not finite"):
        sample(lm, new=2)


def test_scoring_in_small_pieces_gives_the_same_evictions():
    """scratch_bytes cuts the scoring by rows and layers; the decisions stay."""
    from kvrl.sampler.engine import Engine

    prompts = make_prompts([37, 5, 18])
    results = []
    for scratch in (1, 100_000, 64 << 20):
        engine = Engine(
            model("qwen2", 40), cache(), sampling(), num_slots=3, max_prompt_length=64, scratch_bytes=scratch
        )
        results.append(engine.run(prompts, seed=0))
        if scratch > 1:
            assert engine.compactor.scratch_bytes <= scratch
    for small, large in zip(results[0], results[2], strict=True):
        assert torch.equal(small.trace.events, large.trace.events) and small.token_ids == large.token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"top_k": -1},
        {"num_generations": 0},
        {"max_completion_length": 0},
        {"nonsense": 1},
    ],
)
def test_sampling_sections(fields):
    with pytest.raises(ValueError):
        kvrl.SamplingConfig(**fields)


def test_another_attention_set_in_between_is_seen():
    lm = build_family("llama")
    engine = Engine(lm, cache(), sampling(), num_slots=2, max_prompt_length=64)
    before = engine.run(make_prompts([20, 30]), seed=0)
    lm.set_attn_implementation("sdpa")
    for a, b in zip(before, engine.run(make_prompts([20, 30]), seed=0), strict=True):
        assert_same_bits(a, b)


def test_an_engine_does_not_run_inside_its_own_run():
    engine = Engine(model(), cache(), sampling(eos_token_ids=[*range(97)]), num_slots=2, max_prompt_length=64)
    with pytest.raises(KvrlError, match="engine: is running"):
        engine.run(make_prompts([20]), on_turn=lambda request: engine.run(make_prompts([5])))
    engine.run(make_prompts([20]))  # and is free again


def test_modules_keep_their_own_mode():
    lm = build_family("llama").train()
    lm.model.layers[1].eval()
    sample(lm, prompts=make_prompts([5]), new=3)
    assert lm.training and not lm.model.layers[1].mlp.training and lm.model.layers[0].mlp.training


def test_the_slots_are_freed_with_the_engine_and_not_by_the_garbage_collector():
    gc.disable()
    try:
        engine = Engine(model(), cache(), sampling(20), num_slots=2, max_prompt_length=8)
        engine.run(make_prompts([4, 8]))
        slots = weakref.ref(engine.slots)
        del engine
        assert slots() is None
    finally:
        gc.enable()
