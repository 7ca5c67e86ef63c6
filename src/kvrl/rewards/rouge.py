"""ROUGE-L, the longest common subsequence of words, for summaries (rouge-score)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import PrivateAttr

from kvrl.rewards.base import Reward, require
from kvrl.rewards.match import golds_of, unreadable


class RougeL(Reward):
    """F-measure of ROUGE-L (Lin, 2004) between completion and reference, 0 to 1; of several references the best."""

    name: ClassVar[str] = "rouge_l"

    column: str = "summary"
    """Column of the reference: a text, or a list of texts."""
    stemmer: bool = True
    """Compare words by their Porter stems."""

    _scorer: Any = PrivateAttr(None)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def prepare(self, device: torch.device) -> None:
        module = require("rouge_score.rouge_scorer", "rewards", self.name)
        self._scorer = module.RougeScorer(["rougeL"], use_stemmer=self.stemmer)

    def __call__(self, completions: list[str], **columns: list) -> list:
        return [
            max((self._scorer.score(one, text)["rougeL"].fmeasure for one in golds_of(gold)), default=unreadable(gold))
            for gold, text in zip(columns[self.column], completions, strict=True)
        ]
