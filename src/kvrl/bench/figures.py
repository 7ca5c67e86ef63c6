"""From measured points to figures: integrated speeds, fitted exponents, and how they stand to their bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """A number of a benchmark, with the bar that it is held to, if there is one."""

    name: str
    value: float | None
    """None: could not be measured; the notes say why."""
    unit: str = "x"
    bar: float | None = None
    sense: Literal["at least", "at most"] = "at least"

    @property
    def verdict(self) -> str | None:
        """`ok` or `MISSED`; None without a value or a bar."""
        if self.value is None or self.bar is None:
            return None
        held = self.value >= self.bar if self.sense == "at least" else self.value <= self.bar
        return "ok" if held else "MISSED"


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, where both were measured."""
    return None if a is None or b is None else a / b


def integrated_seconds(points: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Seconds for each sequence's tokens from context `start` to `end`, over all sequences: the integral of 1 / speed.

    points: (context, tokens per second of all sequences together) in order of context. Between two points 1 / speed
    is linear, and beyond the first and the last it goes on as between the nearest two: exact for attention over a full
    cache, whose time for a token is linear in the context.
    """
    cost = [(context, 1.0 / speed) for context, speed in points]
    edges = [start, *(c for c, _ in cost if start < c < end), end]
    at = [_linear(cost, c) for c in edges]
    return sum((b - a) * (x + y) / 2 for a, b, x, y in zip(edges, edges[1:], at, at[1:], strict=False))


def _linear(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear through the points, and on beyond them; constant through a single one."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(1, sum(p <= x for p, _ in points)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def fitted_exponent(lengths: Sequence[float], seconds: Sequence[float]) -> float:
    """p of seconds = c * length^p: the least-squares slope of log seconds on log length."""
    xs, ys = [math.log(x) for x in lengths], [math.log(y) for y in seconds]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def dense_sequences(token_bytes: int, kv_bytes: int, tokens: int) -> int:
    """Sequences of `tokens` whose full cache fits into kv_bytes, one at least. token_bytes: K and V of one token."""
    return max(1, kv_bytes // (token_bytes * tokens))
