"""Rows from a local file or from the hub, with the columns checked before anything else is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
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
        return Path(self.path).suffix.lower() in FILES

    def __str__(self) -> str:
        return self.path if self.is_file else f"{self.path} ({self.split})"


def read(
    source: Source, field: str, columns: Mapping[str, str], *, needs: Collection[str], takes: Collection[str] | None
) -> list[dict[str, Any]]:
    """All rows of a source, under the names that the task gives the columns.

    columns: the task's name of a column -> the data's, where they differ; a dot leads into a nested record
    (`reward_model.ground_truth`). needs: columns that must be there; takes: further columns that are read where
    they are there (None: every one). A column is there if one record has it; the others have None. Raises KvrlError,
    naming `field`, for what cannot be loaded, a missing column, and no rows at all.
    """
    records = list(_load(source, field))
    if not records:
        raise KvrlError(f"{field}: {source} has no rows; add some")
    has = list(dict.fromkeys(name for record in records for name in record))
    for column in (*needs, *(name for name in columns if name not in needs)):
        wanted = columns.get(column, column)
        if wanted.partition(".")[0] not in has:
            remedy = "name another in task.params.columns" if column in columns else (
                f"say which one it is in task.params.columns, as {{{column}: NAME}}"
            )  # fmt: skip
            raise KvrlError(f"{field}: {source} has no column {wanted} (it has {', '.join(has) or 'none'}); {remedy}")
    names = [*needs, *(has if takes is None else takes), *columns]
    pairs = {name: wanted for name in names if (wanted := columns.get(name, name)).partition(".")[0] in has}
    return [{name: _pick(record, wanted) for name, wanted in pairs.items()} for record in records]


def _pick(record: Mapping[str, Any], dotted: str) -> Any:
    value: Any = record
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _load(source: Source, field: str) -> Iterable[dict[str, Any]]:
    if not source.is_file:
        if Path(source.path).is_file():  # no name of the hub: its error would be about the network
            raise KvrlError(f"{field}: {source.path} is a file of another kind; give a .jsonl, .json or .parquet file")
        return _from_hub(source, field)
    from pyarrow import ArrowException

    file = Path(source.path)
    try:
        return _parquet(file) if file.suffix.lower() == ".parquet" else _json(file, field)
    except (OSError, ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise KvrlError(
            f"{field}: {source} cannot be loaded ({reason}); give a .jsonl, .json or .parquet file or a hub name"
        ) from None


def _from_hub(source: Source, field: str) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    quiet_datasets()
    try:
        return load_dataset(source.path, source.subset, split=source.split)
    except (OSError, ValueError, ConnectionError, DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        reason = reason if len(reason) <= 160 else f"{reason[:157]}..."
        raise KvrlError(
            f"{field}: {source} cannot be loaded from the hub ({reason}); check the name, the network and the "
            "login (`hf auth login`), or give a .jsonl, .json or .parquet file"
        ) from None


def _parquet(file: Path) -> list[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        return opened.read().to_pylist()


def _json(file: Path, field: str) -> list[dict[str, Any]]:
    """The objects of a list or of lines, every value as the file has it: `datasets` gives a column one type.

    Errors: KvrlError for what is not UTF-8, no JSON object, or text that nothing can encode.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise KvrlError(f"{field}: {file} is not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None
    if not text:
        raise KvrlError(f"{field}: {file} is empty; write one JSON object a line")
    records = _listed(text, f"{field}: {file}") if text.lstrip()[:1] == "[" else _lines(text, f"{field}: {file}")
    if re.search(r"\\u[dD][89a-fA-F]", text):
        for number, record in enumerate(records, start=1):
            try:
                json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise KvrlError(
                    f"{field}: {file}, row {number} has half of a surrogate pair (\\ud800 to \\udfff), which is no "
                    "text; leave it out"
                ) from None
    return records


def _listed(text: str, where: str) -> list[dict[str, Any]]:
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KvrlError(f"{where} is no list in JSON ({error}); mend it, or write one JSON object a line") from None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise KvrlError(f"{where}, row {number} is {repr(record)[:40]}, which is no JSON object; make it one")
    return records


def _lines(text: str, where: str) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(text.split("\n"), start=1):  # U+2028 and its like end no line of JSON
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise KvrlError(
                f"{where}, line {number} is {line[:40]!r}, which is no JSON object; write one object a line"
            )
        records.append(record)
    return records
