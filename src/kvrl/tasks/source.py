"""Rows from a local file or from the hub, with the columns checked before anything else is loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrl.errors import KvrlError
from kvrl.quiet import quiet_datasets

FILES = (".json", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Source:
    """A local .jsonl, .json or .parquet file, or one split of a hub data set."""

    path: str
    subset: str | None = None
    split: str = "train"

    @property
    def is_file(self) -> bool:
        return Path(self.path).suffix in FILES

    def __str__(self) -> str:
        return self.path if self.is_file else f"{self.path} ({self.split})"


def read(
    source: Source, field: str, columns: Mapping[str, str], *, needs: Collection[str], takes: Collection[str] | None
) -> list[dict[str, Any]]:
    """All rows of a source, under the names that the task gives the columns.

    columns: the task's name of a column -> the data's, where they differ; a dot leads into a nested record
    (`reward_model.ground_truth`). needs: columns that must be there; takes: further columns that are read where
    they are there (None: every one). Raises KvrlError, naming `field`, for what cannot be loaded, a missing
    column, and no rows at all.
    """
    data = _load(source, field)
    has = data.column_names
    for column in (*needs, *(name for name in columns if name not in needs)):
        wanted = columns.get(column, column)
        if wanted.partition(".")[0] not in has:
            remedy = "name another in task.params.columns" if column in columns else (
                f"say which one it is in task.params.columns, as {{{column}: NAME}}"
            )  # fmt: skip
            raise KvrlError(f"{field}: {source} has no column {wanted} (it has {', '.join(has)}); {remedy}")
    names = [*needs, *(has if takes is None else takes), *columns]
    pairs = {name: columns.get(name, name) for name in names}
    rows = [
        {name: _pick(record, wanted) for name, wanted in pairs.items() if wanted.partition(".")[0] in record}
        for record in data
    ]
    if not rows:
        raise KvrlError(f"{field}: {source} has no rows; add some")
    return rows


def _pick(record: Mapping[str, Any], dotted: str) -> Any:
    value: Any = record
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _load(source: Source, field: str) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    quiet_datasets()
    file = Path(source.path)
    if source.is_file and file.is_file() and file.stat().st_size == 0:
        raise KvrlError(f"{field}: {file} is empty; write one JSON object a line")
    try:
        if source.is_file:
            kind = "parquet" if file.suffix == ".parquet" else "json"
            return load_dataset(kind, data_files=source.path, split="train")
        return load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, ConnectionError, DatasetsError) as error:
        if file.suffix == ".jsonl" and file.is_file():
            _check_lines(file, field)
        reason = " ".join(str(error.__cause__ or error).split())
        if not source.is_file:
            reason = reason if len(reason) <= 160 else f"{reason[:157]}..."
            raise KvrlError(
                f"{field}: {source} cannot be loaded from the hub ({reason}); check the name, the network and the "
                "login (`hf auth login`), or give a .jsonl, .json or .parquet file"
            ) from None
        raise KvrlError(
            f"{field}: {source} cannot be loaded ({reason}); give a .jsonl, .json or .parquet file or a hub name"
        ) from None


def _check_lines(file: Path, field: str) -> None:
    """Raise KvrlError for the first line that is no JSON object."""
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            wrong = bool(line.strip()) and not isinstance(json.loads(line), dict)
        except json.JSONDecodeError:
            wrong = True
        if wrong:
            raise KvrlError(
                f"{field}: {file}, line {number} is {line[:40]!r}, which is no JSON object; write one object a line"
            )
