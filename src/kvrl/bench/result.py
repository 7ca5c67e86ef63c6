"""What a benchmark found, as tables on the terminal or as one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from kvrl.bench.figures import Figure
from kvrl.bench.settings import Settings
from kvrl.eval.report import to_json, widened
from kvrl.plan import size


@dataclass
class Result:
    """Sections are tables: rows of one shape, whose keys are the columns."""

    settings: Settings
    versions: dict[str, str]
    judged: bool = True
    """Whether its sizes are those of the bars: else figures have no verdict."""
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything, each figure with its verdict."""
        figures = [{**asdict(f), "verdict": f.verdict if self.judged else None} for f in self.figures]
        return to_json({"bench": self.settings.what, **asdict(self), "figures": figures}, indent=2)

    def print(self) -> None:
        """What was run, the tables, the figures beside their bars, and the notes."""
        console = widened(Console(highlight=False))
        s = self.settings
        cache = f"{s.policy}, budget {s.budget} + buffer {s.buffer}"
        console.print(f"kvrl bench {s.what}: {s.model}, {s.dtype}, {cache}, median of {s.repeats}", soft_wrap=True)
        console.print(", ".join(f"{k} {v}" for k, v in self.versions.items()), soft_wrap=True)
        for title, rows in self.sections.items():
            if rows:
                console.print(table(title, rows))
        for figure in self.figures:
            console.print(line(figure, self.judged), soft_wrap=True)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True, markup=False)


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of one shape; text to the left, numbers to the right."""
    out = Table(title=title, title_justify="left")
    for name in rows[0]:
        text = all(isinstance(row[name], str) for row in rows)
        out.add_column(name.removesuffix("_bytes").replace("_", " "), justify="left" if text else "right")
    for row in rows:
        out.add_row(*(cell(name, value) for name, value in row.items()))
    return out


def cell(name: str, value: Any) -> str:
    """A value as a table shows it: bytes by unit, shares in percent, other numbers in three digits or so."""
    if value is None:
        return "-"
    if isinstance(value, float | int) and name.endswith("_bytes"):
        return size(int(value))
    if isinstance(value, float):
        return f"{value:.1%}" if name.endswith("_share") else number(value)
    return str(value)


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def line(figure: Figure, judged: bool) -> str:
    """A figure, its bar and its verdict in one line."""
    shown = "not measured" if figure.value is None else f"{number(figure.value)} {figure.unit}"
    bar = "" if figure.bar is None else f"  bar: {figure.sense} {number(figure.bar)} {figure.unit}"
    return f"{figure.name:66s} {shown:>18s}{bar}" + (f"  {figure.verdict}" if judged and figure.verdict else "")
