"""A bar for what is being sampled: completions that have ended, and tokens a second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kvrl.sampler.request import Progress


class SamplingTask:
    """A line of a bar that follows one engine run after the other; call it with each decode step's Progress."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.id = bar.add_task("sampling", total=None, visible=False)
        self.start, self.first = 0.0, 0

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter()
        if progress.steps == 1:  # a new run: its first step is not timed
            self.start, self.first = now, progress.tokens
            self.bar.reset(self.id, visible=True)
        seconds = now - self.start
        rate = f" {(progress.tokens - self.first) / seconds:.0f} tok/s" if seconds else ""
        self.bar.update(
            self.id, completed=progress.done, total=progress.total, visible=progress.done < progress.total,
            description=f"sampling{rate}",
        )  # fmt: skip


@contextlib.contextmanager
def sampling_bar(console: Console) -> Iterator[Callable[[Progress], None] | None]:
    """A bar while the block runs, on a terminal; None elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        yield SamplingTask(bar)
