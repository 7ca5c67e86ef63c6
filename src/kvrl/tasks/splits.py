"""Train and eval splits of a task whose problems are drawn at random, out of too many to list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvrl.errors import KvrlError

T = TypeVar("T")

HELD_OUT_SHARE = 0.1  # of all problems, by a hash of their key
DRAWS_PER_ROW = 40  # a split that is not drawn in that many has too few problems


def take(
    split: str,
    n: int,
    draws: Iterator[T],
    key: Callable[[T], str],
    *,
    limit: int | None = None,
    share: float = HELD_OUT_SHARE,
    remedy: str = "lower it, or widen the ranges of task.params",
) -> list[T]:
    """The first `n` problems of a split (`train` or `eval`) among the draws; those of `eval` are distinct.

    A problem belongs to one split, by a hash of its key, so none is in both, whatever the draws. Equal problems
    in other words (another order of the numbers) must have the same key.
    share: of all problems, that are held out.
    Errors: KvrlError for another split, and where `limit` draws (None: `DRAWS_PER_ROW * n + 1000`) do not give `n`
    problems.
    """
    if split not in ("train", "eval"):
        raise KvrlError(f"split: {split} is neither train nor eval; use one of them")
    chosen: list[T] = []
    seen: set[str] = set()
    limit = DRAWS_PER_ROW * n + 1000 if limit is None else limit
    for _ in range(limit):
        if len(chosen) == n:
            break
        problem = next(draws)
        name = key(problem)
        if is_held_out(name, share) != (split == "eval") or (split == "eval" and name in seen):
            continue
        seen.add(name)
        chosen.append(problem)
    if len(chosen) < n:
        raise KvrlError(f"{split}.n: {n} is above the {len(chosen)} {split} problems that {limit} draws gave; {remedy}")
    return chosen


def is_held_out(key: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether the problem of that key belongs to the eval split."""
    return _hash(key) < share * 2**32


def stream(split: str, seed: int) -> int:
    """A seed of 31 bits for the draws of a split: those of neighbouring seeds have nothing in common."""
    return _hash(f"{split} {seed}") >> 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
