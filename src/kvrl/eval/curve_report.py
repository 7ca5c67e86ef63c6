"""What a study says of beacons: accuracy kept at each window, areas under the curves, and the distillation's cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvrl.eval.interval import interval, markdown, shown

if TYPE_CHECKING:
    from kvrl.eval.study import Outcome


def summarise_curves(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Intervals over the seeds; None for a variant without curves."""
    curves = [o.curve for o in outcomes if o.curve is not None]
    if not curves:
        return None
    overheads = [[s["breadcrumbs/overhead"] for s in o.steps if "breadcrumbs/overhead" in s] for o in outcomes]

    def over_seeds(value: Callable[..., float | None], *given: str) -> dict[str, Any] | None:
        found = [v for curve in curves if (v := value(curve, *given)) is not None]
        return interval(found) if found else None

    windows = sorted({p["decoding"] for p in curves[0]["methods"]["beacons"]["points"]}, key=lambda c: int(c[2:]))
    return {
        "full": over_seeds(lambda c: c["full"]["accuracy"]),
        "retained": {w: over_seeds(lambda c, w: point(c, w)["retained"], w) for w in windows},
        "held_entries": {w: over_seeds(lambda c, w: point(c, w)["held_entries"], w) for w in windows},
        "held_entries_full": over_seeds(lambda c: c["full"]["held_entries"]),
        "auac": {name: over_seeds(lambda c, n: c["methods"][n]["auac"], name) for name in curves[0]["methods"]},
        "overhead": interval([statistics.median(x) for x in overheads]) if all(overheads) else None,
        "minutes": interval([sum(s["seconds"] for s in o.steps) / 60 for o in outcomes]),
    }


def point(curve: dict[str, Any], decoding: str) -> dict[str, Any]:
    """The point of the beacons at one window."""
    return next(p for p in curve["methods"]["beacons"]["points"] if p["decoding"] == decoding)


def curve_tables(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Two tables, of accuracies kept and of areas, if any variant has curves."""
    curves = {name: row["curve"] for name, row in rows.items() if row["curve"] is not None}
    if not curves:
        return []
    windows = sorted({w for c in curves.values() for w in c["retained"]}, key=lambda w: int(w[2:]))
    methods = list(dict.fromkeys(m for c in curves.values() for m in c["auac"]))
    kept = [
        [name, optional(c["full"]), *(optional(c["retained"].get(w)) for w in windows), optional(c["overhead"]),
         optional(c["minutes"])]
        for name, c in curves.items()
    ]  # fmt: skip
    areas = [[name, *(optional(c["auac"].get(m)) for m in methods)] for name, c in curves.items()]
    return [
        markdown(["variant", "uncompressed", *(f"share kept, {w}" for w in windows), "overhead", "minutes"], kept),
        markdown(["variant", *(f"AUAC, {m}" for m in methods)], areas),
    ]


def optional(value: dict[str, Any] | None) -> str:
    """The interval, or nothing."""
    return "" if value is None else shown(value)
