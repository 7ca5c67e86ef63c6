"""StarGraph: the docstring's graph by hand, an evaluator of worked texts, the library's problems and scores, splits."""

from __future__ import annotations

import random
import re
import sys

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import get_task
from kvrl.tasks.star_graph import Graph, StarGraph, arms_of

pytest.importorskip("reasoning_gym")


def graph(prompt: str) -> tuple[list[tuple[int, int]], int, int]:
    """Edges in order, centre, goal."""
    edges, ends = prompt.removeprefix("<bos> ").split(" / ")
    centre, goal = map(int, ends.split())
    return [(int(a), int(b)) for a, b in (edge.split(">") for edge in edges.split())], centre, goal


def path_of(prompt: str) -> list[int]:
    """The path by going back from the goal, which only one edge leads to."""
    edges, centre, goal = graph(prompt)
    before = {b: a for a, b in edges}
    path = [goal]
    while path[-1] != centre:
        path.append(before[path[-1]])
    return path[::-1]


def walks(text: str) -> tuple[list[tuple[list[tuple[int, int]], str]], list[int]]:
    """The arms of a worked text, as (edges in order, mark), and its answer."""
    worked, answer = text.split(" = ")
    arms = []
    for symbols, mark in re.findall(r"([0-9> ]+) ([xy])", worked):
        *steps, end = re.findall(r"\S+", symbols)
        edges = [(int(a), int(b)) for a, b in (edge.split(">") for edge in steps[1::2])]
        assert [*map(int, steps[::2]), int(end)] == [*(a for a, _ in edges), edges[-1][1]]
        arms.append((edges, mark))
    assert worked == " ".join(
        " ".join([*(f"{a} {a}>{b}" for a, b in edges), str(edges[-1][1]), mark]) for edges, mark in arms
    )
    return arms, [int(node) for node in answer.split()]


def test_arms_by_hand():
    edges = [(4, 7), (2, 4), (7, 1), (9, 3), (2, 9), (3, 8)]
    task = StarGraph(degree=2, min_path_length=3, max_path_length=3)
    example = Graph(edges, 2, 8, "2 9 3 8")
    assert arms_of(example) == [[4, 7, 1], [9, 3, 8]]
    assert arms_of(Graph(edges[::-1], 2, 8, "2 9 3 8")) == [[9, 3, 8], [4, 7, 1]]

    hit, miss = "2 2>9 9 9>3 3 3>8 8 y", "2 2>4 4 4>7 7 7>1 1 x"
    texts = {task._worked(example, random.Random(seed)) for seed in range(20)}
    assert texts == {f"{hit} {miss} = 2 9 3 8", f"{miss} {hit} = 2 9 3 8"}


@pytest.mark.parametrize(
    "params", [{}, {"degree": 2, "min_path_length": 2, "max_path_length": 6}, {"degree": 5, "node_range": 40}]
)
def test_worked_texts_follow_every_arm(params):
    task = StarGraph(**params)
    lengths = set()
    for prompt, text in task.demonstrations(200, seed=1):
        edges, centre, goal = graph(prompt)
        arms, answer = walks(text)
        assert sorted(edge for arm, _ in arms for edge in arm) == sorted(edges)
        for arm, mark in arms:
            assert arm[0][0] == centre
            assert all(before[1] == after[0] for before, after in zip(arm, arm[1:], strict=False))
            assert (mark == "y") == (arm[-1][1] == goal)
        assert answer == path_of(prompt)
        assert task.reward([text], answer=[" ".join(map(str, answer))]) == [1.0]
        lengths.add(len(answer) - 1)
    assert lengths == set(range(task.min_path_length, task.max_path_length + 1))


def test_problems_are_the_library_s_in_its_short_form():
    from reasoning_gym import create_dataset

    task = StarGraph(degree=4, min_path_length=2, max_path_length=4, node_range=20)
    library = create_dataset(
        "path_star", seed=91, size=20, degree=4, min_path_length=2, max_path_length=4, node_range=20
    )
    draws = task._draws(91)
    for entry in library:
        ours = next(draws)
        prompt = f"| {' | '.join(f'{a} {b}' for a, b in ours.edges)} / {ours.centre} {ours.goal} ="
        assert prompt.replace(" ", "") == entry["question"].splitlines()[-1].replace(" ", "")
        assert ours.path == entry["answer"]


