"""What every task made of a file or a hub data set shares: sources, columns, splits and prompts."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks import Prompt
from kvrl.tasks.source import Source, read


@dataclass(frozen=True)
class Hub:
    """The hub data set that a task reads unless it is given a path. eval_split None: eval is a share of `split`."""

    path: str
    subset: str | None = None
    split: str = "train"
    eval_split: str | None = None


class FileTask(BaseModel):
    """A task whose problems are rows. A subclass says which columns it needs and makes its rows of them.

    Splits: no prompt is in both. A held-out share is chosen by a hash of the prompts, so that it depends neither
    on the file's order nor on the seed, and a train row whose prompt is held out is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    hub: ClassVar[Hub | None] = None
    needs: ClassVar[tuple[str, ...]]
    takes: ClassVar[tuple[str, ...] | None] = ()

    path: str | None = None
    """A local .jsonl, .json or .parquet file, or a hub name. None: the task's own hub data set."""
    subset: str | None = None
    """The hub data set's configuration (`name` in `datasets.load_dataset`)."""
    split: str | None = None
    """The hub data set's split that is trained on. None: `train`."""
    eval_path: str | None = None
    """The held-out rows: a file or a hub name. None: those of `eval_split`, or `eval_share` of the train rows."""
    eval_split: str | None = None
    """The split of the held-out rows, of `eval_path` (None: `test`) or of `path`."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """Share of the prompts that is held out when there is neither `eval_path` nor `eval_split`."""
    columns: dict[str, str] = {}
    """The data's own names of the columns, where they differ: {answer: target}. A dot leads into a record."""

    @model_validator(mode="after")
    def _splits_are_of_the_hub(self) -> FileTask:
        for field in ("path", "eval_path"):
            if getattr(self, field) == "":
                raise KvrlError(f"task.params.{field}: is empty; give a .jsonl, .json or .parquet file or a hub name")
        hub_names = [path for path in (self.path, self.eval_path) if path is not None and not Source(path).is_file]
        if self.path is not None and Source(self.path).is_file:
            for field in ("subset", "split"):
                if getattr(self, field) is not None:
                    raise KvrlError(
                        f"task.params.{field}: {getattr(self, field)} is a part of a hub data set, and "
                        f"task.params.path {self.path} is a file; leave it out"
                    )
        if self.eval_split is not None and not hub_names and self.path is not None:
            raise KvrlError(
                f"task.params.eval_split: {self.eval_split} is a part of a hub data set, and the paths are files; "
                "give eval_path"
            )
        known = (*self.required, *(self.takes or ()))
        for column in self.columns:
            if column not in known and self.takes is not None:
                raise KvrlError(
                    f"task.params.columns.{column}: task {self.name} has no such column; it has {', '.join(known)}"
                )
        return self

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that must be there under the task's settings."""
        return self.needs

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any] | None:
        """A row with `prompt` and the reward's columns; None leaves the record out. `where` starts a message."""
        raise NotImplementedError

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows in the seed's order; the train split goes round in a new order each time."""
        if split not in ("train", "eval"):
            raise KvrlError(f"split: {split} is neither train nor eval; use one of them")
        rows = self.train_rows if split == "train" else self.eval_rows
        if split == "eval" and n > len(rows):
            raise KvrlError(f"eval.n: {n} is above the {len(rows)} held-out rows; lower it, or give more: "
                            "task.params.eval_path, or a larger task.params.eval_share")  # fmt: skip
        rng = random.Random(f"{seed}-{split}")
        chosen: list[dict[str, Any]] = []
        while len(chosen) < n:
            chosen += rng.sample(rows, len(rows))
        return chosen[:n]

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """None: the rows have answers, not worked solutions."""
        raise KvrlError(f"warm_start: task {self.name} has no demonstrations; leave warm_start out, or set it to null")

    @cached_property
    def eval_rows(self) -> list[dict[str, Any]]:
        """Every held-out row."""
        if self._eval_source is not None:
            field = "task.params.path" if self.eval_path is None else "task.params.eval_path"
            return self._read(self._eval_source, field)
        return [row for row in self._all_rows if _key(row) in self._held_out]

    @cached_property
    def train_rows(self) -> list[dict[str, Any]]:
        """Every row that is trained on."""
        held_out = self._held_out if self._eval_source is None else {_key(row) for row in self.eval_rows}
        rows = [row for row in self._all_rows if _key(row) not in held_out]
        if not rows:
            raise KvrlError(f"task.params.path: every prompt of {self._source} is held out; add rows")
        return rows

    @cached_property
    def _all_rows(self) -> list[dict[str, Any]]:
        return self._read(self._source, "task.params.path")

    @cached_property
    def _held_out(self) -> set[str]:
        prompts = {_key(row) for row in self._all_rows}
        count = max(1, round(len(prompts) * self.eval_share))
        if count >= len(prompts):
            raise KvrlError(
                f"task.params.path: {self._source} has {len(prompts)} different prompts, too few for two splits; add "
                "rows, or give eval_path"
            )
        return set(sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())[:count])

    @property
    def _source(self) -> Source:
        own = self._own_hub
        return Source(own.path, self.subset or own.subset, self.split or own.split)

    @property
    def _eval_source(self) -> Source | None:
        if self.eval_path is not None:
            return Source(self.eval_path, split=self.eval_split or "test")
        own = self._own_hub
        split = self.eval_split or own.eval_split
        return None if split is None else Source(own.path, self.subset or own.subset, split)

    @property
    def _own_hub(self) -> Hub:
        if self.path is not None:
            return Hub(self.path)
        assert self.hub is not None  # a task without one of its own requires a path
        return self.hub

    def _read(self, source: Source, field: str) -> list[dict[str, Any]]:
        records = read(source, field, self.columns, needs=self.required, takes=self.takes)
        made = (self.row(record, f"{field}: {source}, row {i}") for i, record in enumerate(records, start=1))
        rows = [row for row in made if row is not None]
        if not rows:
            raise KvrlError(f"{field}: none of the {len(records)} rows of {source} is kept; widen task.params")
        return rows


