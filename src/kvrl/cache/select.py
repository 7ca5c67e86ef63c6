"""Which entries stay: a stable sort on (protected, score, position), and whose scores choose together."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrl.cache.config import Granularity


def pool_scores(score: Tensor, granularity: Granularity) -> Tensor:
    """Scores that choose together: [layers, g, H, n] -> the same shape, averaged within each set."""
    if granularity == "per_head":
        return score
    axes = (2,) if granularity == "per_layer" else (0, 2)
    return score.mean(dim=axes, keepdim=True).expand_as(score)


def split_slots(score: Tensor, protected: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Slots that stay [..., budget] and slots that go [..., n - budget], int64, each in position order.

    score f32 and protected bool [..., n], in position order. Protected slots stay before all others whatever their
    score (contract 5: taken out of the candidates, never boosted), then the highest scores, newer first among equals.
    """
    n = score.shape[-1]
    newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = n - 1 - newest_first
    first = protected.gather(-1, order)
    place = torch.where(first, _count(first), first.sum(dim=-1, keepdim=True) + _count(~first))  # in the order kept
    stays = torch.zeros_like(protected).scatter(-1, order, place < budget)
    target = torch.where(stays, _count(stays), budget + _count(~stays))
    slot = torch.arange(n, device=score.device).expand_as(target)
    kept, gone = torch.empty_like(target).scatter(-1, target, slot).split([budget, n - budget], dim=-1)
    return kept, gone


def _count(x: Tensor) -> Tensor:
    """How many are true before each place."""
    return x.cumsum(dim=-1) - 1