def test_rows():
    task = StarGraph(degree=4, min_path_length=5, max_path_length=5, node_range=25)
    for row in task.rows("train", 100, seed=0):
        edges, centre, goal = graph(row["prompt"])
        assert len(edges) == 20 and sum(a == centre for a, _ in edges) == 4
        assert max(max(edge) for edge in edges) < task.node_range
        assert row["answer"] == " ".join(map(str, path_of(row["prompt"])))
        assert row["prompt"].endswith(f" / {centre} {goal}")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("2 2>9 9 9>3 3 3>8 8 y = 2 9 3 8", 1.0),
        ("= 2 9 3 8 <eos>", 1.0),
        ("= 2 4 = 2 9 3 8", 1.0),  # the last answer counts
        ("= 2 9 3", 0.0),
        ("= 9 3 8", 0.0),
        ("= 2 9 3 8 8", 0.0),
        ("= 8 3 9 2", 0.0),
        ("2 9 3 8", 0.0),  # no mark
        ("= 2 9 3 8 y", 0.0),
        ("=", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_library_s_score(completion, reward):
    assert StarGraph().reward([completion], answer=["2 9 3 8"], prompt=[""]) == [reward]


def test_a_mistake_goes_on_along_another_arm():
    task = StarGraph(degree=3, min_path_length=4, max_path_length=4, mistake_rate=0.1)
    wrong = steps = failed = 0
    for prompt, text in task.demonstrations(500, seed=3):
        edges, centre, goal = graph(prompt)
        true = dict(edges)
        depths = {node: path.index(node) for path in (path_of(f"{prompt[: prompt.index(' / ')]} / {centre} {end}")
                  for end in {b for _, b in edges} - {a for a, _ in edges}) for node in path}  # fmt: skip
        arms, answer = walks(text)
        assert sorted(arm[0] for arm, _ in arms) == sorted(edge for edge in edges if edge[0] == centre)
        for arm, mark in arms:
            assert [depths[b] for _, b in arm] == [1, 2, 3, 4]
            assert (mark == "y") == (arm[-1][1] == goal)
            wrong += sum(true[a] != b for a, b in arm[1:])
            steps += len(arm) - 1
        paths = [[arm[0][0], *(b for _, b in arm)] for arm, _ in arms]
        assert answer == next((path for path in paths[::-1] if path[-1] == goal), paths[-1])
        failed += answer != path_of(prompt)
    assert 0.08 < wrong / steps < 0.12
    assert 0.2 < failed / 500 < 0.5


def test_the_vocabulary_covers_every_text():
    for params in ({}, {"mistake_rate": 0.2}, {"degree": 2, "max_path_length": 9}):
        task = StarGraph(**params)
        texts = [f"{prompt} {text}" for prompt, text in task.demonstrations(500, seed=0)]
        assert {symbol for text in texts for symbol in text.split()} == {*task.vocab, "<bos>"}
    assert len(StarGraph().vocab) == 20 * 20 + 4


def test_splits_share_no_problem_in_any_order_of_its_edges():
    task = StarGraph(degree=2, min_path_length=2, max_path_length=2, node_range=6)  # 720 problems in all

    def keys(prompts):
        return {(graph(prompt)[2], *sorted(graph(prompt)[0])) for prompt in prompts}

    train = keys(row["prompt"] for seed in range(3) for row in task.rows("train", 1000, seed))
    train |= keys(prompt for prompt, _ in task.demonstrations(1000, seed=7))
    held_out = [row["prompt"] for row in task.rows("eval", 40, seed=0)]
    assert len(train) > 500 and len(keys(held_out)) == 40
    assert not train & keys(held_out)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"degree": 1}, "task.params.degree: 1 is below the minimum 2; raise it to at least 2"),
        ({"min_path_length": 1}, "task.params.min_path_length: 1 is below the minimum 2"),
        (
            {"min_path_length": 99},
            r"task.params.min_path_length: 99 is above max_path_length \(\d\); lower it or raise",
        ),
        (
            {"degree": 3, "min_path_length": 5, "max_path_length": 5, "node_range": 16},
            "task.params.node_range: 16 is below the 17 that 3 arms of 5 edges need; raise it to at least 17",
        ),
        ({"mistake_rate": 1.0}, "task.params.mistake_rate: 1.0 is not below 1; "),
        ({"reversed": True}, "task.params.reversed: task star_graph has no such parameter"),
    ],
)
def test_bad_dials_are_refused(params, message):
    with pytest.raises(KvrlError, match=message) as error:
        get_task("star_graph", **params)
    assert "\n" not in str(error.value)


def test_the_least_range_of_nodes_is_what_the_library_takes():
    task = StarGraph(degree=3, min_path_length=5, max_path_length=5, node_range=17)
    assert len(task.rows("train", 3, 0)) == 3


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(KvrlError, match=r"task.name: star_graph needs the package reasoning-gym; .*'\.\[tasks\]'"):
        get_task("star_graph")
