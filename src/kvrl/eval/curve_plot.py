"""The figure of `kvrl eval --curve`."""

from __future__ import annotations

from pathlib import Path

from kvrl.eval.curve import TRUNCATED, UNCOMPRESSED, Curve


def plot(path: Path, curve: Curve, heading: str) -> None:
    """Left: accuracy against the entries held on average. Right: accuracy where no more than so many may be held."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=120, sharey=True)
    areas = curve.auac()
    left.axhline(curve.full.accuracy, color="black", linewidth=0.8, linestyle=(0, (1, 3)),
                 label=f"{UNCOMPRESSED}, {curve.full.held_entries:.0f} entries")  # fmt: skip
    colours = {name: f"C{i}" for i, name in enumerate(curve.methods)}
    for name, points in curve.methods.items():
        look = {"color": "0.45", "linestyle": "--"} if name == TRUNCATED else {"color": colours[name], "linestyle": "-"}
        area = areas[name]
        label = name if area is None else f"{name} (AUAC {area:.2f})"
        left.plot([p.held_entries for p in points], [p.accuracy for p in points], marker="o", label=label, **look)
        for p in points:
            if p.decoding.startswith("c="):
                left.annotate(p.decoding, (p.held_entries, p.accuracy), (0, 5), textcoords="offset points", fontsize=7)
    for name, cells in curve.memory.items():
        known = [(limit, cell.accuracy) for limit, cell in zip(curve.limits, cells, strict=True) if cell is not None]
        plain, (method, _, window) = name == UNCOMPRESSED, name.rpartition(" c=")
        # one colour a method in both panels; lines of several windows are told apart by their marks
        look = {"color": "black" if plain else colours[method or name], "linestyle": "--" if plain else "-"}
        mark = {"marker": f"${window}$", "markersize": 7} if window else {"marker": "s", "markersize": 4}
        right.plot([x for x, _ in known], [y for _, y in known], label=name, alpha=0.8, **mark, **look)
    left.set(xlabel="KV entries that a decode step attends to, mean", ylabel="held-out accuracy", ylim=(-0.02, 1.02))
    left.set_title("matched sizes", fontsize=10)
    right.set(xlabel="KV entries held at most")
    right.set_title("fixed memory: a completion that needs more ends", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="best")
    figure.suptitle(heading, fontsize=10)
    figure.tight_layout()
    try:
        figure.savefig(path)
    finally:
        plt.close(figure)
