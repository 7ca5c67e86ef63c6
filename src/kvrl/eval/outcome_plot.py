"""The figure of `kvrl compare` and `kvrl study`: rewards over steps, and accuracies at the end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrl.eval.report import smooth, step_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TICK_CHARACTERS = 44
"""Of the names below the right panel, which stand in one line."""


@dataclass(frozen=True)
class Line:
    """One method or variant: what its seeds gave."""

    name: str
    rewards: Sequence[Sequence[float]]
    """seed -> the rollouts' mean reward of every step."""
    compressed: Sequence[float]
    """seed -> held-out accuracy at the end, compressed decoding."""
    full: Sequence[float]
    """The same, full-cache decoding."""
    full_cache_rollouts: bool = False
    """Its rollouts keep everything, so its rewards cannot be compared with the others'."""


def plot(path: Path, lines: Sequence[Line]) -> None:
    """Left: the rollouts' reward over steps. Right: accuracy at the end under both decodings, every seed a point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    many = len(lines) > 4
    colours = [f"C{i}" if len(lines) <= 10 else matplotlib.colormaps["tab20"](i % 20) for i in range(len(lines))]
    below = 0.22 * math.ceil(len(lines) / 3)  # inches of the legend, three names a line: over no curve
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2 + below), dpi=120, width_ratios=(3, 2))
    for i, line in enumerate(lines):
        curves = [smooth(list(values)) for values in line.rewards]
        mean = [statistics.mean(x) for x in zip(*curves, strict=True)]
        style: dict[str, Any] = {"color": colours[i], "linestyle": "--" if line.full_cache_rollouts else "-"}
        if not many:
            for curve in curves:
                left.plot(range(1, len(curve) + 1), curve, alpha=0.2, linewidth=1, **style)
        label = f"{line.name} (full-cache rollouts)" if line.full_cache_rollouts else line.name
        left.plot(range(1, len(mean) + 1), mean, label=label, **style)
        for marker, ends, shift in (("o", line.compressed, -0.12), ("^", line.full, 0.12)):
            right.plot([i + shift] * len(ends), ends, marker, color=colours[i], alpha=0.5, markersize=5)
            at_end = [i + shift], [statistics.mean(ends)]
            right.plot(*at_end, marker, color=colours[i], markersize=10, markeredgecolor="black")
    left.set(xlabel="step", ylabel="reward in the rollouts (mean of 5 steps)", ylim=(0, 1))
    step_ticks(left)
    right.set(ylabel="held-out accuracy at the end", ylim=(0, 1))
    names = [line.name for line in lines]
    fit = not many and sum(map(len, names)) <= TICK_CHARACTERS  # if not, colours and order say which
    right.set_xticks(range(len(names)), names if fit else [""] * len(names))
    kinds = [
        Line2D([], [], marker=marker, color="0.4", markeredgecolor="black", linestyle="none", markersize=9, label=label)
        for marker, label in (("o", "compressed decoding"), ("^", "full-cache decoding"))
    ]
    _legend_above(right, kinds)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout(rect=(0, below / (4.2 + below), 1, 1))
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _legend_above(axes: Axes, handles: list[Any]) -> None:
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
