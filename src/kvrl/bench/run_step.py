"""`kvrl bench step`: one GRPO step of kvrl, and of TRL's trainer with plain generation."""

from __future__ import annotations

import statistics

import torch

from kvrl.bench.figures import Figure, ratio
from kvrl.bench.peers import ask
from kvrl.bench.result import Result
from kvrl.bench.settings import GROUP
from kvrl.bench.step import MICRO_BATCH, prompts, step_costs

FASTER, TRACE_SHARE = 3.0, 0.01


def fill(result: Result, folder: str) -> None:
    """kvrl's steps, then each peer's, medians compared."""
    s = result.settings
    costs = step_costs(s, folder)
    seconds = statistics.median(c.seconds for c in costs)
    result.sections["GRPO step"] = [{
        "trainer": "kvrl", "completions": s.completions, "tokens_each": s.completion_length, "seconds": seconds,
        "rollout_seconds": statistics.median(c.rollout_seconds for c in costs),
    }]  # fmt: skip
    for peer in s.peers:
        taken = peer_step(result, peer, folder)
        figure = f"one step, {s.completions} completions of {s.completion_length:,} tokens: kvrl faster than {peer}"
        result.figures.append(Figure(figure, ratio(taken, seconds), bar=FASTER))
    share = statistics.median(c.trace_share for c in costs)
    name = "recording and carrying the trace, share of a step"
    result.figures.append(Figure(name, share, "", TRACE_SHARE, "at most"))


def peer_step(result: Result, name: str, folder: str) -> float | None:
    """Median seconds of a peer's step; None, with a note, if it could not run."""
    s = result.settings
    answer = ask(name, {
        "model": folder, "dtype": s.dtype, "threads": torch.get_num_threads(), "seed": s.seed, "prompts": prompts(s),
        "num_generations": GROUP, "completions": s.completions, "completion_length": s.completion_length,
        "micro_batch": MICRO_BATCH, "gradient_checkpointing": s.gradient_checkpointing, "steps": s.repeats,
    })  # fmt: skip
    if answer.result is None:
        result.notes.append(str(answer.note))
        return None
    result.versions |= {f"{name}: {package}": found for package, found in answer.result["versions"].items()}
    seconds = statistics.median(answer.result["seconds"])
    result.sections["GRPO step"].append({
        "trainer": name, "completions": s.completions, "tokens_each": s.completion_length, "seconds": seconds,
        "rollout_seconds": statistics.median(answer.result["rollout_seconds"]),
    })  # fmt: skip
    return seconds
