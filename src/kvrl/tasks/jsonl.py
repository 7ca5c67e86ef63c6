"""A JSON-lines or parquet file, or a data set of the hub, scored by exact match with its `answer` column."""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from kvrl.errors import KvrlError
from kvrl.rewards.call import RESERVED
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
    from datasets.exceptions import DatasetsError

    file = Path(path)
    if file.is_file() and file.stat().st_size == 0:
        raise KvrlError(f"{field}: {path} is empty; write one JSON object with prompt and answer a line")
    try:
        if file.suffix in (".json", ".jsonl", ".parquet"):
            kind = "parquet" if path.endswith(".parquet") else "json"
            data = load_dataset(kind, data_files=path, split="train")
        else:
            data = load_dataset(path, split="train")
    except (OSError, ValueError, ConnectionError, DatasetsError) as error:
        if file.suffix == ".jsonl" and file.is_file():
            _check_lines(file, field)
        reason = " ".join(str(error.__cause__ or error).split())
        raise KvrlError(f"{field}: {path} cannot be loaded ({reason}); give a .jsonl file or a hub name") from None
    for column in ("prompt", "answer"):
        if column not in data.column_names:
            has = ", ".join(data.column_names)
            raise KvrlError(f"{field}: {path} has no column {column} (it has {has}); add or rename it")
    for column in RESERVED:
        if column in data.column_names:
            raise KvrlError(
                f"{field}: {path} has a column {column}, a name that reward functions get from the sampler; rename it"
            )
    rows = data.to_list()
    if not rows:
        raise KvrlError(f"{field}: {path} has no rows; add some")
    for number, row in enumerate(rows, start=1):
        _check_row(row, f"{field}: {path}, row {number}")
    return rows


def _check_lines(file: Path, field: str) -> None:
    """Raise KvrlError for the first line that is no JSON object."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            wrong = bool(line.strip()) and not isinstance(json.loads(line), dict)
        except json.JSONDecodeError:
            wrong = True
        if wrong:
            raise KvrlError(
                f"{field}: {file}, line {number} is {line[:40]!r}, which is no JSON object; "
                "write one object with prompt and answer a line"
            )


def _check_row(row: dict[str, Any], where: str) -> None:
    """Raise KvrlError for a prompt that is neither text nor chat messages, and for an answer that is missing."""
    prompt = row["prompt"]
    chat = isinstance(prompt, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )
    if not prompt or not (chat or isinstance(prompt, str)):
        raise KvrlError(
            f"{where}: prompt is {prompt!r}; give text that is not empty, or a list of messages with role and content"
        )
    if row["answer"] is None:
        raise KvrlError(f"{where}: answer is null; give the text that a right completion equals")
