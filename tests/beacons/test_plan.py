"""Beacons: places, positions, predictors, lifetimes and cache size, by hand and token by token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrl import KvrlError
from kvrl.beacons.config import BeaconSet
from kvrl.beacons.plan import Beacons
from kvrl.cache.trace import NEVER

B = 99


def test_by_hand():
    """Prompt of 2, seven raw tokens, windows of 2: beacons after the second and the fourth; the last has no forward."""
    plan = Beacons(B, (2,))
    fed = plan.fed([10, 11], [1, 2, 3, 4, 5, 6, 7])
    assert fed.ids.tolist() == [10, 11, 1, 2, B, 3, 4, B, 5, 6, 7]
    assert fed.at.tolist() == [2, 3, 5, 6, 8, 9, 10] and fed.beacons.tolist() == [4, 7]
    assert fed.predictor.tolist() == [1, 2, 3, 5, 6, 8, 9]
    assert fed.positions.tolist() == list(range(11))
    assert Beacons(B, (2,), "shared").fed([10, 11], [1, 2, 3, 4, 5, 6, 7]).positions.tolist() == [
        0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8,
    ]  # fmt: skip
    assert plan.trace(1, 1, 2, 7).validate().evicted_at().tolist() == [[[
        NEVER, NEVER, 5, 5, NEVER, 8, 8, NEVER, NEVER, NEVER, NEVER,
    ]]]  # fmt: skip


@pytest.mark.parametrize("raw, beacons", [(1, 0), (3, 0), (4, 1), (5, 1), (6, 2), (7, 2), (8, 3)])
def test_a_beacon_is_fed_only_before_a_forward(raw, beacons):
    assert len(Beacons(B, (2,)).fed([10], list(range(raw))).beacons) == beacons


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 6),
    st.sampled_from(["sequence", "shared"]),
)
def test_as_an_engine_would_feed_them(windows, raw, prompt, positions):
    """Token by token: sample, close windows, feed, evict; every list built the slow way."""
    plan, known = Beacons(B, tuple(windows), positions), BeaconSet(B, tuple(sorted(set(windows))))
    sizes = itertools.chain(windows, itertools.repeat(windows[-1]))
    every = next(sizes)
    ids, position, predictor, held = list(range(100, 100 + prompt)), list(range(prompt)), [], list(range(prompt))
    gone: dict[int, int] = {}
    window: list[int] = []
    last_raw, following = prompt - 1, prompt
    for n in range(raw):
        predictor.append(last_raw)  # raw token n is sampled here
        if n == raw - 1:
            ids.append(n)
            position.append(following)
            break
        if len(window) == every:  # its beacon, before the token just sampled
            ids.append(B)
            position.append(following if positions == "sequence" else following - 1)
            following += positions == "sequence"
            beacon = len(ids) - 1
            assert len(held) + 1 <= known.slots(prompt, raw)
            for entry in window:
                held.remove(entry)
                gone[entry] = beacon + 1
            held.append(beacon)
            window, every = [], next(sizes)
        ids.append(n)
        position.append(following)
        following += 1
        last_raw = len(ids) - 1
        held.append(last_raw)
        window.append(last_raw)
        closed = len(window) == every  # its beacon comes with the next forward: counted as if it had been read
        assert len(held) - (every - 1 if closed else 0) == plan.held(prompt, n + 1)
        assert len(held) <= known.slots(prompt, raw)
    fed = plan.fed(list(range(100, 100 + prompt)), list(range(raw)))
    assert fed.ids.tolist() == ids and fed.positions.tolist() == position and fed.predictor.tolist() == predictor
    lifetimes = plan.trace(2, 1, prompt, raw).validate().evicted_at()
    assert lifetimes.tolist() == [[[gone.get(i, NEVER) for i in range(len(ids))]]] * 2


def test_windows_of_no_token_are_refused():
    for windows in ((0,), (2, 0), ()):
        with pytest.raises(KvrlError, match="has a window below 1, or none"):
            Beacons(B, windows)
