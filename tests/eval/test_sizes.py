"""Entries that completions hold, budgets that hold as many, and the area under a curve."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import beacon_models
import helpers
import kvrl
from kvrl.beacons.plan import Beacons
from kvrl.cache.trace import NEVER, occupancy
from kvrl.eval.same_text import by_position, negative_logprob, newest, windows_alone
from kvrl.eval.sizes import auac, entries, matching, mean_held, mean_held_until, within

DENSE = kvrl.CacheConfig(policy="dense")


@pytest.mark.parametrize("every", [None, 2, 5])
def test_entries_are_what_the_engine_counted(every):
    """Each decode step's entries, summed over a batch of prompts of several lengths."""
    if every is None:
        rollouts = helpers.sample(beacon_models.model(), beacon_models.make_prompts(), DENSE)
    else:
        rollouts = beacon_models.sample(every=every)
    steps = [entries(r) for r in rollouts]
    total = sum(len(s) for s in steps)
    assert sum(int(s.sum()) for s in steps) / total == pytest.approx(rollouts[0].stats["held_entries"])
    assert max(int(s.max()) for s in steps) == rollouts[0].stats["held_entries_max"]


def test_entries_of_windows_by_hand():
    """Prompt of 4, windows of 2: steps hold 5, 6, then the beacon 7, which leaves 5; 6, 7, beacon 8, ..."""
    (r,) = beacon_models.sample(prompts=beacon_models.make_prompts([4]), every=2, new=7)
    assert entries(r).tolist() == [5, 6, 7, 6, 7, 8, 7, 8]
    assert [within(r, limit) for limit in (3, 4, 5, 6, 7, 8)] == [0, 1, 2, 3, 5, 7]


def test_a_full_cache_is_cut_where_it_holds_the_limit():
    (r,) = helpers.sample(beacon_models.model(), beacon_models.make_prompts([4]), DENSE, new=6)
    assert entries(r).tolist() == [5, 6, 7, 8, 9]
    assert [within(r, limit) for limit in (3, 4, 5, 8, 9, 20)] == [0, 1, 2, 5, 6, 6]
    assert [mean_held_until([r], limit) for limit in (4, 6, 99)] == [0, 5.5, 7]


def test_mean_held_under_a_budget():
    """4 prompt tokens and 6 more, of which 5 are forwarded, with 5 + 2 entries: 5 6 7, cut to 5, 6 7."""
    assert mean_held([4], [6], 5, 2) == pytest.approx((5 + 6 + 7 + 6 + 7) / 5)
    assert mean_held([4], [6], 99, 1) == 7
    assert [occupancy(n, 5, 2) for n in (6, 7, 8)] == [6, 5, 6]


def test_the_budget_that_is_nearest():
    held = {1: 1.0, 2: 2.0, 3: 4.0, 4: 4.5}.__getitem__
    assert [matching(size, held, 4) for size in (0.5, 1.4, 1.5, 2.9, 3.0, 4.4, 9.0)] == [1, 1, 2, 2, 3, 4, 4]


def test_area_under_the_curve():
    assert auac([(10, 0.0), (20, 1.0)], 10, 20) == pytest.approx(0.5)
    assert auac([(20, 1.0), (10, 0.0), (12, 1.0)], 10, 20) == pytest.approx((1 + 8) / 10)  # in any order
    assert auac([(12, 0.2), (18, 0.8)], 10, 20) == pytest.approx((2 * 0.2 + 6 * 0.5 + 2 * 0.8) / 10)  # level outside
    assert auac([(0, 0.0), (40, 1.0)], 10, 20) == pytest.approx(15 / 40)  # cut to the range
    assert auac([(10, 0.5)], 10, 10) is None


