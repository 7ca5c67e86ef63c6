"""A JSON-lines or parquet file, or a data set of the hub, scored by exact match with its `answer` column."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from kvrl.errors import KvrlError
from kvrl.tasks import Prompt


class JsonLines(BaseModel):
    """The task: each row has `prompt` (text, or chat messages) and `answer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "jsonl"

    path: str
    """A local .jsonl or .parquet file, or a hub name (its `train` split)."""
    eval_path: str | None = None
    """The held-out rows. None: the last `eval_share` of the rows of `path`."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """Share of the rows that is held out when there is no `eval_path`."""

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows in the seed's order; the train split goes round in a new order each time."""
        rows = self._splits[split]
        if split == "eval" and n > len(rows):
            raise KvrlError(f"eval.n: {n} is above the {len(rows)} held-out rows; lower it")
        rng = random.Random(f"{seed}-{split}")
        chosen: list[dict[str, Any]] = []
        while len(chosen) < n:
            chosen += rng.sample(rows, len(rows))
        return chosen[:n]

    def reward(self, completions: list[str], answer: list, **_: list) -> list[float | None]:
        """1 for a completion that is the answer, surrounding space aside, else 0."""
        return [float(text.strip() == str(right).strip()) for text, right in zip(completions, answer, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """None: a file has answers, not worked solutions."""
        raise KvrlError("warm_start: task jsonl has no demonstrations; leave warm_start out")

    @cached_property
    def _splits(self) -> dict[str, list[dict[str, Any]]]:
        rows = _load(self.path, "task.params.path")
        if self.eval_path is not None:
            return {"train": rows, "eval": _load(self.eval_path, "task.params.eval_path")}
        held_out = max(1, round(len(rows) * self.eval_share))
        if held_out >= len(rows):
            raise KvrlError(f"task.params.path: {self.path} has {len(rows)} rows, too few for two splits; add rows")
        return {"train": rows[:-held_out], "eval": rows[-held_out:]}


def _load(path: str, field: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        if Path(path).suffix in (".json", ".jsonl", ".parquet"):
            kind = "parquet" if path.endswith(".parquet") else "json"
            data = load_dataset(kind, data_files=path, split="train")
        else:
            data = load_dataset(path, split="train")
    except (OSError, ValueError, ConnectionError) as error:
        raise KvrlError(f"{field}: {path} cannot be loaded ({error}); give a .jsonl file or a hub name") from None
    for column in ("prompt", "answer"):
        if column not in data.column_names:
            has = ", ".join(data.column_names)
            raise KvrlError(f"{field}: {path} has no column {column} (it has {has}); add or rename it")
    return data.to_list()
