"""What a run shows and keeps: a line a step, a bar, metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvrl.eval.evaluate import Evaluation, evaluation_table
from kvrl.eval.report import to_json, widened
from kvrl.progress import SamplingTask

COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("kl", "kl/mean", "{:.4f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("distill kl", "distill/kl/mean", "{:.4f}"),
    ("tok/s", "tokens_per_second", "{:.0f}"),
    ("KV/dense", "kv_bytes_share", "{:.0%}"),
    ("parity mean", "parity/mean", "{:.1e}"),
    ("p99", "parity/p99", "{:.1e}"),
    ("max", "parity/max", "{:.1e}"),
    ("|dense-sparse|", "dense_mismatch", "{:.3f}"),
)
FAULTS = (
    ("reward errors", "reward_errors", "{:.0f}"),
    ("dropped", "samples_dropped", "{:.0f}"),
    ("updates skipped so far", "updates_skipped", "{:.0f}"),
)
"""Shown where they are not 0."""


class RunLog:
    """Progress bar and log of one run; metrics go to `metrics.jsonl`, one JSON object a line."""

    def __init__(self, output_dir: Path, total: int, console: Console) -> None:
        self.console, self.total = widened(console), total
        self.file = (output_dir / "metrics.jsonl").open("a")
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=self.console, transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("step", total=total)
        self.sampling = SamplingTask(self.bar)

    def __enter__(self) -> RunLog:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()
        self.file.close()

    def say(self, text: object) -> None:
        """Print above the bar; a text as it is, since a path may hold brackets or be long."""
        self.console.print(text, soft_wrap=isinstance(text, str), markup=False)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Show one step and keep all its metrics."""
        self.keep({"step": step, **metrics})
        shown = [f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics]
        shown += [f"{label} {form.format(value)}" for label, name, form in FAULTS if (value := metrics.get(name, 0))]
        if "kl/mean" not in metrics:
            shown.insert(1, "kl off")  # grpo.beta is 0: there is no reference
        self.console.print(f"step {step:>4}  " + "  ".join(shown), soft_wrap=True)
        self.bar.update(self.task, completed=step)

    def evaluation(self, step: int, results: Sequence[Evaluation]) -> None:
        """Show held-out accuracies (the last ones stand in the closing table) and keep one record for each budget."""
        for result in results:
            self.keep({"step": step, **asdict(result)})
        if step < self.total:
            self.say(evaluation_table(results, f"held out, step {step}"))

    def keep(self, record: dict) -> None:
        """Append one record to metrics.jsonl, flushed: a killed run keeps what it measured. NaN is null."""
        self.file.write(to_json(record) + "\n")
        self.file.flush()
