"""From a YAML file and flags to a checked pydantic model, with each mistake told in one line."""

from __future__ import annotations

import copy
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from kvrl.errors import KvrlError

ModelT = TypeVar("ModelT", bound=BaseModel)

_LIMITS = {
    "greater_than_equal": ("ge", "is below the minimum {0}", "raise it to at least {0}"),
    "greater_than": ("gt", "is not above {0}", "set it above {0}"),
    "less_than_equal": ("le", "is above the maximum {0}", "lower it to at most {0}"),
    "less_than": ("lt", "is not below {0}", "set it below {0}"),
}


_KINDS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it is no whole number; write one, such as 32"),
    **dict.fromkeys(("float_parsing", "float_type"), "it is no number; write one, such as 0.5"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it is neither true nor false; write one of them"),
    "string_type": "it is no text; write one, in quotes if it looks like a number",
    "list_type": "it is no list; write it as [value, value]",
}

_UNION_BRANCH = re.compile(r"^(int|float|str|constrained-\w+)$|\[")  # constrained-int, literal['full'], ...


class _Loader(yaml.SafeLoader):
    """YAML 1.1, but `1e-4` is a number (its float pattern asks for a dot) and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"repeated key {key.value}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_config(kind: type[ModelT], path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> ModelT:
    """`kind` from the YAML file at `path` with `(dotted.path, YAML text)` pairs laid over it."""
    data = _read_mapping(Path(path))
    _check_kind(data, kind, str(path))
    before = copy.deepcopy(data)
    for dotted, text in overrides:
        _set(data, dotted, _flag_value(kind, dotted, text))
    _check_task(before, data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise KvrlError(explain(error, kind)) from None


def _check_kind(data: dict[str, Any], kind: type[BaseModel], path: str) -> None:
    """Raise KvrlError for an empty file, and for one that is for another command."""
    if not data:
        raise KvrlError(f"{path}: is empty; write `field: value` lines")
    of_study = {"base", "variants"}
    if of_study <= data.keys() and not of_study <= kind.model_fields.keys():
        raise KvrlError(f"{path}: is a study, not a configuration; run it with `kvrl study {path}`")
    if of_study <= kind.model_fields.keys() and not of_study & data.keys():
        raise KvrlError(f"{path}: is no study (it has no base and no variants); a configuration is run with "
                        f"`kvrl train {path}`")  # fmt: skip


def _check_task(before: dict[str, Any], data: dict[str, Any]) -> None:
    """Raise KvrlError if flags name another task than the file, whose parameters are left and not the new one's."""
    old, new = before.get("task"), data.get("task")
    if not isinstance(old, dict) or not isinstance(new, dict) or old.get("name", new.get("name")) == new.get("name"):
        return
    from kvrl.tasks import TASKS, parameters_of

    if new["name"] not in TASKS:
        return
    known = parameters_of(new["name"])
    for param in new.get("params") or {}:
        if param in (old.get("params") or {}) and param not in known:
            raise KvrlError(
                f"task.params.{param}: is left from the file's task {old['name']}; give "
                f'--task "{{name: {new["name"]}, params: {{...}}}}"'
            )


def explain(error: ValidationError, kind: type[BaseModel], prefix: str = "") -> str:
    """One line for the first mistake that pydantic found: field (after `prefix`), value, limit, remedy."""
    mistakes = sorted(error.errors(), key=lambda mistake: mistake["type"] == "missing")  # a misspelled field is both
    first = mistakes[0]
    line = _explain_one(first, kind)
    if not isinstance(first.get("ctx", {}).get("error"), KvrlError):  # which names its field in full
        line = prefix + line
    others = len({_field(mistake) for mistake in mistakes}) - 1
    return f"{line} (and {others} more)" if others else line


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvrlError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise KvrlError(f"{path}: is not UTF-8 text; give the path of a YAML file") from None
    data = _parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise KvrlError(f"{path}: holds a {type(data).__name__}, not a mapping; write `field: value` lines")
    return data


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise KvrlError(f"{where}: is not valid YAML:{line} {error.problem}") from None
    except yaml.YAMLError as error:
        raise KvrlError(f"{where}: is not valid YAML: {' '.join(str(error).split())}") from None


