"""What a study shows: tables with intervals as Markdown, a plot, and all numbers as JSON."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrl.errors import KvrlError
from kvrl.eval.curve_report import curve_tables, summarise_curves
from kvrl.eval.interval import interval, markdown, shown
from kvrl.eval.outcome_plot import Line, plot
from kvrl.eval.report import to_json

if TYPE_CHECKING:
    from kvrl.eval.study import Outcome, Study

NUMBERS, TABLE, PLOT = "study.json", "table.md", "plot.png"
COLLAPSED = 0.5  # a run whose reward at the end is below this share of its reward at the beginning


def write_study(folder: Path, study: Study, results: dict[str, dict[str, Any]], say: Callable[[str], object]) -> None:
    """Write study.json, table.md and plot.png, and show the tables."""
    rows = {name: summarise(result) for name, result in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NUMBERS).write_text(to_json({"title": study.title, "variants": rows}, indent=2))
    text = "\n\n".join([main_table(rows), *curve_tables(rows), *decoding_table(rows), *tuning_table(rows)]) + "\n"
    (folder / TABLE).write_text(text)
    plot(folder / PLOT, [line_of(study, name, result) for name, result in results.items()])
    say(f"{study.title}\n\n{text}\nplot: {folder / PLOT}")


def line_of(study: Study, name: str, result: dict[str, Any]) -> Line:
    """What the figure shows of one variant."""
    outcomes: list[Outcome] = list(result["outcomes"].values())
    fields = {**study.overrides, **study.variants[name].overrides}
    return Line(
        name,
        [[s["reward"] for s in o.steps] for o in outcomes],
        [o.compressed for o in outcomes],
        [o.full for o in outcomes],
        full_cache_rollouts=fields.get("method") in ("dense", "breadcrumbs"),
    )


def publish(report: Path, folder: Path) -> None:
    """Put a study's tables into a page, and NAME.json and NAME.png beside it where the page links to them."""
    name = folder.name
    insert(report, name, (folder / TABLE).read_text())
    for file, published in ((NUMBERS, f"{name}.json"), (PLOT, f"{name}.png")):
        if f"]({published})" in report.read_text():
            shutil.copy(folder / file, report.parent / published)


def insert(report: Path, name: str, table: str) -> None:
    """Put a study's tables between its markers in a Markdown page. KvrlError if the page has none."""
    begin, end = markers(name)
    text = report.read_text()
    place = find_place(report, text, name)
    report.write_text(place.sub(lambda _: f"{begin}\n\n{table.strip()}\n\n{end}", text))


def markers(name: str) -> tuple[str, str]:
    """The lines of a page between which a study's tables stand."""
    return f"<!-- study: {name} -->", "<!-- end of study -->"


def find_place(report: Path, text: str, name: str) -> re.Pattern[str]:
    """The pattern of a study's place in a page's text. KvrlError if the page has none."""
    begin, end = markers(name)
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not place.search(text):
        raise KvrlError(f"--report: {report} has no lines {begin} and {end}; add them where the tables belong")
    return place


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """One variant's numbers over its seeds."""
    outcomes: list[Outcome] = list(result["outcomes"].values())
    norms = [[s["grad_norm"] for s in o.steps if "grad_norm" in s] for o in outcomes]
    rejected = [s["correction/share_rejected"] for o in outcomes for s in o.steps if "correction/share_rejected" in s]
    names = outcomes[0].decoded
    return {
        "values": result["values"],
        "tried": [{"values": t.values, "score": t.score} for t in result["tried"]],
        "seeds": list(result["outcomes"]),
        **{
            kind: interval([getattr(o, kind) for o in outcomes])
            for kind in ("start_compressed", "start_full", "compressed", "full")
        },
        "decoded": {name: interval([o.decoded[name] for o in outcomes]) for name in names},
        "collapsed": sum(collapsed([s["reward"] for s in o.steps]) for o in outcomes),
        "grad_norm_median": statistics.median([x for part in norms for x in part] or [math.nan]),
        "grad_norm_max": max([x for part in norms for x in part], default=math.nan),
        "share_rejected": statistics.mean(rejected) if rejected else None,
        "curve": summarise_curves(outcomes),
        "rewards": [[s["reward"] for s in o.steps] for o in outcomes],
    }


def collapsed(rewards: Sequence[float]) -> bool:
    """Whether the last tenth of a run has less than half of the reward of its first tenth."""
    part = max(1, len(rewards) // 10)
    return statistics.mean(rewards[-part:]) < COLLAPSED * statistics.mean(rewards[:part])


def main_table(rows: dict[str, dict[str, Any]]) -> str:
    """Accuracy at the end, settings, collapse, gradient norm, rejected share."""
    header = ["variant", "settings", "compressed decoding", "full-cache decoding", "by seed (compressed)", "collapsed",
              "gradient norm, median (max)", "rejected"]  # fmt: skip
    first = next(iter(rows.values()))
    body = [["(start)", "", shown(first["start_compressed"]), shown(first["start_full"]), "", "", "", ""]]
    for name, row in rows.items():
        share = row["share_rejected"]
        body.append([
            name, settings(row["values"]), shown(row["compressed"]), shown(row["full"]),
            " ".join(f"{v:.2f}".lstrip("0") for v in row["compressed"]["values"]),
            f"{row['collapsed']} of {len(row['seeds'])}",
            f"{row['grad_norm_median']:.2f} ({row['grad_norm_max']:.1f})", "" if share is None else f"{share:.1%}",
        ])  # fmt: skip
    return markdown(header, body)


def decoding_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Train cache against decoding cache, if the study has decodings."""
    names = list(next(iter(rows.values()))["decoded"])
    if not names:
        return []
    body = [[name, *(shown(row["decoded"][n]) for n in names)] for name, row in rows.items()]
    return [markdown(["trained under \\ decoded under", *names], body)]


def tuning_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Every setting that was tried, if any was, once: each field's turn begins from the best so far."""
    body = [
        [name, setting, f"{score:.3f}"]
        for name, row in rows.items()
        for setting, score in {settings(tried["values"]): tried["score"] for tried in row["tried"]}.items()
    ]
    return [markdown(["variant", "tried on the tuning seeds", "score"], body)] if body else []


def settings(values: dict[str, Any]) -> str:
    """`field value` pairs, as in YAML and without the sections' names."""
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {json.dumps(value)}" for key, value in values.items())
