"""Which entries stay: a stable sort on (protected, score, position), and whose scores choose together."""

from __future__ import annotations

from torch import Tensor

from kvrl.cache.config import Granularity


def pool_scores(score: Tensor, granularity: Granularity) -> Tensor:
    """Scores that choose together: [layers, g, H, n] -> the same shape, averaged within each set."""
    if granularity == "per_head":
        return score
    axes = (2,) if granularity == "per_layer" else (0, 2)
    return score.mean(dim=axes, keepdim=True).expand_as(score)


def keep_order(score: Tensor, protected: Tensor) -> Tensor:
    """Slots in the order in which they are kept, int64 [..., n].

    score f32 and protected bool [..., n], in position order. Protected slots come first whatever their
    score (contract 5: taken out of the candidates, never boosted), then the highest scores, newer first
    among equals.
    """
    n = score.shape[-1]
    newest_first = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = n - 1 - newest_first
    protected_first = protected.gather(-1, order).byte().sort(dim=-1, descending=True, stable=True).indices
    return order.gather(-1, protected_first)
