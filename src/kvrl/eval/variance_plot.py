"""The figure of `kvrl variance`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrl.eval.variance import Spread

STYLES = {  # learner -> label, colour, marker, line
    "dense": ("dense learner", "C3", "o", "-"),
    "replay": ("replay", "C0", "s", "-"),
    "floor": ("noise floor (no eviction)", "0.45", "^", ":"),
}


def plot(path: Path, rows: Sequence[Spread], heading: str, samples: int) -> None:
    """Left: standard deviation of the sequence log-ratio against length, both in logs. Right: effective samples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, PercentFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), dpi=120)
    lengths = sorted({r.length for r in rows})
    for learner, (label, color, marker, line) in STYLES.items():
        mine = [r for r in rows if r.learner == learner]
        # Replay lies on the floor where it is exact: a larger hollow marker keeps both in sight
        look = {"color": color, "marker": marker, "linestyle": line, "label": label, "linewidth": 1.8}
        look |= {"markersize": 9, "markerfacecolor": "none"} if learner == "floor" else {"markersize": 5}
        left.plot([r.length for r in mine], [r.std for r in mine], **look)
        right.plot([r.length for r in mine], [r.ess_share for r in mine], **look)
    dense = [r for r in rows if r.learner == "dense" and r.log10_bound is not None]
    if dense:
        right.plot(
            [r.length for r in dense], [math.exp(-r.length * math.log1p(r.d)) for r in dense],
            color="C3", linestyle="--", linewidth=1, label=r"$(1+d)^{-L}$ of the dense learner's tokens",
        )  # fmt: skip
    right.axhline(
        1 / samples, color="black", linewidth=0.8, linestyle=(0, (1, 3)),
        label=f"1/{samples}: one sequence has all the weight",
    )  # fmt: skip
    left.set(yscale="log", ylabel="standard deviation of the log-ratio (nats)", title="spread between sequences")
    right.set(ylabel="effective sample size (share)", ylim=(0, 1.05), title="sequences that count")
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("completion tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best")
    figure.suptitle(heading, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
