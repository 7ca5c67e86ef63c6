"""Lagged recurrence: x_t = (x_(t-2) + x_(t-1)) mod 10, worked out one line a step from any index on.

    prompt       <bos> #20 #2 3 7
    completion   #3 3 + 7 = 0 #4 7 + 0 = 7 ... #20 a + b = c

`#20 #2 3 7` says: x_2 is 7, x_1 is 3, go on to x_20. `#t a + b = c` is one step, and the reward is 1 if the
last value is right. A step needs the one before it and the goal, so a small cache would do, if the policy kept
the right entries. With 16 to 20 steps a completion has 96 to 120 tokens and EOS.

Demonstrations have 1 to `max_steps` steps and start anywhere, for two reasons. From one fixed start there are
500 problems in all, which a tiny model learns by heart, orbit by orbit: it then reads the prompt at every step
and fails under any compression. And a short trace looks as a compressed cache does: a goal and a few recent entries.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks.splits import is_held_out

BOS = "<bos>"
STEP_TOKENS = 6  # `#t a + b = c`


Problem = tuple[int, int, int, int]  # index of the last value, index of the second given value, the two values


class Recurrence(BaseModel):
    """The task.

    Splits: the train and eval splits part the problems by a hash, so the held-out ones never occur in training or
    in a demonstration, whatever the seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "recurrence"

    min_steps: int = Field(16, ge=1)
    """Least number of steps of a problem."""
    max_steps: int = Field(20, ge=1)
    """Largest number of steps of a problem."""
    max_start: int = Field(12, ge=2)
    """Largest index of the second given value; the least is 2."""
    mistake_rate: float = Field(0.015, ge=0, lt=1)
    """Share of wrong digits in the demonstrations. A wrong digit goes on into the steps after it."""

    @model_validator(mode="after")
    def _range_of_steps(self) -> Recurrence:
        if self.min_steps > self.max_steps:
            raise KvrlError(
                f"task.params.min_steps: {self.min_steps} is above max_steps ({self.max_steps}); lower it or "
                "raise max_steps"
            )
        return self

    @property
    def vocab(self) -> list[str]:
        """Every symbol that the task's texts use, one token each."""
        return [*"0123456789", "+", "=", *(f"#{t}" for t in range(2, self.max_start + self.max_steps + 1))]

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows with columns prompt, n (the index of the last value) and answer, in the seed's order.

        The train split goes round in a new order when it is spent.
        """
        if split not in ("train", "eval"):
            raise KvrlError(f"split: {split} is neither train nor eval; use one of them")
        problems = self._problems(self.min_steps, held_out=split == "eval")
        if split == "eval" and n > len(problems):
            raise KvrlError(f"eval.n: {n} is above the {len(problems)} held-out problems; lower it")
        rng = random.Random(f"{seed}-{split}")
        chosen: list[Problem] = []
        while len(chosen) < n:
            chosen += rng.sample(problems, len(problems))
        return [{"prompt": _prompt(problem), "n": problem[0], "answer": values(problem)[-1]} for problem in chosen[:n]]

    def reward(self, completions: list[str], n: list[int], answer: list[int], **_: list) -> list[float | None]:
        """1 for a completion that ends with step `#N ... = answer`, else 0."""
        return [float(_ends_with(text, last, right)) for text, last, right in zip(completions, n, answer, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[str, str]]:
        """`n` worked problems of 1 to max_steps steps, drawn with replacement, with `mistake_rate` wrong digits."""
        problems = self._problems(1, held_out=False)
        rng = random.Random(f"{seed}-demonstrations")
        drawn = [rng.choice(problems) for _ in range(n)]
        return [(_prompt(problem), self._worked(problem, rng)) for problem in drawn]

    def _problems(self, min_steps: int, *, held_out: bool) -> list[Problem]:
        every = [
            (start + steps, start, a, b)
            for start in range(2, self.max_start + 1)
            for steps in range(min_steps, self.max_steps + 1)
            for a in range(10)
            for b in range(10)
        ]
        return [problem for problem in every if is_held_out(repr(problem)) == held_out]

    def _worked(self, problem: Problem, rng: random.Random) -> str:
        last, start, a, b = problem
        steps = []
        for t in range(start + 1, last + 1):
            c = (a + b) % 10
            if rng.random() < self.mistake_rate:
                c = (c + rng.randrange(1, 10)) % 10
            steps.append(f"#{t} {a} + {b} = {c}")
            a, b = b, c
        return " ".join(steps)


def values(problem: Problem) -> list[int]:
    """The two given values and all after them, to the last."""
    last, start, *x = problem
    for _ in range(start, last):
        x.append((x[-2] + x[-1]) % 10)
    return x


def _prompt(problem: Problem) -> str:
    last, start, first, second = problem
    return f"{BOS} #{last} #{start} {first} {second}"


def _ends_with(text: str, last: int, right: int) -> bool:
    step = text.removesuffix("<eos>").split()[-STEP_TOKENS:]
    return len(step) == STEP_TOKENS and step[0] == f"#{last}" and step[-2:] == ["=", str(right)]
