"""`kvrl bench rollout`: tokens per second at equal KV memory, against length, and against other engines."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch

from kvrl.attention.probe import prepare, probe, text_config
from kvrl.bench.cases import Case, Point, Speeds, make_cases, points_of
from kvrl.bench.figures import Figure, fitted_exponent, ratio
from kvrl.bench.machine import Machine
from kvrl.bench.peers import ask
from kvrl.bench.result import Result
from kvrl.bench.rollout import DecodeSpeed, decode_speed, random_prompt, slots_within
from kvrl.cache.config import CacheConfig
from kvrl.train.setup import load_model

ROOFLINE, FLATNESS, EXPONENT, INTEGRAL = 1.6, 0.95, 1.1, 0.05


def fill(result: Result, folder: str) -> None:
    """Measure kvrl, then each peer, and compare."""
    s = result.settings
    cache = CacheConfig(policy=s.policy, budget=s.budget, buffer=s.buffer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepare(load_model(folder, s.dtype, merge=True, field="--model")[0].to(device)).eval()
    machine = Machine.measure(next(model.parameters()).dtype, device, floats=s.read_floats, side=s.matrix_side)
    limits = {"bandwidth_GB_s": machine.bandwidth / 1e9, "matrix_GFLOP_s": machine.matrix_rate / 1e9}
    result.sections["machine"] = [limits]
    spec, cases = probe(model), make_cases(s)
    token_bytes = 2 * spec.num_layers * spec.kv_heads * spec.head_dim * next(model.parameters()).element_size()
    slots = slots_within(model, cache, s.kv_memory, s.prompt_length + s.new_tokens)

    def points(who: str) -> dict[str, list[Point]]:
        return {
            name: points_of(case, who, s, slots, token_bytes) for name, case in cases.items()
            if who == "kvrl" or who in case.bars
        }  # fmt: skip

    decoded: dict[Point, DecodeSpeed] = {}
    for point in wanted(points("kvrl")):
        decoded[point] = measured(model, machine, cache, point, s.seed)
    speeds: dict[str, Speeds] = {"kvrl": {p: d.tokens_per_second for p, d in decoded.items()}}
    result.sections["kvrl, decode"] = [decode_row(d) for d in decoded.values()]
    prompt = random_prompt(text_config(model).vocab_size, max(s.contexts) + s.budget, s.seed)
    del model
    for peer in s.peers:
        found = peer_speeds(result, peer, wanted(points(peer)), folder, prompt)
        if found:
            speeds[peer] = found
    compare(result, cases, {who: points(who) for who in speeds}, speeds)
    own_figures(result, points("kvrl")["equal memory"], decoded)
    exponents(result, cases["equal memory"], {who: points(who) for who in speeds}, speeds)


def wanted(points: dict[str, list[Point]]) -> list[Point]:
    """Each measurement once, whatever cases share it."""
    return list(dict.fromkeys(point for of_case in points.values() for point in of_case))


def measured(model: torch.nn.Module, machine: Machine, cache: CacheConfig, point: Point, seed: int) -> DecodeSpeed:
    """The repeat whose speed is the median (the lower one of two)."""
    n, context, steps = point.sequences, point.context, point.steps
    runs = [
        decode_speed(model, machine, cache, slots=n, context=context, steps=steps, seed=seed + i)
        for i in range(point.repeats)
    ]
    return sorted(runs, key=lambda run: run.tokens_per_second)[(len(runs) - 1) // 2]


def decode_row(d: DecodeSpeed) -> dict[str, Any]:
    """A line of the table: step over roofline is of the mean step, compaction included."""
    return {
        "sequences": d.slots, "context": d.context, "entries": d.entries, "tokens_per_second": d.tokens_per_second,
        "step_ms": 1e3 * d.step_seconds, "compaction_share": d.compaction_share,
        "step_over_roofline": 1 / d.roofline_share, "kv_bytes": d.kv_bytes,
    }  # fmt: skip


def peer_speeds(result: Result, name: str, points: list[Point], folder: str, prompt: list[int]) -> Speeds | None:
    """What a peer's driver measured at these points, noted in the result; None if it could not run."""
    s = result.settings
    answer = ask(name, {
        "model": folder, "dtype": s.dtype, "threads": torch.get_num_threads(), "seed": s.seed, "kv_bytes": s.kv_memory,
        "budget": s.budget, "buffer": s.buffer, "prompt": prompt, "points": [asdict(p) for p in points],
    })  # fmt: skip
    if answer.result is None:
        result.notes.append(str(answer.note))
        return None
    result.versions |= {f"{name}: {package}": found for package, found in answer.result["versions"].items()}
    speeds = {
        point: statistics.median(found["tokens_per_second"])
        for point, found in zip(points, answer.result["points"], strict=True)
    }
    result.sections[f"{name}, decode"] = [
        {"sequences": p.sequences, "context": p.context, "steps": p.steps, "tokens_per_second": speed}
        for p, speed in speeds.items()
    ]
    return speeds


