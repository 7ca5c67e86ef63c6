"""Micro-batches: the cut is the cheapest of all, keeps to its limits, and changes no gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks.recurrence import Recurrence
from kvrl.train.micro_batch import PASS, micro_batches
from kvrl.train.section import WarmStart
from kvrl.train.warm_start import warm_start

sizes = st.lists(st.integers(1, 900), min_size=1, max_size=7)


def cost(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(len(part) * max(lengths[i] for i in part) + PASS for part in parts)


def all_cuts(order: list[int]):
    """Every way to cut a list into consecutive parts."""
    for picks in itertools.product([False, True], repeat=len(order) - 1):
        ends = [i + 1 for i, pick in enumerate(picks) if pick]
        yield [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]


@given(sizes, st.integers(1, 4000))
@settings(deadline=None)
def test_no_cut_of_the_sorted_samples_costs_less(lengths, limit):
    parts = micro_batches(lengths, limit)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))

    def fits(cut):
        return all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= limit for part in cut)

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert fits(parts)
    assert cost(parts, lengths) == min(cost(cut, lengths) for cut in all_cuts(order) if fits(cut))


@given(sizes, st.integers(1, 4000))
@settings(deadline=None)
def test_units_are_never_parted(lengths, limit):
    lengths = [*lengths, *lengths[::-1]]
    units = [[i, len(lengths) - 1 - i] for i in range(len(lengths) // 2)]
    parts = micro_batches(lengths, limit, units)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all((a in part) == (b in part) for part in parts for a, b in units)
    assert all(len(part) == 2 or len(part) * max(lengths[i] for i in part) <= limit for part in parts)


def test_like_lengths_go_together_where_the_padding_is_worth_a_pass():
    lengths = [100, 10, 100, 10, 100, 10]
    assert micro_batches(lengths, 16_384) == [[1, 3, 5], [0, 2, 4]]  # 270 tokens of padding against 256
    assert micro_batches([95, 10] * 3, 16_384) == [[1, 3, 5, 0, 2, 4]]  # 255
    assert micro_batches([50] * 6, 16_384) == [[0, 1, 2, 3, 4, 5]]
    assert micro_batches([50] * 6, 100) == [[0, 1], [2, 3], [4, 5]]
    assert micro_batches([], 100) == []


def test_a_warm_start_is_the_same_however_it_is_cut():
    task = Recurrence(min_steps=1, max_steps=9, max_start=2, mistake_rate=0.0)
    tokenizer, weights, losses = build_tiny_tokenizer(task.vocab), [], []
    for limit in (1, 200, 16_384):
        model = build_tiny_model(tokenizer, seed=0).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rate = WarmStart(steps=2, batch_size=12, learning_rate=0.1)
        losses.append(warm_start(model, tokenizer, task, rate, 3, optimizer, max_tokens=limit))
        weights.append(model.lm_head.weight.detach())
    for i in (0, 1):
        assert losses[i] == pytest.approx(losses[2], rel=1e-6)  # transformers' loss is of float32
        torch.testing.assert_close(weights[i], weights[2], rtol=0, atol=1e-6)
