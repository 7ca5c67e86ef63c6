"""Means over seeds with their intervals, as numbers and as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

# 97.5% quantile of Student's t for 1, 2, ... degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of independent values and the half-width of its 95% interval by Student's t (NaN for one value)."""
    count = len(values)
    half = math.nan
    if count > 1:
        half = T_QUANTILES[count - 2] * statistics.stdev(values) / math.sqrt(count)
    return {"values": list(values), "mean": statistics.mean(values), "half_width_95": half}


def shown(value: dict[str, Any]) -> str:
    """`mean ± half-width`."""
    half = value["half_width_95"]
    return f"{value['mean']:.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table, without the columns that are empty throughout."""
    columns = [column for column in zip(header, *body, strict=True) if any(column[1:])]
    first, *lines = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in (first, ["---"] * len(first), *lines))
