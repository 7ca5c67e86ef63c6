"""The runs that `kvrl bench rollout` compares, and the measurements that each needs of each engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrl.bench.figures import dense_sequences, integrated_seconds
from kvrl.bench.settings import Settings

MAX_SEQUENCES = 256  # of a full-cache peer, however short its context: vLLM's own default


@dataclass(frozen=True)
class Point:
    """One measurement: decode steps of some sequences after a prompt of `context` tokens, each repeated."""

    sequences: int
    context: int
    steps: int
    repeats: int
    evicting: bool = False
    """Whether its sequences fill their slots, so that `steps` hold a compaction each."""

    @property
    def middle(self) -> float:
        """The context that the measured speed stands for."""
        return self.context + self.steps / 2


Speeds = Mapping[Point, float]
"""Tokens per second, all sequences together."""


@dataclass(frozen=True)
class Case:
    """One run that every engine is asked for: sequences that grow from `start` to `end` tokens."""

    name: str
    start: int
    end: int
    contexts: tuple[int, ...]
    """Where speed is measured; a single one: the run itself."""
    sequences: int | None
    """None: as many as fit into the bytes."""
    bars: Mapping[str, float | None]
    """Who is measured beside kvrl, and how many times faster kvrl must be."""

    @property
    def new_tokens(self) -> int:
        return self.end - self.start

    @property
    def full(self) -> bool:
        """Whether the run is measured itself, and not integrated."""
        return len(self.contexts) == 1

    def speed(self, points: list[Point], speeds: Speeds) -> float:
        """Tokens per second over the whole run."""
        if self.full:
            return speeds[points[0]]
        return self.new_tokens / self.seconds(points, speeds, self.end)

    def seconds(self, points: list[Point], speeds: Speeds, end: int) -> float:
        """Time for each sequence's tokens up to `end`: `integrated_seconds` before the slots are full and after."""
        parts = {flag: [(p.middle, speeds[p]) for p in points if p.evicting is flag] for flag in (False, True)}
        full = min((p.context for p in points if p.evicting), default=end) if parts[False] else self.start
        stops = {False: (self.start, min(full, end)), True: (max(full, self.start), end)}
        return sum(integrated_seconds(parts[flag], a, b) for flag, (a, b) in stops.items() if a < b)


def make_cases(s: Settings) -> dict[str, Case]:
    """The bars' cases, and the one whose integral is compared with a full run."""
    start = s.prompt_length

    def within(end: int) -> tuple[int, ...]:
        return tuple(c for c in s.contexts if c <= end)

    memory, fixed, check, short = (start + n for n in (s.new_tokens, s.fixed_tokens, s.check_tokens, s.short_tokens))
    cases = [
        Case("equal memory", start, memory, within(memory), None,
             {"vllm": 4.0, "generate": 8.0, "kvpress": 5.0}),
        Case("fixed number", start, fixed, within(fixed), s.sequences, {"vllm": 1.5, "generate": 4.0}),
        Case("check: integral", start, check, within(check), s.sequences, {"vllm": None, "generate": None}),
        Case("check: full run", start, check, (start,), s.sequences, {"vllm": None, "generate": None}),
        Case("nothing evicted", start, short, (start,), s.short_sequences,
             {"vllm": 1.0, "generate": None, "continuous": None}),
    ]  # fmt: skip
    return {case.name: case for case in cases}


def points_of(case: Case, who: str, s: Settings, slots: int, token_bytes: int) -> list[Point]:
    """What must be measured. slots: kvrl's at equal memory; token_bytes: K and V of one token in a full cache."""
    if case.full:
        assert case.sequences is not None
        return [Point(case.sequences, case.start, case.new_tokens, 1)]
    if who == "kvrl":
        # Compaction begins all at once where a slot is full: a point there, and one that ends before
        capacity = s.budget + s.buffer
        ends = {max(case.start, s.budget - s.buffer), capacity} if case.start < capacity < case.end else set()
        n = case.sequences or slots
        room = {c: s.buffer if c >= capacity else min(s.buffer, capacity - c - 2) for c in {*case.contexts, *ends}}
        return [Point(n, c, room[c], s.repeats, c >= capacity) for c in sorted(room) if room[c] > 0]
    if who == "kvpress":  # its cache, too, is between budget and budget + buffer whatever the context
        return [Point(case.sequences or slots, s.budget, s.buffer, s.repeats)]
    out = []
    for context in case.contexts:
        longest = case.end if s.fit == "end" else context + s.peer_steps * s.repeats
        sequences = case.sequences or min(dense_sequences(token_bytes, s.kv_memory, longest), MAX_SEQUENCES)
        out.append(Point(sequences, context, s.peer_steps, s.repeats))
    return out
