"""Countdown: searches written by hand, an evaluator of the text that shares nothing with the writer, the library's own
problems and scores, splits."""

from __future__ import annotations

import random
import re
import sys
from itertools import permutations, product

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import get_task
from kvrl.tasks.countdown import Countdown, Problem, Search

pytest.importorskip("reasoning_gym")

ALL = {"min_numbers": 2, "max_numbers": 4, "operators": "+-*/", "shuffle": False, "max_target": 60}


def search(target: int, numbers: list[int], **params) -> str | None:
    return Search(Countdown(**params)).run(Problem(numbers, target))


def problem(prompt: str) -> Problem:
    bos, target, colon, *numbers = prompt.split()
    assert (bos, colon) == ("<bos>", ":")
    return Problem(list(map(int, numbers)), int(target))


def replay(text: str, given: Problem, operators: str) -> str:
    """Follow a search step by step: each must be right, start from a value that is open, and be in its turn.

    Returns the answer. `open_` holds (value, index of the number to take off next) from the target on.
    """
    worked, answer = text.split(" > ")
    steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)(?: ([xy]))?", worked)
    assert " ".join(f"{a} {op} {b} = {c}" + (f" {mark}" if mark else "") for a, op, b, c, mark in steps) == worked
    open_ = [(given.target, len(given.numbers) - 1)]
    tried: list[set[str]] = [set()]
    for a, op, b, c, mark in steps:
        assert eval(f"{a} {op} {b}") == int(c)
        if mark:
            goal, index = open_[-1]
            assert index == 1 and sorted(given.numbers[:2]) == sorted([int(a), int(b)])
            assert (mark == "y") == (int(c) == goal)
            continue
        while True:  # back to the newest choice that this step belongs to
            goal, index = open_[-1]
            if index >= 2 and {int(a), int(b)} == {goal, given.numbers[index]} and f"{a}{op}{b}" not in tried[-1]:
                break
            open_.pop(), tried.pop()
            assert open_, "a step from a value that is not open"
        tried[-1].add(f"{a}{op}{b}")
        open_.append((int(c), index - 1))
        tried.append(set())
    assert steps[-1][4] == "y" and [step[4] for step in steps].count("y") == 1
    return answer


def test_searches_by_hand():
    assert search(12, [3, 9]) == "3 + 9 = 12 y > 3 + 9"
    assert search(6, [3, 9]) == "3 + 9 = 12 x 9 - 3 = 6 y > 9 - 3"
    # 2 = 7 - X needs X = 5, which 3 and 9 do not make; 2 = X - 7 needs 9; nor that; so 2 is out of reach
    assert search(2, [3, 9, 7]) is None
    # 1 = X - 7 is tried first (no X + 7 comes to 1), then 7 - X
    assert (
        search(1, [3, 9, 7]) == "1 + 7 = 8 3 + 9 = 12 x 9 - 3 = 6 x 7 - 1 = 6 3 + 9 = 12 x 9 - 3 = 6 y > 7 - ( 9 - 3 )"
    )
    # 0 = X - 9 and 0 = 9 - X both need X = 9, which is tried once
    assert search(5, [1, 2, 9, 5]) == (
        "5 - 5 = 0 0 + 9 = 9 1 + 2 = 3 x 2 - 1 = 1 x "
        "5 + 5 = 10 10 - 9 = 1 1 + 2 = 3 x 2 - 1 = 1 y > - 5 + ( 9 + ( 2 - 1 ) )"
    )
    # back over two levels: after 14 - 7 = 7 both ways with 5, then 14 + 7
    assert search(16, [1, 2, 5, 7]) is None
    assert search(5, [1, 2, 4, 6]) == (
        "5 + 6 = 11 11 - 4 = 7 1 + 2 = 3 x 2 - 1 = 1 x 11 + 4 = 15 1 + 2 = 3 x 2 - 1 = 1 x "
        "6 - 5 = 1 1 + 4 = 5 1 + 2 = 3 x 2 - 1 = 1 x 4 - 1 = 3 1 + 2 = 3 y > 6 - ( 4 - ( 1 + 2 ) )"
    )


