"""How the samples of an optimiser step are cut into forward and backward passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_TOKENS = 16_384
"""Padded tokens of one pass, unless a configuration says otherwise."""

PASS = 256
"""Padded tokens that cost as much as a further pass: what a layer's kernels take to start, and to read its weights."""


def micro_batches(
    lengths: Sequence[int], max_tokens: int, units: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Indices of each pass, cut so that padding and passes cost least; at most `max_tokens` padded, one unit at least.

    lengths: tokens of each sample, by index. units: indices that stay together (default: every sample alone). Passes
    hold samples of like length: the cuts of the sorted units with the least sum of rows times longest sample, plus
    PASS for each pass.
    """
    if units is None:
        units = [[i] for i in range(len(lengths))]
    longest = [max(lengths[i] for i in unit) for unit in units]
    order = sorted(range(len(units)), key=longest.__getitem__)
    costs, starts = [0, *[math.inf] * len(order)], [0] * (len(order) + 1)  # of the first `end` units, cut as is best
    for end in range(1, len(order) + 1):
        rows = 0
        for start in reversed(range(end)):
            rows += len(units[order[start]])
            tokens = rows * longest[order[end - 1]]
            if start < end - 1 and tokens > max_tokens:
                break
            if (cost := costs[start] + tokens + PASS) <= costs[end]:  # of equals the one with fewer passes
                costs[end], starts[end] = cost, start
    parts, end = [], len(order)
    while end:
        parts.append([i for u in order[starts[end] : end] for i in units[u]])
        end = starts[end]
    return parts[::-1]


def fed_lengths(rollouts: Sequence) -> list[int]:
    """All that is fed of each rollout, beacons too."""
    return [r.trace.num_tokens for r in rollouts]
