"""A file or a hub data set with a prompt and an answer in each row, scored by exact match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kvrl.errors import KvrlError
from kvrl.rewards.call import RESERVED
from kvrl.tasks.files import FileTask


class JsonLines(FileTask):
    """The task: each row has `prompt` (text, or chat messages) and `answer`; a reward gets its other columns too."""

    name: ClassVar[str] = "jsonl"
    needs: ClassVar[tuple[str, ...]] = ("prompt", "answer")
    takes: ClassVar[tuple[str, ...] | None] = None

    path: str
    """A local .jsonl, .json or .parquet file, or a hub name."""
    answers: bool = True
    """Whether the rows must have an `answer`. If not, the task has no scorer, and `reward.funcs` names what has."""

    @property
    def required(self) -> tuple[str, ...]:
        return self.needs if self.answers else ("prompt",)

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """The record as it is. Errors: KvrlError for a prompt that is none, no answer, and a reserved column."""
        for column in RESERVED:
            if column in record:
                raise KvrlError(
                    f"{where}: has a column {column}, a name that reward functions get from the sampler; rename it"
                )
        prompt = record["prompt"]
        chat = isinstance(prompt, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
        if not prompt or not (chat or isinstance(prompt, str)):
            raise KvrlError(
                f"{where}: prompt is {prompt!r}; give text that is not empty, or a list of messages with role and "
                "content"
            )
        if self.answers and record["answer"] is None:
            raise KvrlError(f"{where}: answer is null; give the text that a right completion equals")
        return record

    @property
    def reward(self) -> Callable[..., list[float | None]] | None:
        """Exact match, where there are answers."""
        return self.match if self.answers else None

    def match(self, completions: list[str], answer: list, **_: list) -> list[float | None]:
        """1 for a completion that is the answer, surrounding space aside, else 0."""
        return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]
