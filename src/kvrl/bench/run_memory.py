"""`kvrl bench memory`: K and V with and without a budget, the process's peak, and what the trace takes."""

from __future__ import annotations

import statistics

from kvrl.bench.figures import Figure, ratio
from kvrl.bench.memory import RolloutMemory, rollout_memory
from kvrl.bench.result import Result
from kvrl.bench.step import step_costs

KV_SHARE, PEAK_FALL, TRACE_BYTES, TRACE_SHARE = 1 / 12, 0.95, 2.0, 0.01


def fill(result: Result, folder: str) -> None:
    """Both caches in processes of their own, then a step for the share of time that the trace takes."""
    s = result.settings
    full = rollout_memory(s, folder, dense=True)
    small = rollout_memory(s, folder, dense=False)
    result.sections[f"rollout of {s.slots} sequences of {s.tokens:,} tokens"] = [
        {"policy": m.policy, "kv_bytes": m.kv_bytes, "peak_above_the_model_bytes": m.peak_bytes} for m in (full, small)
    ]
    result.sections["trace of one sequence"] = [
        {"evictions_bytes": small.trace_bytes, "positions_bytes": small.trace_position_bytes,
         "layers_x_heads_x_tokens": small.trace_entries}
    ]  # fmt: skip
    costs = step_costs(s, folder)
    result.sections["trace in a GRPO step"] = [
        {"completions": s.completions, "tokens_each": s.completion_length, "step_seconds": c.seconds,
         "trace_seconds": c.trace_seconds, "trace_share": c.trace_share, "trace_bytes": c.trace_bytes}
        for c in costs
    ]  # fmt: skip
    result.figures += figures(full, small, statistics.median(c.trace_share for c in costs))


def figures(full: RolloutMemory, small: RolloutMemory, trace_share: float) -> list[Figure]:
    """The bars. The peak is to fall by the bytes that K and V fall by, or more."""
    fall = ratio(full.peak_bytes - small.peak_bytes, full.kv_bytes - small.kv_bytes)
    return [
        Figure("KV bytes, budget over full cache", small.kv_bytes / full.kv_bytes, "", KV_SHARE, "at most"),
        Figure("fall of the process's peak over fall of the KV bytes", fall, "", PEAK_FALL, "at least"),
        Figure("trace bytes for each layer, KV head and token", small.trace_bytes / small.trace_entries, "bytes",
               TRACE_BYTES, "at most"),
        Figure("recording and carrying the trace, share of a step", trace_share, "", TRACE_SHARE, "at most"),
    ]  # fmt: skip