def test_searches_with_all_operators_by_hand():
    assert search(3, [2, 6], operators="+-*/") == "2 + 6 = 8 x 6 - 2 = 4 x 2 * 6 = 12 x 6 / 2 = 3 y > 6 / 2"
    assert search(12, [6, 2, 4], operators="+-*/") == ("12 - 4 = 8 6 + 2 = 8 y > 4 + ( 6 + 2 )")
    assert search(48, [6, 2, 4], operators="+-*/", max_target=60) == (
        "48 - 4 = 44 6 + 2 = 8 x 6 - 2 = 4 x 6 * 2 = 12 x 6 / 2 = 3 x "
        "48 + 4 = 52 6 + 2 = 8 x 6 - 2 = 4 x 6 * 2 = 12 x 6 / 2 = 3 x "
        "48 / 4 = 12 6 + 2 = 8 x 6 - 2 = 4 x 6 * 2 = 12 y > 4 * ( 6 * 2 )"
    )
    pair = "1 + 2 = 3 x 2 - 1 = 1 x 1 * 2 = 2 x 2 / 1 = 2 x"
    assert search(2, [1, 2, 6], operators="+-*/") == (
        f"2 + 6 = 8 {pair} 6 - 2 = 4 {pair} 2 * 6 = 12 {pair} 6 / 2 = 3 1 + 2 = 3 y > 6 / ( 1 + 2 )"
    )
    # the largest number that a search of this task may reach is 28
    assert search(19, [4, 7, 9], operators="+-*", min_numbers=3, max_numbers=3, max_target=19) == (
        "19 - 9 = 10 4 + 7 = 11 x 7 - 4 = 3 x 4 * 7 = 28 x "
        "19 + 9 = 28 4 + 7 = 11 x 7 - 4 = 3 x 4 * 7 = 28 y > - 9 + ( 4 * 7 )"
    )
    # 7 / 5 is no whole number, and 7 * 5 is above 29, the largest number that a search of this task may reach
    assert search(3, [7, 5, 4], operators="+-*/", min_numbers=3, max_numbers=3) == (
        "3 + 4 = 7 7 + 5 = 12 x 7 - 5 = 2 x 4 - 3 = 1 7 + 5 = 12 x 7 - 5 = 2 x 3 * 4 = 12 7 + 5 = 12 y > ( 7 + 5 ) / 4"
    )


@pytest.mark.parametrize("params", [{}, {"min_numbers": 2, "max_numbers": 6}, ALL, {**ALL, "shuffle": True}])
def test_worked_searches_are_right_in_every_step(params):
    task = Countdown(**params)
    counts = set()
    for prompt, text in task.demonstrations(400, seed=1):
        given = problem(prompt)
        counts.add(len(given.numbers))
        answer = replay(text, given, task.operators)
        assert abs(eval(answer) - given.target) < 1e-9
        assert sorted(map(int, re.findall(r"\d+", answer))) == sorted(given.numbers)
    assert counts == set(range(task.min_numbers, task.max_numbers + 1))


def test_with_plus_and_minus_the_search_finds_every_solution():
    rng = random.Random(0)
    found = 0
    for _ in range(300):
        numbers, target = [rng.randint(1, 9) for _ in range(4)], rng.randint(1, 20)
        signs = product([1, -1], repeat=4)
        solvable = any(sum(s * n for s, n in zip(sign, numbers, strict=True)) == target for sign in signs)
        assert (search(target, numbers) is not None) == solvable
        found += solvable
    assert 50 < found < 250


def test_problems_are_the_library_s():
    from reasoning_gym import create_dataset

    for operators, shuffle in product(("+-", "+-*/"), (True, False)):
        task = Countdown(
            min_numbers=3, max_numbers=5, max_value=12, max_target=40, operators=operators, shuffle=shuffle
        )
        library = create_dataset(
            "countdown", seed=77, size=12, min_numbers=3, max_numbers=5, min_value=1, max_value=12, min_target=1,
            max_target=40, operators=tuple(operators), shuffle=shuffle,
        )  # fmt: skip
        for index in range(12):
            ours = task._draw(random.Random(77 + index))
            theirs = library[index]["metadata"]
            assert ours is not None and ours._asdict() == {key: theirs[key] for key in ("numbers", "target")}


