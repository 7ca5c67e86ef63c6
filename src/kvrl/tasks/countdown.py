"""Countdown: find an expression of all the numbers that comes to the target, by a search written out in full.

    prompt       <bos> 14 : 3 9 5 7
    completion   14 - 7 = 7 7 - 5 = 2 3 + 9 = 12 x 9 - 3 = 6 x 7 + 5 = 12 3 + 9 = 12 y > 7 + ( - 5 + ( 3 + 9 ) )

The last number is taken off the target in each way there is (`14 - 7` for 7 + X, later `14 + 7` for X - 7), the one
before it off what is left, and so on down to two numbers, which are put together in each way: y if that gives what is
left, else x. After a pair's last x the search goes back to the newest choice that has another way (here from 7 again,
`7 + 5`), whose value it must have kept. After y comes `>` and the answer, from the first choice on.

Problems and scorer are those of reasoning-gym's `countdown`: 1 for a right expression, 0.05 for a wrong one, 0.01
for none. Its own wording is in task reasoning_gym.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks.reasoning_gym import library
from kvrl.tasks.splits import stream, take

ATTEMPTS = 100  # the library's, before it gives a seed up


class Problem(NamedTuple):
    """The numbers in the order of the prompt, and what an expression of all of them must come to."""

    numbers: list[int]
    target: int


class Countdown(BaseModel):
    """The task.

    Splits: by a hash of the target and the sorted numbers, so that held-out ones never occur in training or in a
    demonstration in any order, whatever the seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "countdown"

    min_numbers: int = Field(5, ge=2)
    """Least count of numbers."""
    max_numbers: int = Field(5, ge=2)
    """Largest count of numbers: the dial. Each number more doubles the search, or more than that with `*` and `/`."""
    min_value: int = Field(1, ge=1)
    """Least number."""
    max_value: int = Field(9, ge=1)
    """Largest number."""
    min_target: int = Field(1, ge=1)
    """Least target."""
    max_target: int = Field(20, ge=1)
    """Largest target."""
    operators: Literal["+-", "+-*", "+-*/"] = "+-"
    """What problems are made of and searches try."""
    shuffle: bool = True
    """Whether the numbers' order hides the expression's. A search takes them as they come, which finds every solution
    of + and -. With `*` and `/` set it to false: otherwise demonstrations have only what that order solves."""
    max_tries: int = Field(32, ge=1)
    """Most pairs that a demonstration tries; problems whose search is longer have none."""

    @model_validator(mode="after")
    def _ranges(self) -> Countdown:
        for name in ("numbers", "value", "target"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                raise KvrlError(
                    f"task.params.min_{name}: {low} is above max_{name} ({high}); lower it or raise max_{name}"
                )
        if all(self._draw(random.Random(seed)) is None for seed in range(20)):
            raise KvrlError(
                f"task.params.max_target: 2000 draws of {self.min_numbers} to {self.max_numbers} numbers gave no "
                f"target from {self.min_target} to {self.max_target}; widen the targets or the numbers"
            )
        library(self.name)
        return self

    @property
    def largest(self) -> int:
        """The largest number that a demonstration may write; with + and - no search exceeds it."""
        return max(self.max_target + (self.max_numbers - 2) * self.max_value, 2 * self.max_value)

    @property
    def vocab(self) -> list[str]:
        """Every symbol that the task's texts use, one token each."""
        return [*(str(number) for number in range(self.largest + 1)), *self.operators, *"=:xy>()"]

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows with columns prompt, numbers and target; those of the eval split are distinct."""
        problems = take(split, n, self._draws(stream(split, seed)), _key)
        return [{"prompt": _prompt(problem), **problem._asdict()} for problem in problems]

    def reward(
        self, completions: list[str], numbers: list[list[int]], target: list[int], **_: list
    ) -> list[float | None]:
        """The library's score of the expression after the last `>` (of no answer where that has other symbols)."""
        records = [{"metadata": Problem(*pair)._asdict()} for pair in zip(numbers, target, strict=True)]
        answers = [self._answer(text) for text in completions]
        return [self._scorer(answer, record) for answer, record in zip(answers, records, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` train problems with their searches."""
        draws = self._draws(stream("demonstrations", seed))
        pairs: list[tuple[str, str]] = []
        while len(pairs) < n:
            for problem in take("train", n - len(pairs), draws, _key):
                worked = Search(self).run(problem)
                if worked is not None:
                    pairs.append((_prompt(problem), worked))
        return pairs

    @cached_property
    def _scorer(self) -> Callable[[str | None, dict], float]:
        return library(self.name).create_dataset("countdown", seed=0, size=1).score_answer

    def _answer(self, completion: str) -> str | None:
        # The library's scorer evaluates the text as Python: it must not meet anything but the task's symbols.
        _, mark, answer = completion.removesuffix("<eos>").rpartition(">")
        return answer if mark and set(answer.split()) <= set(self.vocab) else None

    def _draws(self, seed: int) -> Iterator[Problem]:
        while True:
            problem = self._draw(random.Random(seed))
            if problem is not None:
                yield problem
            seed += 1

    def _draw(self, rng: random.Random) -> Problem | None:
        # The library's own problem of that random stream (a test compares them). It builds each through sympy, at
        # about 10 ms: as long as the model's work on it.
        count = rng.randint(self.min_numbers, self.max_numbers)
        for _ in range(ATTEMPTS):
            numbers = [rng.randint(self.min_value, self.max_value) for _ in range(count)]
            total = numbers[0]
            for i in range(1, count):
                operator = rng.choice(self.operators)
                if operator == "/":
                    remaining = numbers[i:]
                    rng.shuffle(remaining)
                    divisor = next((number for number in remaining if total % number == 0), None)
                    operator = "-" if divisor is None else "/"
                    numbers[i] = divisor or numbers[i]
                total = _apply(operator, total, numbers[i])
            if self.min_target <= total <= self.max_target:
                if self.shuffle:
                    rng.shuffle(numbers)
                return Problem(numbers, total)
        return None


class Search:
    """One search, depth first, and its text."""

    def __init__(self, task: Countdown) -> None:
        self.task = task
        self.text: list[str] = []
        self.tries = 0

    def run(self, problem: Problem) -> str | None:
        """The worked text with the answer; None if none is found within `max_tries`."""
        answer = self._reach(problem.target, problem.numbers)
        if answer is None or self.tries > self.task.max_tries:
            return None
        return " ".join([*self.text, ">", answer])

    def _reach(self, goal: int, numbers: list[int]) -> str | None:
        *rest, last = numbers
        if len(rest) == 1:
            return self._try(goal, rest[0], last)
        for a, operator, b, outer in _ways(goal, last, self.task.operators):
            left = self._result(a, operator, b)
            if left is None:
                continue
            self.text.append(f"{a} {operator} {b} = {left}")
            inner = self._reach(left, rest)
            if inner is not None:
                return outer.format(inner)
        return None

    def _try(self, goal: int, first: int, second: int) -> str | None:
        self.tries += 1
        high, low = max(first, second), min(first, second)
        for operator in self.task.operators:
            a, b = (high, low) if operator in "-/" else (first, second)
            result = None if operator == "/" and a % b else self._result(a, operator, b)
            if result is None:
                continue
            self.text.append(f"{a} {operator} {b} = {result} {'y' if result == goal else 'x'}")
            if result == goal:
                return f"{a} {operator} {b}"
        return None

    def _result(self, a: int, operator: str, b: int) -> int | None:
        """a operator b; None beyond the numbers that have a symbol."""
        result = _apply(operator, a, b)
        return result if result <= self.task.largest else None


def _ways(goal: int, number: int, operators: str) -> Iterator[tuple[int, str, int, str]]:
    """How `number` may stand outermost in an expression of `goal`, each value of the rest X once: a, operator, b, which
    give X (never below 0: its sign is turned instead), and the expression, with a place for X."""
    for operator in operators:
        if operator == "+" and goal >= number:
            yield goal, "-", number, f"{number} + ( {{}} )"
        elif operator == "-":
            yield goal, "+", number, f"- {number} + ( {{}} )"
            if number > goal > 0:
                yield number, "-", goal, f"{number} - ( {{}} )"
        elif operator == "*" and goal % number == 0:
            yield goal, "/", number, f"{number} * ( {{}} )"
        elif operator == "/" and goal:
            yield goal, "*", number, f"( {{}} ) / {number}"
            if number > goal and number % goal == 0:
                yield number, "/", goal, f"{number} / ( {{}} )"


def _apply(operator: str, a: int, b: int) -> int:
    if operator == "/":
        return a // b  # exact: every caller has made sure
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def _key(problem: Problem) -> str:
    return f"{problem.target} {sorted(problem.numbers)}"


def _prompt(problem: Problem) -> str:
    return f"<bos> {problem.target} : {' '.join(map(str, problem.numbers))}"