def _flag_value(kind: type[BaseModel], dotted: str, text: str) -> Any:
    """A flag's text as YAML; `24,full` is a list where the field is one whose entries cannot hold a comma."""
    if not text.strip():
        raise KvrlError(f"--{dotted}: has no value; write --{dotted} VALUE (null for none, '\"\"' for an empty text)")
    value = _parse(text, f"--{dotted}")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    *sections, leaf = dotted.split(".")
    for name in sections:
        field = kind.model_fields.get(name)
        inner = None if field is None else next(_models(field.annotation), None)
        if inner is None:
            return value
        kind = inner
    field = kind.model_fields.get(leaf)
    lists = [] if field is None else list(_lists(field.annotation))
    if not lists or str in typing.get_args(lists[0]):
        return value
    return [_parse(part, f"--{dotted}") for part in text.split(",")]


def _lists(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is list:
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _lists(part)


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, leaf = dotted.split(".")
    for depth, section in enumerate(sections):
        inner = data.get(section)
        if inner is None:
            inner = data[section] = {}
        elif not isinstance(inner, dict):
            name = ".".join(sections[: depth + 1])
            raise KvrlError(f"--{dotted}: {name} is {inner!r} and has no fields; set {name} itself")
        data = inner
    data[leaf] = value


def _explain_one(mistake: Mapping[str, Any], kind: type[BaseModel]) -> str:
    field, value = _field(mistake), _short(mistake["input"])
    what, context = mistake["type"], mistake.get("ctx", {})
    if what == "value_error":
        message = str(context["error"])
        return message if isinstance(context["error"], KvrlError) else f"{field}: {value}: {message}"
    if what == "extra_forbidden":
        return f"{field}: is not a known field; {_nearest(field, kind)}"
    if what == "missing":
        return f"{field}: is missing; set it"
    if what in _LIMITS:
        key, limit, remedy = _LIMITS[what]
        bound = f"{context[key]:g}"
        return f"{field}: {value} {limit.format(bound)}; {remedy.format(bound)}"
    if what == "literal_error":
        return f"{field}: {value} is not one of {context['expected']}; choose one of them"
    if what in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field}: {value} is refused: {_as_section(field, kind)}"
    if what in _KINDS:
        return f"{field}: {value} is refused: {_KINDS[what]}"
    reason = mistake["msg"][0].lower() + mistake["msg"][1:]
    return f"{field}: {value} is refused: {reason}; change the value"


def _as_section(field: str, kind: type[BaseModel]) -> str:
    """What to write where a whole section was given one value."""
    try:
        fields = list(_section(kind, field.split(".")).model_fields)
    except (KeyError, StopIteration):
        return "it is no mapping; write it as {name: value}"
    first = next((name for name in ("path", "policy", "name") if name in fields), fields[0])
    return f"{field} is a section, not a value; set one of its fields, as in {field}.{first} ({', '.join(fields)})"


def _field(mistake: Mapping[str, Any]) -> str:
    """The dotted path, without the names of union branches that pydantic puts in it."""
    return ".".join(part for part in map(str, mistake["loc"]) if not _UNION_BRANCH.search(part))


def _short(value: object, limit: int = 60) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _nearest(field: str, kind: type[BaseModel]) -> str:
    """What an unknown field was probably meant to be, or the fields that its section has."""
    *sections, leaf = field.split(".")
    section = _section(kind, sections)
    siblings = list(section.model_fields)
    prefix = "".join(f"{name}." for name in sections)
    elsewhere = [path for path in _paths(kind) if path.split(".")[-1] == leaf]
    elsewhere.sort(key=lambda path: not path.startswith("train."))  # a section that every run has comes first
    near = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.75)
    for guess in [*(prefix + name for name in near), *elsewhere]:
        return f"did you mean {guess}?"
    return f"{prefix.rstrip('.') or 'the file'} has {', '.join(siblings)}"


def _section(kind: type[BaseModel], names: Sequence[str]) -> type[BaseModel]:
    for name in names:
        if name.isdigit():  # a place in a list, whose entries have the fields
            continue
        kind = next(_models(kind.model_fields[name].annotation))
    return kind


def _paths(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield prefix + name
        for inner in _models(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list):
        for part in typing.get_args(annotation):
            yield from _models(part)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
