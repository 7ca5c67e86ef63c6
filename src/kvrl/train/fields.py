"""The reference of the configuration, from the models themselves: `python -m kvrl.train.fields > docs/config.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvrl.train.config import Config

HEAD = """# Configuration

Every field of a run's YAML file. Each is also a flag: `--train.learning_rate 1e-5`; the value is read as YAML. A field
that does not exist or a value outside its limits is refused, with the nearest name or the limit. A section that is off
by default (`null`) is on as soon as one of its fields is set. Fields of `cache.params` are the policy's own:
`kvrl policies` lists them.

This page is written by `python -m kvrl.train.fields > docs/config.md`.
"""

LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "length at least {}",
}


@dataclass(frozen=True)
class Entry:
    """One field: its dotted path, type, limits, default and meaning, as texts."""

    path: str
    type: str
    default: str
    meaning: str


def entries(kind: type[BaseModel], prefix: str = "") -> Iterator[Entry]:
    """Every field of a section, those of its sections in their places."""
    for name, field in kind.model_fields.items():
        section = section_of(field.annotation)
        if section is None or not is_section(field.annotation):
            meaning = " ".join((field.description or "").split())
            yield Entry(prefix + name, described(field), default_of(field), meaning)
        if section is not None:
            inner = f"{prefix}{name}[]." if typing.get_origin(field.annotation) is list else f"{prefix}{name}."
            yield from entries(section, inner)


def is_section(annotation: Any) -> bool:
    """Whether the field is a section, or a section or nothing: it has no value of its own."""
    parts = _parts(annotation)
    return all(part is type(None) or _is_model(part) for part in parts)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one (or a list of them, or nothing)."""
    for part in _parts(annotation):
        if typing.get_origin(part) is list:
            return section_of(typing.get_args(part)[0])
        if _is_model(part):
            return part
    return None


def described(field: FieldInfo) -> str:
    """Type and limits: `int, at least 1`."""
    return ", ".join([spelled(field.annotation), *limits(field)])


def limits(field: FieldInfo) -> list[str]:
    """What a value has to keep."""
    return [
        text.format(f"{value:g}")
        for constraint in field.metadata
        for key, text in LIMITS.items()
        if (value := getattr(constraint, key, None)) is not None
    ]


def spelled(annotation: Any) -> str:
    """A type as one would say it: the values of a choice, `null` for None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return " ".join([spelled(arguments[0]), *(text for field in arguments[1:] for text in limits(field))])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spelled(part) for part in arguments)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple, dict):
        inner = ", ".join("..." if part is Ellipsis else spelled(part) for part in arguments)
        return f"{origin.__name__} of {inner}"
    if annotation is type(None):
        return "`null`"
    if _is_model(annotation):
        return "sections"
    if annotation is ByteSize:
        return "size (`2GiB`, or a number of bytes)"
    return "any" if annotation is Any else getattr(annotation, "__name__", str(annotation))


def default_of(field: FieldInfo) -> str:
    """The default as YAML has it."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "needed"
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, default=_plain)}`"


def _plain(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_defaults=True)


def page() -> str:
    """The whole page: a table for each section."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries(Config):
        section = entry.path.rpartition(".")[0].removesuffix("[]")
        groups.setdefault(section, []).append(entry)
    parts = [HEAD]
    for section, found in groups.items():
        parts.append(f"## {section or 'The run'}\n")
        if meaning := _meaning(section):
            parts.append(f"{meaning}\n")
        lines = ["| field | type | default | |", "|---|---|---|---|"]
        lines += [f"| `{e.path}` | {_cell(e.type)} | {_cell(e.default)} | {_cell(e.meaning)} |" for e in found]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _meaning(section: str) -> str:
    """What a section says of itself, and whether it is off by default."""
    kind: type[BaseModel] = Config
    field: FieldInfo | None = None
    for name in section.split(".") if section else []:
        field = kind.model_fields[name]
        found = section_of(field.annotation)
        assert found is not None
        kind = found
    off = field is not None and type(None) in _parts(field.annotation) and field.default is None
    described = " ".join((kind.__doc__ or "").split()) if section else ""
    return " ".join(part for part in (described, "Off by default (`null`)." if off else "") if part)


def _parts(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_model(part: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
