"""GSM8K: grade-school word problems (arXiv 2110.14168), scored by math-verify.

question     the problem
answer       worked steps with calculator marks `<<48/2=24>>`, then `#### 24`
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from kvrl.errors import KvrlError
from kvrl.tasks import Prompt
from kvrl.tasks.answers import after_hashes
from kvrl.tasks.files import Hub, draw, require_text
from kvrl.tasks.math import BOXED, MathProblems


class Gsm8k(MathProblems):
    """The task."""

    name: ClassVar[str] = "gsm8k"
    hub: ClassVar[Hub | None] = Hub("openai/gsm8k", "main", "train", "test")
    needs: ClassVar[tuple[str, ...]] = ("question", "answer")

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """prompt, answer (the number after `####`) and solution (the steps before it)."""
        question, worked = require_text(record, ("question", "answer"), where)
        answer = after_hashes(worked)
        if answer is None:
            raise KvrlError(f"{where}: answer has no `#### value` at its end; add it, or use task math")
        steps = re.sub(r"<<[^<>]*>>", "", worked.rpartition("####")[0]).strip()
        return {"prompt": self.prompt(question=question), "answer": answer, "solution": steps}

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` train problems with their steps, without calculator marks, and the boxed answer."""
        return [
            (row["prompt"], f"{row['solution']}\n{BOXED.format(row['answer'])}")
            for row in draw(self.train_rows, n, seed)
        ]
