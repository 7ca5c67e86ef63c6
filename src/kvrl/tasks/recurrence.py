"""Lagged recurrence: x_t = (x_(t-2) + x_(t-1)) mod 10, worked out one line a step.

    prompt       <bos> #20 3 7
    completion   #3 3 + 7 = 0 #4 7 + 0 = 7 ... #20 a + b = c

`#N` says how far to go, `#t a + b = c` is one step, and the reward is 1 if the last value is right. A step
needs the two before it alone, so a small cache would do, if the policy kept the right entries. A completion
has 96 to 120 tokens and EOS for N in 18..22.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError

BOS = "<bos>"
STEP_TOKENS = 6  # `#t a + b = c`

# 256 of the 500 problems that N in 18..22 and two digits give
HELD_OUT_SHARE = 256 / 500

Problem = tuple[int, int, int]  # N, x1, x2


class Recurrence(BaseModel):
    """The task.

    Splits: there are few problems (100 for each N), so the train and eval splits part them by a hash of the
    problem: the held-out ones never occur in training, whatever the seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "recurrence"

    min_n: int = Field(18, ge=3)
    """Least N, the index of the last value."""
    max_n: int = Field(22, ge=3)
    """Largest N."""
    mistake_rate: float = Field(0.015, ge=0, lt=1)
    """Share of wrong digits in the demonstrations. A wrong digit goes on into the steps after it."""

    @model_validator(mode="after")
    def _range_of_n(self) -> Recurrence:
        if self.min_n > self.max_n:
            raise KvrlError(
                f"task.params.min_n: {self.min_n} is above max_n ({self.max_n}); lower it or raise max_n"
            )
        return self

    @property
    def vocab(self) -> list[str]:
        """Every symbol that the task's texts use, one token each."""
        return [*"0123456789", "+", "=", *(f"#{t}" for t in range(3, self.max_n + 1))]

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows with columns prompt, n and answer. The train split goes round in a new order each time."""
        problems = self._problems(split)
        if split == "eval" and n > len(problems):
            raise KvrlError(f"eval.n: {n} is above the {len(problems)} held-out problems; lower it")
        rng = random.Random(f"{seed}-{split}")
        chosen: list[Problem] = []
        while len(chosen) < n:
            chosen += rng.sample(problems, len(problems))
        return [
            {"prompt": _prompt(problem), "n": problem[0], "answer": values(problem)[-1]}
            for problem in chosen[:n]
        ]

    def reward(
        self, completions: list[str], n: list[int], answer: list[int], **_: list
    ) -> list[float | None]:
        """1 for a completion that ends with step `#N ... = answer`, else 0."""
        return [
            float(_ends_with(text, last, right))
            for text, last, right in zip(completions, n, answer, strict=True)
        ]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` worked train problems, drawn with replacement, with `mistake_rate` wrong digits."""
        problems = self._problems("train")
        rng = random.Random(f"{seed}-demonstrations")
        drawn = [rng.choice(problems) for _ in range(n)]
        return [(_prompt(problem), self._worked(problem, rng)) for problem in drawn]

    def _problems(self, split: str) -> list[Problem]:
        every = [(n, a, b) for n in range(self.min_n, self.max_n + 1) for a in range(10) for b in range(10)]
        every.sort(key=lambda problem: hashlib.sha256(repr(problem).encode()).digest())
        held_out = round(len(every) * HELD_OUT_SHARE)
        if split not in ("train", "eval"):
            raise KvrlError(f"split: {split} is neither train nor eval; use one of them")
        return every[:held_out] if split == "eval" else every[held_out:]

    def _worked(self, problem: Problem, rng: random.Random) -> str:
        last, a, b = problem
        steps = []
        for t in range(3, last + 1):
            c = (a + b) % 10
            if rng.random() < self.mistake_rate:
                c = (c + rng.randrange(1, 10)) % 10
            steps.append(f"#{t} {a} + {b} = {c}")
            a, b = b, c
        return " ".join(steps)


def values(problem: Problem) -> list[int]:
    """x_1 ... x_N."""
    last, *x = problem
    while len(x) < last:
        x.append((x[-2] + x[-1]) % 10)
    return x


def _prompt(problem: Problem) -> str:
    last, first, second = problem
    return f"{BOS} #{last} {first} {second}"


def _ends_with(text: str, last: int, right: int) -> bool:
    step = text.removesuffix("<eos>").split()[-STEP_TOKENS:]
    return len(step) == STEP_TOKENS and step[0] == f"#{last}" and step[-2:] == ["=", str(right)]
