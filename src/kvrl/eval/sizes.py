"""How many KV entries completions hold, and budgets at which caches of different kinds hold as many.

An entry is one of a layer and KV head. A decode step attends to what its slot holds, the entry just stored included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvrl.cache.trace import occupancy
from kvrl.sampler.types import Rollout


def entries(r: Rollout) -> Tensor:
    """What each decode step of a rollout attended to, int64 [steps]: beacons' steps too, the first token has none.

    By the first layer's first head: with the full cache and under beacons all hold the same.
    """
    query = torch.arange(len(r.prompt_ids), len(r.fed.ids) - 1)  # [steps]; the last token has no forward
    gone = r.trace.evicted_at()[0, 0].long().sort().values  # [fed tokens]
    return query + 1 - torch.searchsorted(gone, query, right=True)


def within(r: Rollout, limit: int) -> int:
    """Tokens of a completion that are sampled while no decode step holds more than `limit` entries."""
    if len(r.prompt_ids) > limit:
        return 0
    over = (entries(r) > limit).nonzero()[:, 0]
    if not len(over):
        return len(r.completion_ids)
    first = len(r.prompt_ids) + int(over[0])
    return int((r.fed.predictor < first).sum())


def mean_held(prompts: Sequence[int], tokens: Sequence[int], budget: int, buffer: int) -> float:
    """Entries that a decode step holds on average if completions of so many tokens are made under a budget."""
    held = [occupancy(p + i, budget, buffer) + 1 for p, n in zip(prompts, tokens, strict=True) for i in range(n - 1)]
    return sum(held) / max(1, len(held))


def mean_held_until(rollouts: Sequence[Rollout], limit: int) -> float:
    """The same for full-cache completions that stop where a step would hold more than `limit` entries."""
    kept = torch.cat([entries(r) for r in rollouts])
    kept = kept[kept <= limit]
    return float(kept.double().mean()) if len(kept) else 0.0


def matching(size: float, held: Callable[[int], float], most: int) -> int:
    """The budget from 1 to `most` at which the mean entries `held(budget)`, which grow with it, are nearest to `size`.

    Of two that are as near the larger.
    """
    low, high = 1, max(1, most)
    while low < high:  # the least budget that holds `size`
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= size else (middle + 1, high)
    return low - 1 if low > 1 and size - held(low - 1) < held(low) - size else low


def auac(points: Sequence[tuple[float, float]], low: float, high: float) -> float | None:
    """Area under accuracy against cache size between two sizes, divided by their distance: a mean accuracy.

    points: (entries, accuracy), joined by straight lines and level beyond the outermost. None where low is high.
    The measure is that of Breadcrumbs (arXiv 2510.13797, AUAC); the range and its division are ours.
    """
    if not low < high:
        return None
    sizes, accuracies = map(np.array, zip(*sorted(points), strict=True))
    at = np.unique(np.clip(np.concatenate([sizes, [low, high]]), low, high))
    height = np.interp(at, sizes, accuracies)
    return float(((height[1:] + height[:-1]) / 2 * np.diff(at)).sum() / (high - low))
