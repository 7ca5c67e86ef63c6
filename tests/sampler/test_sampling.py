"""Drawing tokens: truncation by hand and against transformers, inverse CDF, one uniform number per token."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import kvrl
from helpers import bar, cache, gap, make_prompts, model, oracle, replay, sample, sampling, stock
from kvrl.errors import KvrlError
from kvrl.sampler.sampling import draw, inverse_cdf, kept_sizes
from kvrl.streams import fold, stream_key, uniform

PROBS = [0.05, 0.4, 0.1, 0.25, 0.2]  # most likely first: 1, 3, 4, 2, 0
BY_HAND = [
    ({"top_k": 2}, [1, 3]),
    ({"top_p": 0.8}, [1, 3, 4]),
    ({"top_p": 0.64}, [1, 3]),
    ({"top_p": 0.66}, [1, 3, 4]),
    ({"top_p": 0.01}, [1]),
    ({"min_p": 0.26}, [1, 3, 4]),
    ({"min_p": 0.24}, [1, 3, 4, 2]),
    ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # 0.4 and 0.25 of 0.85 reach 0.7
    ({"top_k": 4, "min_p": 0.6}, [1, 3]),
    ({"top_k": 99}, [1, 3, 4, 2, 0]),
]


def kept(fields, logits):
    config = sampling(**fields)
    return draw(logits, torch.full((len(logits),), 0.5), config)


@pytest.mark.parametrize("fields, expected", BY_HAND, ids=lambda x: str(x))
def test_truncation_by_hand(fields, expected):
    drawn = kept(fields, torch.tensor([PROBS]).log())
    size = int(drawn.support_sizes[0])
    assert drawn.support_ids[0, :size].tolist() == expected and drawn.support_ids.dtype == torch.int32
    total, reached = sum(PROBS[i] for i in expected), 0.0
    for i in expected:  # inverse CDF at u = 0.5 by hand, in the order of the support
        reached += PROBS[i]
        if reached > 0.5 * total:
            break
    assert int(drawn.tokens[0]) == i
    assert float(drawn.logprobs[0]) == pytest.approx(math.log(PROBS[i] / total), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "fields", [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}]
)
def test_truncation_equals_transformers(fields, temperature):
    logits = 2 * torch.randn(50, 97, generator=torch.Generator().manual_seed(0))
    drawn = kept({**fields, "temperature": temperature}, logits)
    warped = logits / temperature
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in fields:
            warped = warper(fields[name])(None, warped)
    for row in range(len(logits)):
        ours = drawn.support_ids[row, : int(drawn.support_sizes[row])].tolist()
        assert sorted(ours) == warped[row].isfinite().nonzero()[:, 0].tolist()
    assert gap(drawn.logprobs, warped.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]) < 1e-5


def test_frequencies_of_the_inverse_cdf():
    u = uniform(fold(torch.tensor(stream_key(1, 2)), torch.arange(200_000)))
    tokens, total = inverse_cdf(torch.tensor([PROBS]).expand(len(u), -1), u)
    assert gap(total, torch.ones(())) < 1e-6
    share = torch.bincount(tokens, minlength=5) / len(u)
    assert gap(share, torch.tensor(PROBS)) < 4 * math.sqrt(0.25 / len(u))


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.999999, "top_k": 3}])
def test_logprobs_of_a_peaked_distribution_over_a_large_vocabulary(fields):
    # torch's log_softmax is 1.5e-5 off here: more than the whole parity error of a real model.
    logits = 3 * torch.randn(64, 49_152, generator=torch.Generator().manual_seed(0))
    logits[:, 5] += 25
    drawn = kept(fields, logits)
    exact = logits.double() / (fields.get("temperature") or 1.0)
    if drawn.support_ids is not None:
        ids = drawn.support_ids.long()
        outside = torch.arange(ids.shape[1]) >= drawn.support_sizes[:, None]
        exact = torch.full_like(exact, -math.inf).scatter(1, ids, exact.gather(1, ids).masked_fill(outside, -math.inf))
    assert gap(drawn.logprobs.double(), exact.log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]) < 3e-6


def test_edges_of_the_inverse_cdf():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).expand(4, -1)
    u = torch.tensor([0.0, 0.49, 0.5, 1 - 2.0**-23])
    assert inverse_cdf(probs, u)[0].tolist() == [1, 1, 3, 3]  # an impossible token is never drawn
    many = torch.rand(1, 50_000) * 1e-4  # the total need not be 1, and the last number is still below it
    assert int(inverse_cdf(many, torch.tensor([1 - 2.0**-23]))[0]) < 50_000


def test_the_inverse_cdf_over_many_blocks():
    """Against a search in float64, at every id's middle and with numbers that no rounding can move."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 5, (3, 1000), generator=generator).float()  # sums are exact
    weights[1, :300], weights[2, 640:] = 0.0, 0.0  # blocks without weight, in front and at the end
    for row in weights:
        total = row.sum().item()
        u = (torch.arange(int(total)) + 0.5) / total
        expected = torch.repeat_interleave(torch.arange(1000), row.long())
        assert inverse_cdf(row.expand(len(u), -1), u)[0].tolist() == expected.tolist()


