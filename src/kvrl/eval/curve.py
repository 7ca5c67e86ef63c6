"""Accuracy against cache size: beacons, training-free policies, and the uncompressed model, full and cut short.

Sizes are matched: a policy's budget for a window c is the one at which completions as long as those that were made with
beacons of every c tokens hold as many entries on average (`sizes.matching`). The cut model's limit likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from kvrl.beacons.config import beacons_for
from kvrl.beacons.insert import insert
from kvrl.beacons.plan import Beacons
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import check_budget, make_policy
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import decode, rewards_of
from kvrl.eval.same_text import by_position, negative_logprob, newest, windows_alone
from kvrl.eval.sizes import auac, entries, matching, mean_held, mean_held_until, within
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.request import Progress
from kvrl.sampler.types import Rollout
from kvrl.tasks import Task, completion_text

UNCOMPRESSED, TRUNCATED = "uncompressed", "truncated"


@dataclass(frozen=True)
class Point:
    """One decoding of all problems."""

    decoding: str
    """`c=4`, `budget 40`, `limit 40`, or `full`."""
    accuracy: float
    held_entries: float
    """Entries that a decode step attended to, on average: the size."""
    held_entries_max: int
    tokens: float
    """Of a completion, on average."""
    truncated: float
    """Share of the completions that did not end by themselves."""
    retained: float | None = None
    """Accuracy as a share of the uncompressed model's."""


@dataclass(frozen=True)
class Cell:
    """A decoding that may hold so many entries at most, a completion that would need more ending there."""

    accuracy: float
    tokens: float


@dataclass(frozen=True)
class Curve:
    """What `kvrl eval --curve` measures. methods: name -> points, from the smallest to the largest cache."""

    problems: int
    full: Point
    methods: dict[str, list[Point]]
    limits: list[int]
    """Entries that may be held at most."""
    memory: dict[str, list[Cell | None]] = field(default_factory=dict)
    """decoding -> a cell for each limit; None where a policy cannot keep what must stay."""
    text: dict[str, float] = field(default_factory=dict)
    """decoding -> nats a token of the uncompressed model's completions: with beacons, with what beacons leave without
    them, and with policies that go by position; the others have no trace without sampling."""

    def auac(self) -> dict[str, float | None]:
        """Each method's area under its curve over the first method's sizes; None if that has one size alone."""
        sizes = [p.held_entries for p in next(iter(self.methods.values()))]
        return {
            name: auac([(p.held_entries, p.accuracy) for p in points], min(sizes), max(sizes))
            for name, points in self.methods.items()
        }

    def as_json(self) -> dict[str, Any]:
        """All numbers."""
        areas = self.auac()
        return {
            "problems": self.problems,
            "full": asdict(self.full),
            "methods": {
                name: {"auac": areas[name], "points": [asdict(p) for p in points]}
                for name, points in self.methods.items()
            },
            "memory": {
                "limits": self.limits,
                "decodings": {
                    name: [None if cell is None else asdict(cell) for cell in cells]
                    for name, cells in self.memory.items()
                },
            },
            "text": self.text,
        }


@dataclass(frozen=True)
class Decoder:
    """Decodes the same problems under any cache; whatever it has decoded once it keeps."""

    task: Task
    tokenizer: Any
    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    sampling: SamplingConfig
    seed: int
    slots: int
    on_step: Callable[[Progress], None] | None = None
    known: dict[Any, tuple[Point, list[Rollout]]] = field(default_factory=dict)

    def __call__(self, model: nn.Module, cache: CacheConfig, name: str) -> tuple[Point, list[Rollout]]:
        """The point and its rollouts."""
        key = (id(model), cache.model_dump_json())
        if key not in self.known:
            _, rollouts, rewards = decode(
                model, self.tokenizer, self.task, self.rows, self.prompts, cache=cache, sampling=self.sampling,
                seed=self.seed, slots=self.slots, on_step=self.on_step,
            )  # fmt: skip
            stats = rollouts[0].stats
            point = Point(
                name, float(rewards.nanmean()), stats["held_entries"], int(stats["held_entries_max"]),
                sum(len(r.completion_ids) for r in rollouts) / len(rollouts),
                sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
            )  # fmt: skip
            self.known[key] = (point, rollouts)
        return self.known[key]

    def cut(self, rollouts: Sequence[Rollout], limit: int) -> tuple[float, list[int]]:
        """Accuracy and tokens of completions that end where a decode step would hold more than `limit` entries."""
        lengths = [within(r, limit) for r in rollouts]
        texts = [self.text(r, n) for r, n in zip(rollouts, lengths, strict=True)]
        return float(rewards_of(self.task, self.rows, texts).nanmean()), lengths

    def text(self, r: Rollout, tokens: int) -> str:
        """What the reward reads of a completion's first tokens."""
        whole = tokens == len(r.completion_ids)
        return completion_text(self.tokenizer, r) if whole else self.tokenizer.decode(r.completion_ids[:tokens])

    def truncated(self, rollouts: Sequence[Rollout], limit: int) -> Point:
        """The point of full-cache completions that are cut so."""
        accuracy, lengths = self.cut(rollouts, limit)
        steps = [entries(r) for r in rollouts]
        most = max((int(s[s <= limit].max()) for s in steps if (s <= limit).any()), default=0)
        unfinished = sum(
            n < len(r.completion_ids) or r.finish_reason == "length" for r, n in zip(rollouts, lengths, strict=True)
        )
        return Point(
            f"limit {limit}", accuracy, mean_held_until(rollouts, limit), most, sum(lengths) / len(lengths),
            unfinished / len(rollouts),
        )  # fmt: skip


