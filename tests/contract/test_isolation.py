"""Contract 4 and 8: mates changed, bits unchanged; earlier requests and padding leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from helpers import NEW, assert_same_bits, cache, gap, make_prompts, model, replay, sample, sampling
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.models.tiny_families import BOS
from kvrl.sampler.engine import Engine

POLICIES = ["rkv", "h2o", "random", "snapkv"]  # scored by group, with state, with randomness, pooled queries


def run(lm, prompts, ids, *, slots, config=None, new=NEW, **fields):
    """Rollouts of prompts whose random streams are named, over a fixed number of slots."""
    engine = Engine(lm, config or cache(), sampling(new, **fields), num_slots=slots, max_prompt_length=64)
    return engine.run(prompts, seed=3, request_ids=ids)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_mates_order_and_slot_do_not_touch_a_request(slots, policy):
    mine, (alone,) = (
        make_prompts([37], seed=9),
        run(model(), make_prompts([37], seed=9), [77], slots=slots, config=cache(policy)),
    )
    mates = make_prompts([3, 50, 20, 33, 9, 41, 12, 28][: slots + 1], seed=5)
    for place in range(len(mates) + 1):  # every slot, and after a slot's reuse
        prompts = [*mates[:place], *mine, *mates[place:]]
        ids = [*range(place), 77, *range(place, len(mates))]
        assert_same_bits(run(lm := model(), prompts, ids, slots=slots, config=cache(policy))[place], alone)
    other = make_prompts([50, 20], seed=6)
    assert_same_bits(run(lm, [*mine, *other], [77, 5, 6], slots=slots, config=cache(policy))[0], alone)


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"min_p": 0.02}, {"top_p": 0.95, "temperature": 1.3}, {"top_k": 7}])
def test_mates_under_truncated_sampling(fields):
    """How many ids the mates keep must not reach a request's sums."""
    mine, ids = make_prompts([37], seed=9), [0, 1, 2, 77]
    (alone,) = run(model(), mine, [77], slots=4, **fields)
    for seed in range(5):
        together = run(model(), [*make_prompts([5, 11, 20], seed=seed), *mine], ids, slots=4, **fields)[3]
        assert_same_bits(together, alone)
        assert torch.equal(together.support.ids, alone.support.ids)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma2", "bfloat16"])
def test_mates_in_other_families(name):
    check_places(model("llama", 8, torch.bfloat16) if name == "bfloat16" else model(name), slots=5)


def test_two_threads():
    """Threads share out the rows of a product: at some widths a row's bits would depend on its place."""
    lm = build_tiny_model(build_tiny_tokenizer([str(i) for i in range(93)]), seed=0)
    mine, mates = make_prompts([37], seed=9), make_prompts([3, 4, 5, 6], seed=5)
    torch.set_num_threads(2)
    try:
        (alone,) = run(lm, mine, [77], slots=5, new=4)
        together = run(lm, [*mates, *mine], [0, 1, 2, 3, 77], slots=5, new=4)
    finally:
        torch.set_num_threads(1)
    assert_same_bits(together[4], alone)


def check_places(lm, slots: int) -> None:
    mine, mates = make_prompts([37], seed=9), make_prompts([3, 50, 20, 33, 7, 8], seed=5)
    (alone,) = run(lm, mine, [77], slots=slots)
    for place in (0, 2, 4, 6):
        prompts = [*mates[:place], *mine, *mates[place:]]
        together = run(lm, prompts, [*range(place), 77, *range(place, len(mates))], slots=slots)
        assert_same_bits(together[place], alone)


def test_mates_that_end_early_and_turns_of_mates():
    mine, mates = make_prompts([37], seed=9), make_prompts([3, 50, 20], seed=5)
    (alone,) = run(model(), mine, [77], slots=3, eos_token_ids=[])
    engine = Engine(model(), cache(), sampling(eos_token_ids=[*range(60, 97)]), num_slots=3, max_prompt_length=64)
    together = engine.run([*mates, *mine], seed=3, request_ids=[0, 1, 2, 77], on_turn=lambda r: [5, 6, 7])
    n = next((i for i, t in enumerate(alone.completion_ids) if t >= 60), NEW - 1)
    assert together[3].completion_ids[: n + 1] == alone.completion_ids[: n + 1]
    assert torch.equal(together[3].logprobs[: n + 1], alone.logprobs[: n + 1])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_shares_its_prefill(policy):
    group = sample(prompts=make_prompts([37, 6]), config=cache(policy), sampling_fields={"num_generations": 3}, slots=4)
    assert [(r.prompt_index, r.sample_index) for r in group] == [(p, g) for p in (0, 1) for g in range(3)]
    assert len({tuple(r.completion_ids) for r in group}) == 6
    for p in (0, 1):
        of_prompt = [r.trace.events[:, :, :32] for r in group if r.prompt_index == p]
        if p == 0:  # the first eviction happens in the shared prompt
            first = [(e == 0) for e in of_prompt]
            assert all(torch.equal(f, first[0]) for f in first)
    alone = sample(
        prompts=make_prompts([37, 6])[:1],
        config=cache(policy),
        sampling_fields={"num_generations": 1},
        slots=4,
    )
    assert_same_bits(alone[0], group[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reused_engine_remembers_nothing(policy):
    prompts = make_prompts([37, 6, 18])
    used = Engine(model(), cache(policy), sampling(), num_slots=2, max_prompt_length=64)
    used.run(make_prompts([60, 2, 33, 48, 50], seed=8), seed=1)
    for t in (used.slots.k, used.slots.v):
        t.fill_(1e4)  # worse than anything a request leaves
    for r, fresh in zip(
        used.run(prompts, seed=3),
        run(model(), prompts, [0, 1, 2], slots=2, config=cache(policy)),
        strict=True,
    ):
        assert_same_bits(r, fresh)


def test_across_slot_counts_only_near_ties_differ():
    prompts = make_prompts([37, 6, 18])
    for a, b in zip(run(model(), prompts, [0, 1, 2], slots=1), run(model(), prompts, [0, 1, 2], slots=7), strict=True):
        assert a.token_ids == b.token_ids
        assert gap(a.logprobs, b.logprobs) < 1e-4


@pytest.mark.parametrize("backend", ["mask", "segments"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padded_equals_unpadded(name, backend, double):
    lm = model(name, 8, torch.float64)
    rollouts = sample(lm, new=20)
    together = replay(lm, rollouts, backend=backend)
    for i, r in enumerate(rollouts):
        assert gap(replay(lm, [r], backend=backend)[0], together[i]) < 1e-10


@pytest.mark.parametrize("backend", ["mask", "segments"])
def test_what_stands_in_the_padding_does_not_matter(backend):
    """The padding's token ids are read, not seen: a longer mate changes no real position."""
    lm = model()
    short, long = sample(lm, prompts=make_prompts([9, 48]))
    with_long = replay(lm, [short, long], backend=backend)[0]
    with_other = replay(lm, [short, sample(lm, prompts=[[BOS] * 55])[0]], backend=backend)[0]
    assert gap(with_long, with_other) < 2e-5
