"""The prompts of a run in a fixed order that a position alone describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import check_budget, make_policy
from kvrl.errors import KvrlError
from kvrl.tasks import Task, encode_prompt


@dataclass(frozen=True)
class PromptRow:
    """One prompt: its ids, the row with the reward's columns, and its number in the run (its random stream)."""

    ids: list[int]
    row: dict[str, Any]
    number: int


class PromptStream:
    """Rows of the task's train split, block after block; `position` is all that a resumed run needs.

    cache: where a prompt's protected entries exceed the budget, the prompt stops the run or is dropped and
    counted, as on_small_budget says.
    """

    def __init__(
        self, task: Task, tokenizer: Any, *, seed: int, block: int, cache: CacheConfig, on_small_budget: str
    ) -> None:
        self.task, self.tokenizer, self.seed, self.block = task, tokenizer, seed, block
        self.cache, self.policy, self.drop = cache, make_policy(cache), on_small_budget == "drop"
        self.position = 0
        self.dropped = 0
        self._rows: tuple[int, list[dict[str, Any]]] = (-1, [])

    def take(self, count: int) -> list[PromptRow]:
        """The next `count` prompts. KvrlError for a prompt over the budget (or if a whole block is)."""
        taken: list[PromptRow] = []
        refused = 0
        while len(taken) < count:
            number = self.position
            row = self._row(number)
            try:
                ids = encode_prompt(self.tokenizer, row["prompt"])
            except KvrlError as error:
                raise KvrlError(f"prompt {number}: {error}") from None
            self.position += 1
            try:
                if self.policy is not None:
                    check_budget(self.cache, self.policy, len(ids))
            except KvrlError as error:
                refused += 1
                if not self.drop or refused >= self.block:
                    raise KvrlError(f"prompt {number}: {error}") from None
                self.dropped += 1
                continue
            taken.append(PromptRow(ids, row, number))
        return taken

    def _row(self, number: int) -> dict[str, Any]:
        block, index = divmod(number, self.block)
        if self._rows[0] != block:
            self._rows = (block, self.task.rows("train", self.block, self.seed + block))
        return self._rows[1][index]


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list]:
    """Rows as columns, for the reward."""
    return {name: [row[name] for row in rows] for name in rows[0]}