def test_problems_are_within_the_dials_and_solvable():
    task = Countdown(min_numbers=3, max_numbers=4, min_value=2, max_value=6, min_target=5, max_target=9)
    for row in task.rows("train", 200, seed=0):
        assert row["prompt"] == f"<bos> {row['target']} : {' '.join(map(str, row['numbers']))}"
        assert 3 <= len(row["numbers"]) <= 4 and 5 <= row["target"] <= 9
        assert all(2 <= number <= 6 for number in row["numbers"])
        texts = (
            "".join(f"{op}{n}" for op, n in zip(("+", *ops), order, strict=True))
            for order in permutations(row["numbers"])
            for ops in product("+-", repeat=len(order) - 1)
        )
        assert any(eval(text) == row["target"] for text in texts)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("14 - 7 = 7 > 7 + ( - 5 + ( 3 + 9 ) )", 1.0),
        ("> 9 + 3 - 5 + 7 <eos>", 1.0),
        ("> 1 > 9 + 3 - 5 + 7", 1.0),  # the last answer counts
        ("> 9 + 3 + 5 - 7", 0.05),
        ("> 9 + 5", 0.05),  # 14, but not of all numbers
        ("> 14", 0.05),
        ("> 9 + 3 - 5 + 7 + 7 - 7", 0.05),
        ("> 9 + ( 3", 0.01),
        ("9 + 3 - 5 + 7", 0.01),  # no mark
        (">", 0.01),
        ("", 0.01),
        ("> 9 + 3 - 5 + 7 y", 0.01),
        ("> 9+3-5+7", 0.01),  # not in the task's symbols
        ("> abs ( 9 + 3 - 5 + 7 )", 0.01),
    ],
)
def test_the_reward_is_the_library_s_score(completion, reward):
    assert Countdown().reward([completion], numbers=[[3, 9, 5, 7]], target=[14], prompt=[""]) == [reward]


def test_each_completion_is_scored_by_its_own_row():
    assert Countdown().reward(["> 1 + 2", "> 1 + 2"], numbers=[[1, 2], [1, 2]], target=[3, 4]) == [1.0, 0.05]


def test_text_of_a_completion_is_never_run():
    code = "> __import__('sys').modules.update(countdown_ran=1)"
    assert Countdown().reward([code], numbers=[[1, 2]], target=[3]) == [0.01]
    assert "countdown_ran" not in sys.modules


def test_demonstrations_try_no_more_pairs_than_allowed():
    def tries(**params):
        texts = [text for _, text in Countdown(**params).demonstrations(200, seed=0)]
        return max(len(re.findall(r"\d+ \+ \d+ = \d+ [xy]", text)) for text in texts)

    assert tries() == 8
    assert tries(max_tries=5) == 5


def test_the_vocabulary_covers_every_text():
    for params in ({}, {"max_numbers": 6}, ALL, {"min_numbers": 2, "max_numbers": 2}):
        task = Countdown(**params)
        texts = [f"{prompt} {text}" for prompt, text in task.demonstrations(2000, seed=0)]
        assert {symbol for text in texts for symbol in text.split()} <= {*task.vocab, "<bos>"}
        assert len(set(task.vocab)) == len(task.vocab)
    assert Countdown(max_target=20, max_numbers=5, max_value=9).largest == 20 + 3 * 9


def test_splits_share_no_problem_in_any_order():
    task = Countdown(min_numbers=2, max_numbers=2, max_value=20)  # a few hundred problems in all

    def keys(prompts):
        return {(problem(prompt).target, *sorted(problem(prompt).numbers)) for prompt in prompts}

    train = keys(row["prompt"] for seed in range(3) for row in task.rows("train", 1000, seed))
    train |= keys(prompt for prompt, _ in task.demonstrations(1000, seed=7))
    held_out = [row["prompt"] for row in task.rows("eval", 10, seed=0)]
    assert len(train) > 100 and len(keys(held_out)) == 10
    assert not train & keys(held_out)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_numbers": 1}, "task.params.min_numbers: 1 is below the minimum 2; raise it to at least 2"),
        ({"min_numbers": 9}, r"task.params.min_numbers: 9 is above max_numbers \(5\); lower it or raise max_numbers"),
        ({"min_value": 10}, r"task.params.min_value: 10 is above max_value \(9\)"),
        ({"min_target": 99}, r"task.params.min_target: 99 is above max_target \(20\)"),
        (
            {"min_target": 90, "max_target": 95},
            "task.params.max_target: 2000 draws of 5 to 5 numbers gave no target from",
        ),
        ({"operators": "+"}, "task.params.operators: "),
        ({"max_tries": 0}, "task.params.max_tries: 0 is below the minimum 1"),
        ({"mistake_rate": 0.1}, "task.params.mistake_rate: task countdown has no such parameter"),
    ],
)
def test_bad_dials_are_refused(params, message):
    with pytest.raises(KvrlError, match=message) as error:
        get_task("countdown", **params)
    assert "\n" not in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(KvrlError, match=r"task.name: countdown needs the package reasoning-gym; .*'\.\[tasks\]'"):
        get_task("countdown")