@pytest.mark.parametrize(("sinks", "buffer"), [(0, 1), (3, 1), (2, 4)])
def test_newest_entries_are_those_that_the_policy_keeps(sinks, buffer):
    """A full-cache rollout gets the trace that the policy's own rollout of the same length has."""
    cache = kvrl.CacheConfig(policy="streaming", budget=12, buffer=buffer, window=0, sinks=sinks)
    lm, prompts = beacon_models.model(), beacon_models.make_prompts()
    for full, made in zip(helpers.sample(lm, prompts, DENSE), helpers.sample(lm, prompts, cache), strict=True):
        assert full.num_tokens == made.num_tokens
        ours = newest(full, cache).trace.validate()
        assert torch.equal(ours.events, made.trace.events) and ours.budget == 12 and ours.buffer == buffer
        assert torch.equal(ours.evicted_at_event, made.trace.evicted_at_event)


def test_the_prompt_stays_where_it_is_protected():
    cache = kvrl.CacheConfig(policy="streaming", budget=50, buffer=1, sinks=0, protect_prompt=True)
    full = helpers.sample(beacon_models.model(), beacon_models.make_prompts([42]), DENSE)[0]
    assert (newest(full, cache).trace.events[0, 0, :42] == -1).all() and newest(full, cache).trace.num_events > 0


def test_windows_that_close_without_beacons_by_hand():
    """Prompt of 4, windows of 2, 7 tokens: the third window closes where nothing is predicted any more."""
    (full,) = helpers.sample(beacon_models.model(), beacon_models.make_prompts([4]), DENSE, new=7)
    trace = windows_alone(full, Beacons(0, (2,))).trace.validate()
    layers, heads, tokens = trace.events.shape
    assert tokens == 11 and torch.equal(trace.windows, full.trace.windows)
    assert trace.evicted_at().tolist() == [[[NEVER] * 4 + [6, 6, 8, 8] + [NEVER] * 3] * heads] * layers
    mixed = windows_alone(full, Beacons(0, (1, 3))).trace.validate()
    assert mixed.evicted_at()[0, 0].tolist() == [NEVER] * 4 + [5, 8, 8, 8] + [NEVER] * 3


@pytest.mark.parametrize("c", [1, 3, 29, 30])
def test_windows_alone_are_the_stock_model_on_prompt_and_window(c):
    """Nothing of an earlier window is left, so every window is the continuation of the prompt, at its positions."""
    full = helpers.sample(prompts=helpers.make_prompts([4, 18]), config=DENSE)
    expected, prompts = [], [len(r.prompt_ids) for r in full]
    for r, prompt in zip(full, prompts, strict=True):
        for start in range(0, helpers.NEW, c):
            ids = r.prompt_ids + r.completion_ids[start : start + c]
            at = [*range(prompt), *range(prompt + start, prompt + start + len(ids) - prompt)]
            with torch.no_grad():
                logits = helpers.stock()(torch.tensor([ids]), position_ids=torch.tensor([at])).logits[0]
            last = prompt - 1 if start == 0 else prompt  # the prompt's last token predicts the first
            following = r.completion_ids[0 if start == 0 else start + 1 : start + c + 1]
            expected += logits.log_softmax(-1)[last : last + len(following)].gather(
                1, torch.tensor(following)[:, None]
            ).flatten().tolist()  # fmt: skip
    assert len(expected) == 2 * helpers.NEW
    found = negative_logprob(helpers.model(), full, partial(windows_alone, beacons=Beacons(0, (c,))))
    assert found == pytest.approx(-sum(expected) / len(expected), abs=1e-5)
    assert (abs(found - negative_logprob(helpers.model(), full, lambda r: r)) > 1e-3) == (c < 29)


def test_negative_logprobs_of_one_text():
    """Uncompressed: the sampler's own. A window that evicts changes it, one that does not leaves it."""
    lm = beacon_models.model()
    full = helpers.sample(lm, beacon_models.make_prompts(), DENSE)
    own = -torch.cat([r.logprobs for r in full]).mean()
    tight, loose = (kvrl.CacheConfig(policy="recent", budget=b, buffer=1) for b in (8, 200))
    found = [negative_logprob(lm, full, partial(newest, cache=cache)) for cache in (loose, tight)]
    assert found[0] == pytest.approx(float(own), abs=1e-5) == negative_logprob(lm, full, lambda r: r)
    assert abs(found[1] - float(own)) > 1e-3
    assert by_position(tight) and not by_position(kvrl.CacheConfig(policy="tova"))