def measure(
    decoder: Decoder,
    beacons: dict[str, list[tuple[nn.Module, CacheConfig]]],
    teacher: nn.Module,
    baselines: dict[str, CacheConfig],
    limits: Sequence[int] | None = None,
) -> Curve:
    """The whole comparison.

    beacons: name of a curve -> models with the cache sections whose windows are decoded; the first curve's sizes are
    the ones that are matched. teacher: the uncompressed policy, on which the baselines run. baselines: name -> cache
    section, whose budget is set here. limits: entries that may be held at most (None: what each window of the first
    curve held).
    """
    full, whole = decoder(teacher, CacheConfig(policy="dense"), "full")
    methods: dict[str, list[Point]] = {}
    made: dict[str, list[Rollout]] = {}
    windows: dict[int, Beacons] = {}
    text = {UNCOMPRESSED: negative_logprob(teacher, whole, lambda r: r)}
    for name, models in beacons.items():
        points = []
        for model, cache in models:
            own = beacons_for(cache, model)
            for c in own.every:
                point, rollouts = decoder(model, cache.at_budget(f"c={c}"), f"c={c}")
                points.append(point)
                made[f"{name} c={c}"] = rollouts
                text[f"{name} c={c}"] = negative_logprob(model, whole, partial(insert, beacons=own.plan(c)))
                windows[c] = own.plan(c)
        methods[name] = points
    text |= {
        f"no beacons c={c}": negative_logprob(teacher, whole, partial(windows_alone, beacons=plan))
        for c, plan in windows.items()
    }
    first = next(iter(beacons))
    sizes = [(p.held_entries, made[f"{first} {p.decoding}"]) for p in methods[first]]
    limits = sorted({p.held_entries_max for p in methods[first]}) if limits is None else list(limits)
    for name, cache in baselines.items():
        fixed = [at_size(cache, size, like, decoder.prompts) for size, like in sizes]
        methods[name] = [decoder(teacher, one, f"budget {one.budget}")[0] for one in fixed]
        if by_position(cache):
            text |= {
                f"{name} {one.budget}": negative_logprob(teacher, whole, partial(newest, cache=one)) for one in fixed
            }
    longest = max(len(r.fed.ids) for r in whole)
    found = [matching(size, partial(mean_held_until, whole), longest) for size, _ in sizes]
    methods[TRUNCATED] = [decoder.truncated(whole, limit) for limit in found]
    memory: dict[str, list[Cell | None]] = {}
    for name, rollouts in {UNCOMPRESSED: whole, **made}.items():
        cut = [decoder.cut(rollouts, limit) for limit in limits]
        memory[name] = [Cell(accuracy, sum(lengths) / len(lengths)) for accuracy, lengths in cut]
    for name, cache in baselines.items():
        memory[name] = [under_limit(decoder, teacher, cache, limit) for limit in limits]
    return Curve(
        len(decoder.rows),
        retaining(full, full.accuracy),
        {name: [retaining(p, full.accuracy) for p in by_size(points)] for name, points in methods.items()},
        limits,
        memory,
        text,
    )


def by_size(points: list[Point]) -> list[Point]:
    return sorted(points, key=lambda p: p.held_entries)


def retaining(point: Point, full: float) -> Point:
    """The point with its share of the uncompressed accuracy."""
    return replace(point, retained=point.accuracy / full if full else None)


def at_size(cache: CacheConfig, size: float, like: Sequence[Rollout], prompts: Sequence[Sequence[int]]) -> CacheConfig:
    """The section at the budget that holds `size` entries on average over completions as long as `like`.

    Where the policy must keep more, at the least budget that it can have.
    """
    lengths = [len(r.prompt_ids) for r in like], [len(r.completion_ids) for r in like]
    most = max(len(r.fed.ids) for r in like)
    budget = matching(size, lambda b: mean_held(*lengths, b, cache.buffer), most)
    while not holds(cache.at_budget(budget), prompts):
        budget += 1
    return cache.at_budget(budget)


def holds(cache: CacheConfig, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether the budget can hold what must stay, of the longest prompt too."""
    try:
        policy = make_policy(cache)
        assert policy is not None
        check_budget(cache, policy, max(map(len, prompts)))
    except KvrlError:
        return False
    return True


def under_limit(decoder: Decoder, model: nn.Module, cache: CacheConfig, limit: int) -> Cell | None:
    """A policy that never holds more than `limit` entries: budget + buffer are it."""
    if limit <= cache.buffer or not holds(cache.at_budget(limit - cache.buffer), decoder.prompts):
        return None
    point, _ = decoder(model, cache.at_budget(limit - cache.buffer), f"budget {limit - cache.buffer}")
    return Cell(point.accuracy, point.tokens)