def compare(
    result: Result, cases: dict[str, Case], points: dict[str, dict[str, list[Point]]], speeds: dict[str, Speeds]
) -> None:
    """Each case's run: every engine's tokens per second and how many times faster kvrl is."""
    rows = result.sections["runs"] = []
    totals: dict[tuple[str, str], float] = {}
    for name, case in cases.items():
        for who in ("kvrl", *(peer for peer in case.bars if peer in result.settings.peers)):
            total = case.speed(points[who][name], speeds[who]) if who in speeds else None
            if total is not None:
                totals[name, who] = total
                rows.append({
                    "case": name, "engine": who, "sequences": max(p.sequences for p in points[who][name]),
                    "new_tokens": case.new_tokens, "how": "full run" if case.full else "integral",
                    "tokens_per_second": total, "kvrl_faster_by": totals[name, "kvrl"] / total,
                })  # fmt: skip
            if who != "kvrl" and not name.startswith("check"):
                faster = ratio(totals[name, "kvrl"], total)
                figure = f"{name}, {case.new_tokens:,} new tokens each: kvrl over {who}"
                result.figures.append(Figure(figure, faster, bar=case.bars[who]))
    for who in speeds:
        if ("check: integral", who) in totals:
            off = abs(totals["check: integral", who] / totals["check: full run", who] - 1)
            result.figures.append(
                Figure(f"{who}: integral against a full run, difference", off, "", INTEGRAL, "at most")
            )


def own_figures(result: Result, points: list[Point], decoded: dict[Point, DecodeSpeed]) -> None:
    """kvrl's step against the roofline, and its speed at the longest context against that where evictions begin."""
    s = result.settings
    level = [decoded[p] for p in points if p.evicting and p.context in s.contexts]
    if len(level) < 2:
        result.notes.append(
            f"--contexts: flatness needs two lengths of at least budget + buffer ({s.budget + s.buffer})"
        )
        return
    first, last = level[0], level[-1]
    result.figures += [
        Figure(f"decode step over the roofline, {last.slots} sequences at {last.context:,}", 1 / last.roofline_share,
               bar=ROOFLINE, sense="at most"),
        Figure(f"tokens/s at {last.context:,} over tokens/s at {first.context:,}",
               last.tokens_per_second / first.tokens_per_second, bar=FLATNESS),
    ]  # fmt: skip


def exponents(result: Result, case: Case, points: dict[str, dict[str, list[Point]]], speeds: dict[str, Speeds]) -> None:
    """How each engine's time for a run grows with its length, over lengths that outgrow the budget."""
    s = result.settings
    ends = [c for c in case.contexts if c >= s.budget + s.buffer]
    if len(ends) < 2:
        return
    for who, found in speeds.items():
        if case.name in points[who]:
            lengths = [end - case.start for end in ends]
            seconds = [case.seconds(points[who][case.name], found, end) for end in ends]
            result.figures.append(Figure(
                f"{who}: exponent of time against length, {lengths[0]:,} to {lengths[-1]:,} new tokens",
                fitted_exponent(lengths, seconds), "", EXPONENT if who == "kvrl" else None, "at most",
            ))  # fmt: skip
