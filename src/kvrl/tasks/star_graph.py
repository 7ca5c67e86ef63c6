"""StarGraph: arms leave a centre, and the path from the centre to the end of one of them is asked for.

    prompt       <bos> 4>7 2>4 7>1 9>3 2>9 3>8 / 2 8
    completion   2 2>9 9 9>3 3 3>8 8 y 2 2>4 4 4>7 7 7>1 1 x = 2 9 3 8

The prompt has the edges in any order, then centre and goal. The first step of the answer cannot be seen from the
centre, so every arm is followed first, in any order, node by edge by node: y if it ends at the goal, else x. Which
arms were followed, and which one had the y, must be remembered for long. The answer after `=` has the nodes.

An edge is one symbol, so that a model finds the edge from a node in a single look; with two symbols it must first
learn to tell what a number follows, which took a tiny model beyond 400 steps of warm start.

Problems and scorer are those of reasoning-gym's `path_star`; its own wording is in task reasoning_gym.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import count, pairwise
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks.reasoning_gym import library
from kvrl.tasks.splits import stream, take


class Graph(NamedTuple):
    """Edges from the centre outwards in the order of the prompt, the ends of the path, and the path as text."""

    edges: list[tuple[int, int]]
    centre: int
    goal: int
    path: str


class StarGraph(BaseModel):
    """The task.

    Splits: by a hash of the sorted edges and the goal, so that a held-out problem never occurs in training or in a
    demonstration in any order of its edges, whatever the seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "star_graph"

    degree: int = Field(3, ge=2)
    """Number of arms: with their length the dial. A prompt has degree * length edges; demonstrations follow all."""
    min_path_length: int = Field(6, ge=2)
    """Least number of edges of an arm. All arms of a graph have the same."""
    max_path_length: int = Field(6, ge=2)
    """Largest number of edges of an arm."""
    node_range: int = Field(20, ge=1)
    """Nodes are numbers below this one. The vocabulary has all of them and all pairs, so it grows with the square."""
    mistake_rate: float = Field(0.0, ge=0, lt=1)
    """Share of wrong steps in the demonstrations: to another arm, which is then followed to its end."""

    @model_validator(mode="after")
    def _ranges(self) -> StarGraph:
        if self.min_path_length > self.max_path_length:
            raise KvrlError(
                f"task.params.min_path_length: {self.min_path_length} is above max_path_length "
                f"({self.max_path_length}); lower it or raise max_path_length"
            )
        least = self.degree * self.max_path_length + 2
        if self.node_range < least:
            raise KvrlError(
                f"task.params.node_range: {self.node_range} is below the {least} that {self.degree} arms of "
                f"{self.max_path_length} edges need; raise it to at least {least}"
            )
        library(self.name)
        return self

    @property
    def vocab(self) -> list[str]:
        """Every symbol that the task's texts use, one token each."""
        nodes = range(self.node_range)
        return [*map(str, nodes), *(f"{a}>{b}" for a in nodes for b in nodes if a != b), *"/xy="]

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows with columns prompt and answer, the path's nodes; those of the eval split are distinct."""
        graphs = take(split, n, self._draws(stream(split, seed)), _key)
        return [{"prompt": _prompt(graph), "answer": graph.path} for graph in graphs]

    def reward(self, completions: list[str], answer: list[str], **_: list) -> list[float | None]:
        """The library's score of the path after the last `=`: 1 if it is right from end to end, else 0."""
        paths = [text.removesuffix("<eos>").rpartition("=") for text in completions]
        return [
            self._scorer(path if mark else None, {"answer": right})
            for (_, mark, path), right in zip(paths, answer, strict=True)
        ]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` train problems with every arm followed, with `mistake_rate` wrong steps."""
        rng = random.Random(f"{seed}-demonstrations")
        graphs = take("train", n, self._draws(stream("demonstrations", seed)), _key)
        return [(_prompt(graph), self._worked(graph, rng)) for graph in graphs]

    @cached_property
    def _scorer(self) -> Callable[[str | None, dict], float]:
        return library(self.name).create_dataset("path_star", seed=0, size=1).score_answer

    def _draws(self, seed: int) -> Iterator[Graph]:
        given = self.model_dump(exclude={"mistake_rate"})
        dataset = library(self.name).create_dataset("path_star", seed=seed, size=1, **given)
        for index in count():  # an item is made when it is asked for, whatever the size
            entry = dataset[index]
            edges, _ = entry["question"].splitlines()[-1].split("/")
            yield Graph(
                [(int(a), int(b)) for a, b in map(str.split, edges.split("|")[1:])],
                entry["metadata"]["center"],
                entry["metadata"]["goal"],
                entry["answer"],
            )

    def _worked(self, graph: Graph, rng: random.Random) -> str:
        arms = arms_of(graph)
        rng.shuffle(arms)
        text = []
        right = None
        for arm in arms:
            path = [graph.centre]
            for depth in range(len(arm)):
                if depth and rng.random() < self.mistake_rate:
                    arm = rng.choice([other for other in arms if other is not arm])
                path.append(arm[depth])
            text += [f"{a} {a}>{b}" for a, b in pairwise(path)]
            text.append(f"{path[-1]} {'y' if path[-1] == graph.goal else 'x'}")
            if path[-1] == graph.goal:
                right = path
        return " ".join([*text, "=", *map(str, right or path)])


def arms_of(graph: Graph) -> list[list[int]]:
    """The nodes of each arm from the centre's neighbour on, in the order of these neighbours' edges."""
    after = {a: b for a, b in graph.edges if a != graph.centre}
    arms = []
    for a, b in graph.edges:
        if a == graph.centre:
            arm = [b]
            while arm[-1] in after:
                arm.append(after[arm[-1]])
            arms.append(arm)
    return arms


def _key(graph: Graph) -> str:
    return f"{graph.goal} {sorted(graph.edges)}"


def _prompt(graph: Graph) -> str:
    return " ".join(["<bos>", *(f"{a}>{b}" for a, b in graph.edges), f"/ {graph.centre} {graph.goal}"])
