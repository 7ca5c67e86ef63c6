"""Systems of 2 to 4 linear equations with whole solutions, solved by elimination and substitution.

    prompt       <bos> 1 1 = 3 ; -1 1 = -1
    completion   #2 + 1 * #1 : 1 + 1 * 1 = 2 -1 + 1 * 3 = 2 #2 : 2 / 2 = 1 #1 : 3 - 1 * 1 = 2 2 / 1 = 2 > 2 1

The prompt has an equation's coefficients and right side in a row: x + y = 3, -x + y = -1. `#2 + 1 * #1 :` adds the
first row to the second and works out what is left of that, entry by entry and the right side last; then `#2 :` and
`#1 :` solve the rows from the last one up, and the answer stands after `>`. A row is used by all rows below it and
once more at the end, so its entries are needed long after they were written. All arithmetic is in whole numbers:
systems are made so that no step of it leaves a fraction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks.splits import stream, take


class System(NamedTuple):
    """Rows of coefficients with the right side at the end, [U, U + 1], and the unknowns' values [U]."""

    rows: list[list[int]]
    solution: list[int]


class LinSys(BaseModel):
    """The task.

    Splits: by a hash of the sorted equations, so that a held-out system never occurs in training or in a
    demonstration in any order of its equations, whatever the seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "linsys"

    min_unknowns: int = Field(3, ge=2, le=4)
    """Least number of unknowns, and of equations."""
    max_unknowns: int = Field(3, ge=2, le=4)
    """Largest number of unknowns: the dial. Solving takes about 40, 115 and 240 tokens for 2, 3 and 4 of them."""
    max_coefficient: int = Field(1, ge=1)
    """Largest coefficient, by size, of the triangular system that a problem is mixed from."""
    max_factor: int = Field(1, ge=1)
    """Largest multiple, by size, of one row that is mixed into another, and so of those in the elimination."""
    max_solution: int = Field(3, ge=1)
    """Largest value of an unknown, by size."""
    max_number: int = Field(20, ge=1)
    """Largest number, by size, in a problem and its solution: systems with a larger one are drawn again."""
    mistake_rate: float = Field(0.0, ge=0, lt=1)
    """Share of wrong results, off by one, in the demonstrations' sums of right sides. A wrong result goes on into later
    steps, and a division that has a remainder then is rounded down."""

    @model_validator(mode="after")
    def _ranges(self) -> LinSys:
        if self.min_unknowns > self.max_unknowns:
            raise KvrlError(
                f"task.params.min_unknowns: {self.min_unknowns} is above max_unknowns ({self.max_unknowns}); lower it "
                "or raise max_unknowns"
            )
        if self.max_factor > self.max_number or all(self._draw(random.Random(seed)) is None for seed in range(200)):
            raise KvrlError(
                f"task.params.max_number: {self.max_number} is below a number of each of 200 systems drawn; raise it, "
                "or lower max_coefficient, max_factor or max_solution"
            )
        return self

    @property
    def vocab(self) -> list[str]:
        """Every symbol that the task's texts use, one token each."""
        numbers = [str(number) for number in range(-self.max_number, self.max_number + 1)]
        return [*numbers, *(f"#{row}" for row in range(1, self.max_unknowns + 1)), *"+-*/=;:>"]

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows with columns prompt and answer, the values in order; those of the eval split are distinct."""
        systems = take(split, n, self._draws(stream(split, seed)), _key)
        return [{"prompt": _prompt(system), "answer": system.solution} for system in systems]

    def reward(self, completions: list[str], answer: list[list[int]], **_: list) -> list[float | None]:
        """1 where the values after the last `>` are the solution, else 0."""
        return [float(_answer(text) == list(map(str, right))) for text, right in zip(completions, answer, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` train systems solved step by step, with `mistake_rate` wrong results."""
        rng = random.Random(f"{seed}-demonstrations")

        def slip(result: int) -> int:
            if rng.random() < self.mistake_rate:
                result += rng.choice([-1, 1])
            return max(-self.max_number, min(self.max_number, result))

        systems = take("train", n, self._draws(stream("demonstrations", seed)), _key)
        return [(_prompt(system), solve(system.rows, slip)) for system in systems]

    def _draws(self, seed: int) -> Iterator[System]:
        rng = random.Random(seed)
        while True:
            system = self._draw(rng)
            if system is not None:
                yield system

    def _draw(self, rng: random.Random) -> System | None:
        """A triangular system, mixed downwards by whole multiples; None if it has or leads to too large a number."""
        count = rng.randint(self.min_unknowns, self.max_unknowns)
        coefficients = range(-self.max_coefficient, self.max_coefficient + 1)
        pivots = [number for number in coefficients if number]
        factors = [number for number in range(-self.max_factor, self.max_factor + 1) if number]
        solution = [rng.randint(-self.max_solution, self.max_solution) for _ in range(count)]
        triangle = []
        for i in range(count):
            row = [0] * i + [rng.choice(pivots)] + rng.choices(coefficients, k=count - i - 1)
            sums = list(accumulate(a * x for a, x in zip(row, solution, strict=True)))  # what substitution leaves
            triangle.append([*row, sums[-1]])
            if max(map(abs, [*row, *sums])) > self.max_number:
                return None
        rows = []
        for i, row in enumerate(triangle):
            for above in reversed(triangle[:i]):  # against the order of the elimination, which meets each sum again
                factor = rng.choice(factors)
                row = [entry + factor * other for entry, other in zip(row, above, strict=True)]
                if max(map(abs, row)) > self.max_number:
                    return None
            rows.append(row)
        return System(rows, solution)


def solve(rows: list[list[int]], slip: Callable[[int], int] = int) -> str:
    """The worked text of a system whose elimination, top down without exchanges, has whole factors.

    slip: from the right value of each right side's sum to the one written, and used in later steps.
    """
    rows = [list(row) for row in rows]
    count = len(rows)
    text: list[str] = []

    def add(a: int, factor: int, b: int, written: Callable[[int], int]) -> int:
        result = written(a + factor * b)
        text.append(f"{a} {_sign(factor)} {abs(factor)} * {b} = {result}")
        return result

    for k in range(count):
        for i in range(k + 1, count):
            factor = -rows[i][k] // rows[k][k]
            text.append(f"#{i + 1} {_sign(factor)} {abs(factor)} * #{k + 1} :")
            for j in range(k + 1, count):
                rows[i][j] = add(rows[i][j], factor, rows[k][j], int)
            rows[i][count] = add(rows[i][count], factor, rows[k][count], slip)
    solution = [0] * count
    for i in reversed(range(count)):
        text.append(f"#{i + 1} :")
        left = rows[i][count]
        for j in reversed(range(i + 1, count)):
            left = add(left, -rows[i][j], solution[j], slip)
        solution[i] = left // rows[i][i]
        text.append(f"{left} / {rows[i][i]} = {solution[i]}")
    return " ".join([*text, ">", *map(str, solution)])


def _sign(factor: int) -> str:
    return "+" if factor > 0 else "-"


def _answer(completion: str) -> list[str]:
    _, mark, answer = completion.removesuffix("<eos>").rpartition(">")
    return answer.split() if mark else []


def _key(system: System) -> str:
    return repr(sorted(system.rows))


def _prompt(system: System) -> str:
    equations = [f"{' '.join(map(str, row[:-1]))} = {row[-1]}" for row in system.rows]
    return f"<bos> {' ; '.join(equations)}"
