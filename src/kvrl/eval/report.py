"""The end of a run: a table of start and end, and its reward and distillation over the steps as PNGs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvrl.errors import KvrlError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = (".png", ".pdf", ".svg")
WIDTH = 120  # of a line in a log file or a pipe, which have no width of their own


def widened(console: Console) -> Console:
    """The console, with lines of WIDTH where neither a terminal nor COLUMNS says how long they may be (rich: 80)."""
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def read_metrics(output_dir: Path) -> tuple[list[dict], list[dict]]:
    """Step records and evaluation records of a run. A resumed run's later record of a step wins; null is NaN."""
    steps: dict[int, dict] = {}
    evaluations: dict[tuple[int, str], dict] = {}
    for line in (output_dir / "metrics.jsonl").read_text().splitlines():
        record: dict[str, Any] = {k: math.nan if v is None else v for k, v in json.loads(line).items()}
        if "budget" in record:
            evaluations[record["step"], record["budget"]] = record
        else:
            steps[record["step"]] = record
    return [steps[k] for k in sorted(steps)], list(evaluations.values())


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that any parser reads: a number that is not finite (no reward was given) becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_figure(path: Path) -> None:
    """Raise KvrlError for an --output that could not be written, before the work is done."""
    if path.suffix.lower() not in FIGURES:
        raise KvrlError(f"--output: {path} does not end in {', '.join(FIGURES)}; give the path of a figure")
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise KvrlError(
            f"--output: {path} cannot be written ({error.strerror}); give a file in a folder that exists and is yours"
        ) from None
    if not there:
        path.unlink()


def decoding_name(budget: str) -> str:
    """An evaluation's budget in words: `24`, `full`, or `c=4` for beacons."""
    return "full cache" if budget == "full" else f"budget {budget}" if budget.isdigit() else f"beacons {budget}"


def write_report(output_dir: Path, say: Callable[[object], None]) -> dict[str, Any]:
    """Write summary.json and the figures from metrics.jsonl; show the closing table and where everything is."""
    steps, evaluations = read_metrics(output_dir)
    budgets = list(dict.fromkeys(e["budget"] for e in evaluations))
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        mine = sorted((e for e in evaluations if e["budget"] == budget), key=lambda e: e["step"])
        rows.append({"decoding": decoding_name(budget), "start": mine[0], "end": mine[-1]})
    parity = {k: max(s[f"parity/{k}"] for s in steps) for k in ("mean", "p99", "max")} if steps else {}
    summary = {
        "steps": len(steps),
        "seconds": sum(s["seconds"] for s in steps),
        "reward_first": steps[0]["reward"] if steps else None,
        "reward_last": steps[-1]["reward"] if steps else None,
        "parity_worst": parity,
        "decodings": rows,
    }
    (output_dir / "summary.json").write_text(to_json(summary, indent=2))
    if rows:
        say(closing_table(rows))
    if parity:
        say(
            "parity |logp sampler - logp replay|, worst step: "
            f"mean {parity['mean']:.1e}, p99 {parity['p99']:.1e}, max {parity['max']:.1e}"
        )
        plot_steps(output_dir / "reward.png", "reward", [s["reward"] for s in steps], evaluations, top=1.02)
        say(f"reward curve: {output_dir / 'reward.png'}")
    if steps and not any("grad_norm" in s for s in steps):
        say(
            "warning: no step changed the weights: every completion was dropped or rejected (samples_dropped, "
            "correction/share_rejected and updates_skipped in metrics.jsonl)"
        )
    if any("distill/kl/mean" in s for s in steps):
        divergences = [s.get("distill/kl/mean", math.nan) for s in steps]
        plot_steps(output_dir / "distill.png", "distillation KL, nats a token", divergences)
        say(f"distillation curve: {output_dir / 'distill.png'}")
    say(f"model: {output_dir / 'model'}")
    return summary


def closing_table(rows: list[dict[str, Any]]) -> Table:
    """Accuracy at the start and at the end, and what the last evaluation needed."""
    table = Table(title=f"held out, steps {rows[0]['start']['step']} and {rows[0]['end']['step']}")
    for name in ("decoding", "accuracy, start", "end", "KV bytes", "of full", "evictions", "mean length", "cut off"):
        table.add_column(name, justify="right")
    for row in rows:
        start, end = row["start"], row["end"]
        table.add_row(
            row["decoding"], f"{start['accuracy']:.3f}", f"{end['accuracy']:.3f}", f"{end['kv_bytes']:,}",
            f"{end['kv_bytes_share']:.0%}", f"{end['evictions']:.1f}", f"{end['mean_length']:.0f}",
            f"{end['truncated']:.0%}",
        )  # fmt: skip
    if dropped := rows[0]["end"]["dropped"]:
        table.caption = f"{dropped} problems left out: their prompts are over the limits"
    return table


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Trailing mean over `width` steps, of those that have a value; NaN where none has."""
    parts = [[v for v in values[max(0, i - width + 1) : i + 1] if not math.isnan(v)] for i in range(len(values))]
    return [sum(part) / len(part) if part else math.nan for part in parts]


def step_ticks(axes: Axes) -> None:
    """Whole numbers on the axis of the steps: a run of two steps has no step 1.5."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_steps(
    path: Path, name: str, values: list[float], evaluations: Sequence[dict] = (), *, top: float | None = None
) -> None:
    """What each step measured with its trailing mean, from 0 to `top` (None: the highest), and held-out accuracies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color="C0", alpha=0.25, linewidth=1)
    axes.plot(steps, smooth(values), color="C0", label=f"{name} (mean of 5 steps)")
    for i, budget in enumerate(dict.fromkeys(e["budget"] for e in evaluations)):
        mine = [e for e in evaluations if e["budget"] == budget]
        label = f"held out, {decoding_name(budget)}"
        axes.plot([e["step"] for e in mine], [e["accuracy"] for e in mine], "o--", color=f"C{i + 1}", label=label)
    axes.set(xlabel="step", ylabel=name, ylim=(0, top))
    step_ticks(axes)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=8, frameon=False)  # over no point
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
