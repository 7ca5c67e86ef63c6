"""Splits of problems drawn at random: what belongs where, and that nothing but the seed decides."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import get_task
from kvrl.tasks.splits import is_held_out, stream, take


def draws(limit: int, seed: int = 0):
    rng = random.Random(seed)
    while True:
        yield rng.randrange(limit)


def test_a_tenth_is_held_out_and_the_splits_part_the_problems():
    share = sum(is_held_out(str(number)) for number in range(10_000)) / 10_000
    assert 0.09 < share < 0.11
    train, held_out = take("train", 3000, draws(300), str), take("eval", 20, draws(300), str)
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == 20
    assert len(set(train)) < 3000  # train problems may come again


def test_the_first_of_the_draws_are_taken_and_no_draw_is_lost():
    stream_of_draws = draws(10**9)
    first, second = take("train", 5, stream_of_draws, str), take("train", 5, stream_of_draws, str)
    kept = [number for number, _ in zip(draws(10**9), range(100), strict=False) if not is_held_out(str(number))]
    assert first + second == kept[:10]


def test_too_few_problems_and_unknown_splits_are_refused():
    with pytest.raises(KvrlError, match=r"eval.n: 20 is above the \d eval problems that 1800 draws gave; lower it, or"):
        take("eval", 20, draws(50), str)
    with pytest.raises(KvrlError, match="split: test is neither train nor eval; use one of them"):
        take("test", 1, draws(50), str)


def test_streams_of_neighbouring_seeds_are_far_apart():
    seeds = sorted(stream(split, seed) for split in ("train", "eval", "demonstrations") for seed in range(100))
    assert min(b - a for a, b in zip(seeds, seeds[1:], strict=False)) > 100
    assert seeds[0] >= 0 and seeds[-1] < 2**31


SAMPLE = """
from kvrl.tasks import get_task
made = []
for name in ("linsys", "countdown", "star_graph"):
    task = get_task(name)
    made.append([task.rows("train", 50, 3), task.rows("eval", 20, 3), task.demonstrations(50, 3)])
"""


def test_problems_do_not_depend_on_the_hash_seed():
    pytest.importorskip("reasoning_gym")
    here: dict = {}
    exec(SAMPLE, here)
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", f"{SAMPLE}\nprint(made)"], env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert there.stdout == f"{here['made']}\n"


@pytest.mark.parametrize(
    ("name", "fields", "more"),
    [("countdown", {}, 300), ("linsys", {"mistake_rate": 0.1}, 300), ("star_graph", {"mistake_rate": 0.05}, 60)],
)
def test_rows_and_demonstrations_depend_on_the_seed_alone(name, fields, more):
    if name != "linsys":
        pytest.importorskip("reasoning_gym")
    task = get_task(name, **fields)
    assert task.rows("train", 9, seed=1) == task.rows("train", more, seed=1)[:9]
    assert task.rows("train", 9, seed=1) != task.rows("train", 9, seed=2)
    assert task.demonstrations(9, seed=1) == task.demonstrations(9, seed=1)
    assert not set(dict(task.demonstrations(9, seed=1))) & set(dict(task.demonstrations(9, seed=2)))
