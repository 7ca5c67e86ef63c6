"""Which entries stay: (protected, score, newer first), and whose scores are averaged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrl.cache.select import pool_scores, split_slots


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=40), st.data())
def test_what_stays_is_a_stable_sort(entries, data):
    """Python's own sort on the triple, few distinct scores so that ties are common."""
    score = torch.tensor([float(s) for s, _ in entries])
    protected = torch.tensor([p for _, p in entries])
    budget = data.draw(st.integers(0, len(entries)))
    expected = sorted(
        range(len(entries)), key=lambda i: (not entries[i][1], -entries[i][0] if not entries[i][1] else 0, -i)
    )
    kept, gone = split_slots(score.masked_fill(protected, 0.0), protected, budget)
    assert kept.tolist() == sorted(expected[:budget]) and gone.tolist() == sorted(expected[budget:])


def test_infinite_scores_do_not_beat_protection():
    score = torch.tensor([float("inf"), float("-inf"), 3.4e38, 0.0])
    protected = torch.tensor([False, True, False, True])
    assert split_slots(score, protected, 2)[0].tolist() == [1, 3]


@pytest.mark.parametrize("granularity, expected", [
    ("per_head", [[1.0, 3.0], [5.0, 11.0]]), ("per_layer", [[2.0, 2.0], [8.0, 8.0]]),
    ("shared", [[5.0, 5.0], [5.0, 5.0]])
])  # fmt: skip
def test_pooling_by_hand(granularity, expected):
    score = torch.tensor([[1.0, 3.0], [5.0, 11.0]])[:, None, :, None]  # [layers, 1, H, 1]
    assert pool_scores(score, granularity)[:, 0, :, 0].tolist() == expected