class TemplatedTask(FileTask):
    """A task that makes its prompts by a template from text columns."""

    placeholders: ClassVar[tuple[str, ...]] = ("question",)

    template: str
    """The user's message; a name in braces that is a placeholder of the task stands for its text."""
    system: str | None = None
    """The system message. None: none is given, and the model's chat template may add its own."""
    chat: bool = True
    """Chat messages, through the model's template; false: the filled template as plain text."""

    @model_validator(mode="after")
    def _template_is_complete(self) -> TemplatedTask:
        for name in self.placeholders:
            if f"{{{name}}}" not in self.template:
                raise KvrlError(f"task.params.template: has no {{{name}}}, so prompts would lack it; add it")
        if self.system is not None and not self.chat:
            raise KvrlError("task.params.system: plain text has no system message; set chat to true or leave it out")
        return self

    def prompt(self, **texts: str) -> Prompt:
        """The filled template as one user message after the system's, or as plain text."""
        pattern = "|".join(re.escape(f"{{{name}}}") for name in self.placeholders)
        user = re.sub(pattern, lambda found: texts[found[0][1:-1]], self.template)
        if not self.chat:
            return user
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": user}]


def require_text(record: dict[str, Any], names: Iterable[str], where: str) -> list[str]:
    """The columns' texts, without space around them. Errors: KvrlError for one that is no text or empty."""
    texts = []
    for name in names:
        value = record[name]
        if not isinstance(value, str) or not value.strip():
            raise KvrlError(f"{where}: {name} is {value!r}; give text that is not empty")
        texts.append(value.strip())
    return texts


def draw(rows: list[dict[str, Any]], n: int, seed: int) -> list[dict[str, Any]]:
    """`n` train rows for demonstrations, drawn with replacement."""
    rng = random.Random(f"{seed}-demonstrations")
    return [rng.choice(rows) for _ in range(n)]


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)
