"""Summaries scored by ROUGE-L against a reference: Reddit TL;DR (arXiv 2009.01325) and GovReport (arXiv 2104.02112).

TL;DR       `prompt` (the post, ends with `TL;DR:`) and `completion`, about 400 tokens
GovReport   `report` (about 9,000 tokens) and `summary` (about 500)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch

from kvrl.rewards.rouge import RougeL
from kvrl.tasks import Prompt
from kvrl.tasks.files import Hub, TemplatedTask, draw, require_text


class Summaries(TemplatedTask):
    """What both share: a text in the first column, its reference summary in the second."""

    placeholders: ClassVar[tuple[str, ...]] = ("text",)

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """prompt and summary, the reference."""
        text, summary = require_text(record, self.needs, where)
        return {"prompt": self.prompt(text=text), "summary": summary}

    def reward(self, completions: list[str], summary: list[str], **_: list) -> list[float | None]:
        """ROUGE-L (its F-measure) of each completion with the reference summary, 0 to 1."""
        return [*self._scorer(completions, summary=summary)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` train texts with their reference summaries (after a space, where the prompt is plain text)."""
        space = "" if self.chat else " "
        return [(row["prompt"], space + row["summary"]) for row in draw(self.train_rows, n, seed)]

    @cached_property
    def _scorer(self) -> RougeL:
        scorer = RougeL()
        scorer.prepare(torch.device("cpu"))
        return scorer


class Tldr(Summaries):
    """Reddit TL;DR. The prompt is plain text, as the data has it, unless `chat` is set."""

    name: ClassVar[str] = "tldr"
    hub: ClassVar[Hub | None] = Hub("trl-lib/tldr", None, "train", "validation")
    needs: ClassVar[tuple[str, ...]] = ("prompt", "completion")

    template: str = "{text}"
    """The prompt; {text} stands for the post."""
    chat: bool = False
    """Chat messages, through the model's template; false: plain text."""


class GovReport(Summaries):
    """GovReport: long reports of US government offices."""

    name: ClassVar[str] = "govreport"
    hub: ClassVar[Hub | None] = Hub("ccdv/govreport-summarization", "document", "train", "validation")
    needs: ClassVar[tuple[str, ...]] = ("report", "summary")

    template: str = "{text}\n\nSummarise the report above in about 500 words."
    """The user's message; {text} stands for the report."""
