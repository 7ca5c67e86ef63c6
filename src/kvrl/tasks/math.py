r"""Mathematics with a right answer in LaTeX: MATH (arXiv 2103.03874) and sets of its style, scored by math-verify.

problem      the problem
answer       the right answer: LaTeX, a number, or a list of them; without it the last \boxed{} of `solution`
level        1 to 5, or `Level 3`
"""

from __future__ import annotations

import functools
import re
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from kvrl.errors import KvrlError
from kvrl.rewards.math_answer import MathVerify
from kvrl.tasks import Prompt
from kvrl.tasks.answers import last_boxed, to_latex
from kvrl.tasks.files import Hub, TemplatedTask, draw, require_text

BOXED = "\\boxed{{{}}}"


class MathProblems(TemplatedTask):
    r"""What tasks of mathematics share: the usual instruction, which asks for \boxed{}, and the scorer."""

    template: str = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    """The user's message; {question} stands for the problem."""

    def reward(self, completions: list[str], answer: list[str], **_: list) -> list[float | None]:
        """1 for a completion whose answer equals the right one in value, by math-verify, else 0."""
        return math_scorer()(completions, answer=answer)


class Math(MathProblems):
    """The task."""

    name: ClassVar[str] = "math"
    hub: ClassVar[Hub | None] = Hub("nlile/hendrycks-MATH-benchmark", None, "train", "test")
    needs: ClassVar[tuple[str, ...]] = ("problem",)
    takes: ClassVar[tuple[str, ...] | None] = ("answer", "solution", "level")

    levels: list[int] | None = Field(None, min_length=1)
    """Levels of difficulty that are kept, e.g. [3, 4, 5]. None: all, and no `level` is needed."""
    on_missing_answer: Literal["stop", "drop"] = "stop"
    """A row without a right answer is an error, or left out."""

    @property
    def required(self) -> tuple[str, ...]:
        return self.needs if self.levels is None else (*self.needs, "level")

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any] | None:
        """prompt, answer (LaTeX) and solution (None where there is none). None for another level."""
        if self.levels is not None and _level(record["level"]) not in self.levels:
            return None
        if "answer" not in record and "solution" not in record:
            raise KvrlError(
                f"{where}: there is neither a column answer nor solution; say which one is in task.params.columns"
            )
        (question,) = require_text(record, ("problem",), where)
        solution = record.get("solution") if isinstance(record.get("solution"), str) else None
        answer = to_latex(record.get("answer"), f"{where}: answer")
        if answer is None and solution is not None:
            answer = to_latex(last_boxed(solution))
        if answer is None:
            if self.on_missing_answer == "drop":
                return None
            raise KvrlError(
                f"{where}: no answer, and no \\boxed{{}} in a solution; add one, or set "
                "task.params.on_missing_answer to drop"
            )
        return {"prompt": self.prompt(question=question), "answer": answer, "solution": solution}

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` train problems with their solutions. Errors: KvrlError where a solution does not box its answer."""
        rows = [row for row in self.train_rows if row["solution"] is not None and last_boxed(row["solution"])]
        if not rows:
            raise KvrlError("warm_start: no solution in the data has a \\boxed{} answer; leave warm_start out")
        return [(row["prompt"], row["solution"]) for row in draw(rows, n, seed)]


@functools.cache
def math_scorer() -> MathVerify:
    """math-verify, whose process all tasks of mathematics share. Errors: KvrlError if it is not installed."""
    scorer = MathVerify()
    scorer.prepare(torch.device("cpu"))
    return scorer


def _level(value: Any) -> int | None:
    """3 of `3` and of `Level 3`; None of `Level ?`."""
    found = re.search(r"\d+", str(value))
    return int(found[0]) if found else None
