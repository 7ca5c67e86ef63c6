"""Three completions, a function that scores them, and how tests call and compare."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvrl.rewards import score

COMPLETIONS = ["a", "bb", "ccc"]
COLUMNS = {"prompt": ["p0", "p1", "p2"], "answer": [1, 2, 4]}
NAN = math.nan


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def run(*funcs: Any, weights: list[float] | None = None, **changes: Any):
    return score(list(funcs), weights, COMPLETIONS, COLUMNS, **changes)


def same(values: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(values, torch.tensor(expected), equal_nan=True)
