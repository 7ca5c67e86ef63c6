"""What may stand after a flag: texts to values, each with the error that argparse shows."""

from __future__ import annotations

import argparse
from typing import Literal

MOST, MOST_BYTES = 2**63 - 1, 2**50
METHODS = ("dense", "naive", "corrected", "sparse_rl", "shadow_mask", "breadcrumbs")


def parse_budgets(text: str) -> list[int | Literal["full"]]:
    """`24,48,full` as `[24, 48, "full"]`."""
    return ["full" if part == "full" else positive(part) for part in text.split(",")]


def parse_lengths(text: str) -> list[int]:
    """`256,64` as `[64, 256]`, each once."""
    return sorted({positive(part) for part in text.split(",")})


def parse_schedule(text: str) -> list[int]:
    """`2,2,8` as `[2, 2, 8]`, in the order given."""
    return [positive(part) for part in text.split(",")]


def parse_bytes(text: str) -> int:
    """`24GiB`, `80GB` or `512 MiB` in bytes, as in a configuration but that the unit must be there."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = 0 if text.strip()[-1:].isdigit() else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if not 1 <= size <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size up to 1 PiB; write it as 24GiB, 80GB or 512MiB")
    return size


def parse_methods(text: str) -> list[str]:
    """`naive,shadow_mask` as a list, each name checked."""
    names = text.split(",")
    for name in names:
        if name not in METHODS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(METHODS)}")
    return names


def parse_names(text: str) -> list[str]:
    """`tova,streaming` as `["tova", "streaming"]`, each once."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; write names with commas between them")
    return names


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _integer(text, 0)


def _integer(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}") from None
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is below the minimum {minimum}")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{value} is above the maximum {MOST}")
    return value


def yaml_mapping(text: str) -> dict:
    """`{max_steps: 20}` as a dict."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a YAML mapping such as '{{max_steps: 20}}'")
    return value
