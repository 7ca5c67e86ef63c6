"""The prompts of a run in a fixed order that a position alone describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import check_budget, make_policy
from kvrl.errors import KvrlError
from kvrl.tasks import Task, encode_prompt
from kvrl.train.config import RolloutSettings

OnRefusal = Literal["stop", "drop"]

PATIENCE = 1000  # prompts from the first on that are all refused before it is said that none fits


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt may be: its protected entries within the budget of every cache, its tokens within max_length."""

    caches: Sequence[CacheConfig]
    max_length: int | None = None
    on_small_budget: OnRefusal = "stop"
    on_long_prompt: OnRefusal = "stop"

    @classmethod
    def of(cls, settings: RolloutSettings, *caches: CacheConfig) -> PromptLimits:
        """The limits of a configuration under these caches."""
        return cls(caches, settings.max_prompt_length, settings.on_small_budget, settings.on_long_prompt)

    def refusal(self, length: int) -> tuple[KvrlError, OnRefusal] | None:
        """Why a prompt of `length` tokens is refused, and what is then done; None if it is not."""
        if self.max_length is not None and length > self.max_length:
            remedy = "raise it" + (", or set rollout.on_long_prompt to drop" if self.on_long_prompt == "stop" else "")
            return KvrlError(
                f"rollout.max_prompt_length: {self.max_length} is below the prompt's {length} tokens; {remedy}"
            ), self.on_long_prompt
        for cache in self.caches:
            policy = make_policy(cache)
            try:
                if policy is not None:
                    check_budget(cache, policy, length)
            except KvrlError as error:
                return error, self.on_small_budget
        return None


@dataclass(frozen=True)
class PromptRow:
    """One prompt: its ids, the row with the reward's columns, and its number in the run (its random stream)."""

    ids: list[int]
    row: dict[str, Any]
    number: int


class PromptStream:
    """Rows of the task's train split, block after block; `position` is all that a resumed run needs.

    A block is as many rows as are asked of the task at once; file tasks shuffle each anew.
    A prompt over one of the limits stops the run or is dropped and counted, as the limits say.
    """

    def __init__(self, task: Task, tokenizer: Any, *, seed: int, block: int, limits: PromptLimits) -> None:
        self.task, self.tokenizer, self.seed, self.block, self.limits = task, tokenizer, seed, block, limits
        self.position = 0
        self.dropped = 0
        self._rows: tuple[int, list[dict[str, Any]]] = (-1, [])

    def take(self, count: int) -> list[PromptRow]:
        """The next `count` prompts. KvrlError for a prompt over a limit, or if the first `PATIENCE` all are dropped."""
        taken: list[PromptRow] = []
        while len(taken) < count:
            number = self.position
            row = self._row(number)
            try:
                ids = encode_prompt(self.tokenizer, row["prompt"])
            except KvrlError as error:
                raise KvrlError(f"prompt {number}: {error}") from None
            self.position += 1
            if (refusal := self.limits.refusal(len(ids))) is not None:
                if refusal[1] == "stop":
                    raise KvrlError(f"prompt {number}: {refusal[0]}")
                self.dropped += 1
                if self.dropped == self.position >= PATIENCE:
                    raise KvrlError(f"prompt {number}: it and all {number} before it are over the limits: {refusal[0]}")
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
