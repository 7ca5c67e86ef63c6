"""Entries that completions hold, budgets that hold as many, and the area under a curve."""

from __future__ import annotations

import pytest

import beacon_models
import helpers
import kvrl
from kvrl.cache.trace import occupancy
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
