"""What the drivers share: settings in, JSON out. Used inside each peer's own environment, without kvrl."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from typing import Any


def given() -> dict[str, Any]:
    """The settings on the command line."""
    return json.loads(sys.argv[1])


def answer(packages: list[str], **found: Any) -> None:
    """The one line that kvrl reads."""
    versions = {name: version(name) for name in packages} | {"python": platform.python_version()}
    print("\n" + json.dumps({"versions": versions, **found}), flush=True)


def windows(times: list[float], steps: int, repeats: int, tokens: int) -> list[float]:
    """Tokens per second of `repeats` windows of `steps` steps each, `tokens` a step, from the ends of all steps.

    times: seconds at the end of each decode step; the first step is not measured.
    """
    marks = times[::steps][: repeats + 1]
    return [steps * tokens / (b - a) for a, b in zip(marks, marks[1:], strict=False)]
