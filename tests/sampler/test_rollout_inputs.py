"""What users hand to the two public calls by mistake, and mixtures that must not be silently wrong."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import kvrl
from helpers import NEW, assert_same_bits, cache, make_prompts, model, replay, sample, sampling
from kvrl.errors import KvrlError

DENSE = kvrl.CacheConfig(policy="dense")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", "prompts: 'h' is not a list of token ids"),
        (["hello"], "prompts: 'hello' is not a list of token ids"),
        ([1, 2, 3], "prompts: '1' is not a list of token ids"),
        ([[1, 2.5]], r"prompts\[0\]: .* is not a list of token ids"),
        ([[1], [1, 97]], r"prompts\[1\]: id 97 is not in the vocabulary of 97"),
        ([[1, -1]], r"prompts\[0\]: id -1 is not in the vocabulary"),
        ([[1], []], r"prompts\[1\]: is empty"),
    ],
)
def test_prompts_that_are_no_token_ids(prompts, message):
    with pytest.raises(KvrlError, match=message):
        kvrl.rollout(model(), prompts, cache=cache(), sampling=sampling(2))


def test_tensors_become_plain_integers():
    (r,) = kvrl.rollout(model(), [torch.tensor([1, 5, 9])], cache=cache(), sampling=sampling(2))
    assert r.prompt_ids == [1, 5, 9] and all(type(i) is int for i in r.token_ids)


def test_other_arguments_by_name():
    given = {"cache": cache(), "sampling": sampling(2)}
    for changed, message in (
        ({"slots": 0}, "slots: 0 is below 1"),
        ({"cache": {"budget": 8}}, "cache: is a dict; give a kvrl.CacheConfig"),
        ({"request_ids": [1, 2]}, "request_ids: 2 for 1 prompts"),
    ):
        with pytest.raises(KvrlError, match=message):
            kvrl.rollout(model(), [[1, 2]], **{**given, **changed})
    for fields in ({"temperature": float("inf")}, {"temperature": 1e-40}, {"stop": [""]}):
        with pytest.raises(ValueError, match=r"temperature|stop"):
            sampling(2, **fields)


def test_a_misspelt_view_or_backend_is_no_other_view():
    rollouts = sample(prompts=make_prompts([4]), new=2)
    for fields in ({"view": "Sparse"}, {"backend": "foo"}, {"chunk": 0}):
        with pytest.raises(KvrlError, match=r"view: 'Sparse'|replay.backend: 'foo'|logprob_chunk: 0"):
            replay(model(), rollouts, **fields)
    with pytest.raises(KvrlError, match="rollouts: is empty"):
        replay(model(), [])


def test_nothing_sampled_scores_nothing():
    (r,) = sample(prompts=make_prompts([4]), new=3)
    inserted = dataclasses.replace(r, loss_mask=torch.zeros(3, dtype=torch.bool))
    out = kvrl.logprobs(model(), [inserted])
    assert torch.equal(out, torch.zeros(1, 3)) and out.requires_grad


def test_segments_refuses_to_mix_a_full_cache_with_a_compressed_one():
    (full,) = sample(prompts=make_prompts([18]), config=DENSE)
    (cut,) = sample(prompts=make_prompts([18]))
    with pytest.raises(KvrlError, match=r"segments replays 24 \+ 8 entries in this batch, but row 0 kept all"):
        replay(model(), [full, cut], backend="segments")
    recorded = kvrl.sampler_logprobs([full, cut])
    assert (replay(model(), [full, cut], backend="mask") - recorded).abs().max() < 1e-4
    (short,) = sample(prompts=make_prompts([4]), config=DENSE, new=8)  # fits into a slot: nothing to tell apart
    both = [short, cut]
    assert (replay(model(), both, backend="segments") - kvrl.sampler_logprobs(both)).abs().max() < 1e-4


def test_full_cache_bits_do_not_depend_on_a_mate_s_length_when_the_prompt_length_is_fixed():
    mine, long = make_prompts([10]), make_prompts([40], seed=3)
    fields = {"config": DENSE, "slots": 4, "max_prompt_length": 40, "new": 12}
    (alone,) = sample(prompts=mine, **fields)
    together = sample(prompts=[*mine, *long], **fields)
    assert_same_bits(together[0], alone)


def test_idle_slots_cannot_stop_a_run():
    lm = copy.deepcopy(model())
    with torch.no_grad():
        lm.model.embed_tokens.weight[0] = 0.0  # what an idle slot is fed: its distribution is nearly uniform
    truncated = {"top_p": 0.7, "max_support": 40}
    prompts = make_prompts([10])
    few = sample(lm, prompts, DENSE, new=12, slots=1, sampling_fields=truncated)
    many = sample(lm, prompts, DENSE, new=12, slots=4, sampling_fields=truncated)
    assert few[0].token_ids == many[0].token_ids


def test_many_turns_do_not_recurse():
    every = list(range(97))  # any token ends the completion, and each end takes a turn
    fields = {"eos_token_ids": every, "max_completion_length": 1300}
    (r,) = kvrl.rollout(
        model(), [[1, 2]], cache=cache(), sampling=kvrl.SamplingConfig(**fields), slots=1, on_turn=lambda request: [5]
    )
    assert len(r.completion_ids) == 1299 and r.finish_reason == "length"
    assert r.loss_mask.sum() == 650
    for bad, message in (("hi", "on_turn: 'hi' is not a list"), ([97], "on_turn: id 97 is not in the vocabulary")):
        with pytest.raises(KvrlError, match=message):
            kvrl.rollout(
                model(),
                [[1, 2]],
                cache=cache(),
                sampling=sampling(NEW, eos_token_ids=every),
                on_turn=lambda _, b=bad: b,
            )