def test_every_id_of_a_long_tail_can_be_drawn():
    """One id has nearly all the mass. Sums in fp32, or numbers of 23 bits, would never draw one of the others."""
    weights = torch.full((1, 150_016), 2.0**-30)
    weights[0, :128] = 0.0
    weights[0, 7] = 1.0  # alone in its block, so that every sum is exact
    exact = weights[0].double().cumsum(0)
    rare = torch.arange(128, 150_016, 77)
    u = (exact[rare] - 2.0**-31) / exact[-1]
    assert torch.equal(inverse_cdf(weights.expand(len(u), -1), u)[0], rare)


def test_rounding_never_draws_an_id_without_weight():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(400, 1111, generator=generator) ** 8
    weights[torch.rand(400, 1111, generator=generator) < 0.9] = 0.0
    for u in (0.0, 1e-7, 0.5, 1 - 2.0**-23, *torch.rand(20, generator=generator).tolist()):
        drawn = inverse_cdf(weights, torch.full((400,), u))[0]
        assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_greedy_takes_the_best_at_temperature_one():
    logits = torch.tensor([PROBS]).log()
    for fields in ({}, {"top_k": 3}):
        drawn = kept({"temperature": 0.0, **fields}, logits)
        assert int(drawn.tokens) == 1 and float(drawn.logprobs) == pytest.approx(math.log(0.4), abs=1e-6)


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_greedy_rollouts_with_truncation_set(fields):
    (r,) = sample(prompts=make_prompts([5]), new=4, sampling_fields={"temperature": 0.0, **fields})
    assert gap(replay(model(), [r]), r.logprobs[None]) < 1e-4


def test_support_over_the_limit_is_an_error():
    with pytest.raises(KvrlError, match=r"sampling\.max_support: .*keeps at least 12 ids, over 8"):
        sample(prompts=make_prompts([5]), new=2, sampling_fields={"top_k": 12, "max_support": 8})


def test_equal_logits_are_ordered_by_id():
    logits = torch.zeros(1, 300)
    logits[0, [7, 200, 290]] = 1.0
    assert draw(logits, torch.tensor([0.0]), sampling(top_k=3)).support_ids[0].tolist() == [7, 200, 290]


def test_top_p_counts_the_mass_of_all_ids():
    """Not of the candidates alone, which are no more than max_support + 1."""
    logits = torch.tensor([[0.3, 0.2, 0.2, 0.1, 0.1, 0.1]]).log()
    drawn = draw(logits, torch.tensor([0.5]), sampling(top_p=0.65, max_support=3))
    assert drawn.support_sizes.tolist() == [3] and drawn.support_ids.tolist() == [[0, 1, 2]]


def test_kept_sizes_is_at_least_one():
    logps = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    assert kept_sizes(logps, sampling(top_p=0.5)).tolist() == [1]


CUTS = [
    {},
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.05, "top_k": 40},
]


@pytest.mark.parametrize("fields", CUTS, ids=str)
def test_the_learner_renormalises_on_the_recorded_support(fields):
    lm = model()
    rollouts = sample(lm, sampling_fields=fields)
    sampled = kvrl.sampler_logprobs(rollouts)
    limit = bar(stock(), rollouts) / min(1.0, fields.get("temperature", 1.0))
    for backend in ("mask", "segments"):
        assert gap(replay(lm, rollouts, backend=backend), sampled) <= limit
    if set(fields) <= {"temperature"}:
        assert gap(oracle(stock(), rollouts), sampled) <= limit
        assert rollouts[0].support is None
        return
    for r in rollouts:
        offsets = r.support.offsets.tolist()
        assert r.support.ids.dtype == torch.int32 and len(offsets) == len(r.completion_ids) + 1
        for t, token in enumerate(r.completion_ids):
            assert token in r.support.ids[offsets[t] : offsets[t + 1]].tolist()
    full = oracle(stock(), [dataclasses.replace(r, support=None) for r in rollouts])
    assert gap(full, sampled) > 1e-2  # without the renormalisation it would show


def test_support_with_inserted_turns():
    rollouts = kvrl.rollout(
        model(), make_prompts([6, 18]), cache=cache(),
        sampling=sampling(40, eos_token_ids=list(range(3, 60)), top_k=9),
        on_turn=lambda r: [7, 8, 9] if len(r.completion_ids) < 12 else None,
    )  # fmt: skip
    assert all(not r.loss_mask.all() for r in rollouts)
    for r in rollouts:
        sizes = r.support.offsets.diff()
        assert bool((sizes[~r.loss_mask] == 0).all()) and bool((sizes[r.loss_mask] == 9).all())
    assert gap(replay(model(), rollouts), kvrl.sampler_logprobs(rollouts)) < 1e-4


def test_cut_and_whole_distributions_are_not_mixed():
    rollouts = [*sample(new=3), *sample(new=3, sampling_fields={"top_k": 4})]
    with pytest.raises(KvrlError, match="score them apart"):
        replay(model(), rollouts)
