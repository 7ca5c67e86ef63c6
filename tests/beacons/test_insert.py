"""Beacons put into rollouts of the full cache: the two views of the same tokens, and what each learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import helpers
import kvrl
from beacon_models import BEACON, by_hand, make_prompts, model, oracle, sample
from helpers import gap, replay, stock
from kvrl.beacons.config import BeaconSet
from kvrl.beacons.insert import insert, insert_drawn
from kvrl.beacons.plan import Beacons
from kvrl.distill import Distillation
from kvrl.learner import Scorer
from kvrl.train.micro_batch import fed_lengths, micro_batches


def dense_rollouts(lm=None, new: int = 15):
    return kvrl.rollout(
        lm or model(), make_prompts([5, 12]), cache=helpers.cache("dense"), sampling=helpers.sampling(new)
    )  # fmt: skip


@pytest.mark.parametrize("name, positions", [("llama", "sequence"), ("gemma2", "shared")])
def test_the_two_views(name, positions):
    lm = model(name, positions=positions)
    plain = dense_rollouts(lm)
    given = [insert(r, Beacons(BEACON, (3,), positions)) for r in plain]
    for r, was in zip(given, plain, strict=True):
        assert torch.equal(r.trace.windows, was.trace.windows) and r.trace.num_events
        assert r.token_ids == was.token_ids and r.fed.ids.tolist() == by_hand(was, (3,), positions)[0]
    assert gap(replay(lm, given, view="dense"), kvrl.sampler_logprobs(plain)) < 1e-4
    assert gap(replay(lm, given, backend="mask"), oracle(stock(name), given, positions)) < 1e-4
    assert gap(replay(lm, given, backend="mask"), kvrl.sampler_logprobs(plain)) > helpers.DENSE_MISMATCH


def test_the_student_is_the_beacon_policy_and_the_teacher_learns_nothing(double):
    """The term's gradient is the beacon policy's alone: held up against finite differences of the student."""
    import copy

    lm = copy.deepcopy(model("llama", 8, torch.float64)).train()
    given = [insert(r, Beacons(BEACON, (3,))) for r in dense_rollouts(lm, new=9)]
    held = copy.deepcopy(lm)

    def term(with_grad: bool):
        import contextlib

        teacher = Distillation("dense", weights=lambda: contextlib.nullcontext(held))
        scored = Scorer(lm, backend="mask")(given, view="dense", distill=teacher)
        return scored.divergence.sum() if with_grad else float(scored.divergence.detach().sum())

    live = Scorer(lm, backend="mask")(given, view="dense", distill=Distillation("dense")).divergence.sum()
    weight = lm.model.layers[0].self_attn.v_proj.weight
    (gradient,) = torch.autograd.grad(live, weight)
    step = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        weight.add_(1e-6 * step)
        up = term(False)
        weight.sub_(2e-6 * step)
        down = term(False)
    assert (up - down) / 2e-6 == pytest.approx(float((gradient * step).sum()), rel=1e-5)


def test_windows_are_drawn_by_batch_and_place():
    plain = dense_rollouts(new=3) * 40
    known = BeaconSet(BEACON, (1, 2))
    first = [r.beacons.windows for r in insert_drawn(plain, known, 0, 1)]
    assert first == [r.beacons.windows for r in insert_drawn(plain, known, 0, 1)]
    assert 20 < first.count((1,)) < 60 and first != [r.beacons.windows for r in insert_drawn(plain, known, 0, 2)]


def test_micro_batches_count_what_is_fed():
    given = [insert(r, Beacons(BEACON, (1,))) for r in dense_rollouts(new=12)]
    assert [r.num_tokens for r in given] == [17, 24] and [len(r.fed.ids) for r in given] == [27, 34]
    assert micro_batches(fed_lengths(given), 67) == [[0], [1]]
    assert micro_batches(fed_lengths(given), 68) == [[0, 1]]


def test_a_text_that_holds_the_beacon_is_refused():
    (r, *_) = dense_rollouts()
    for held in (replace(r, prompt_ids=[BEACON, *r.prompt_ids[1:]]), replace(r, completion_ids=[BEACON] * 15)):
        with pytest.raises(kvrl.KvrlError, match=f"rollouts: holds the beacon's id {BEACON}, which only the engine"):
            insert(held, Beacons(BEACON, (3,)))


def test_compressed_rollouts_are_refused():
    for rollouts in (sample(every=2), helpers.sample(model(), make_prompts([30]))):
        with pytest.raises(kvrl.KvrlError, match="beacons go into rollouts of the full cache, and this one lost"):
            insert(rollouts[0], Beacons(BEACON, (3,)))
