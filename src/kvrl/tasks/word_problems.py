"""Short word problems with a number as the answer, scored by math-verify: MAWPS (NAACL 2016, N16-1136) and SVAMP
(arXiv 2103.07191).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvrl.errors import KvrlError
from kvrl.tasks.answers import to_latex
from kvrl.tasks.files import Hub, require_text
from kvrl.tasks.math import MathProblems


class Mawps(MathProblems):
    """MAWPS: one to three steps. Columns `input` and `target`."""

    name: ClassVar[str] = "mawps"
    needs: ClassVar[tuple[str, ...]] = ("input", "target")

    path: str
    """A local .jsonl, .json or .parquet file, or a hub name."""

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """prompt and answer."""
        (question,) = require_text(record, ("input",), where)
        return {"prompt": self.prompt(question=question), "answer": _right(record["target"], "target", where)}


class Svamp(MathProblems):
    """SVAMP: one step, with numbers that do not matter. Columns `Body`, `Question` and `Answer`."""

    name: ClassVar[str] = "svamp"
    hub: ClassVar[Hub | None] = Hub("ChilleD/SVAMP", None, "train", "test")
    needs: ClassVar[tuple[str, ...]] = ("Body", "Question", "Answer")

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """prompt (body and question) and answer."""
        body, question = require_text(record, ("Body", "Question"), where)
        whole = f"{body if body[-1] in '.?!' else body + '.'} {question}"
        return {"prompt": self.prompt(question=whole), "answer": _right(record["Answer"], "Answer", where)}


def _right(value: Any, column: str, where: str) -> str:
    answer = to_latex(value, f"{where}: {column}")
    if answer is None:
        raise KvrlError(f"{where}: {column} is {value!r}; give the number that is right")
    return answer
