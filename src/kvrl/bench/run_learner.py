"""`kvrl bench learner`: forward and backward under the trace against the dense view, time and peak memory by length."""

from __future__ import annotations

from kvrl.bench.figures import Figure, fitted_exponent
from kvrl.bench.learner import LearnerCost, learner_cost
from kvrl.bench.result import Result
from kvrl.views import View

EXPONENT = 1.1
# At most so many times the dense learner's, at the lengths of the bars
TIME, PEAK = {2048: 1.05, 8192: 0.5}, {8192: 1.0}
VIEWS: tuple[View, ...] = ("sparse", "dense")


def fill(result: Result, folder: str) -> None:
    """Measure both views at each length, each in a process of its own."""
    s = result.settings
    costs: dict[tuple[View, int], LearnerCost] = {}
    rows = result.sections["learner, forward and backward of one sequence"] = []
    for tokens in s.lengths:
        for view in VIEWS:
            costs[view, tokens] = learner_cost(
                folder, s.dtype, view=view, backend="segments", tokens=tokens, budget=s.budget, buffer=s.buffer,
                checkpointing=s.gradient_checkpointing, repeats=s.repeats,
            )  # fmt: skip
        sparse, dense = costs["sparse", tokens], costs["dense", tokens]
        rows.append({
            "tokens": tokens, "replay_seconds": sparse.seconds, "dense_seconds": dense.seconds,
            "replay_peak_bytes": sparse.peak_bytes, "dense_peak_bytes": dense.peak_bytes,
        })  # fmt: skip
        result.figures += [
            Figure(f"{tokens:,} tokens: replay's time over the dense learner's", sparse.seconds / dense.seconds,
                   bar=TIME.get(tokens), sense="at most"),
            Figure(f"{tokens:,} tokens: replay's peak memory over the dense learner's",
                   sparse.peak_bytes / dense.peak_bytes if dense.peak_bytes else None, bar=PEAK.get(tokens),
                   sense="at most"),
        ]  # fmt: skip
    for view in VIEWS:
        seconds = [costs[view, tokens].seconds for tokens in s.lengths]
        result.figures.append(Figure(
            f"{'replay' if view == 'sparse' else 'dense'}: exponent of time against length",
            fitted_exponent(s.lengths, seconds), "", EXPONENT if view == "sparse" else None, "at most",
        ))  # fmt: skip
