"""Mixtures of experts: record which experts each token took, so that flips between sampler and learner show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kvrl.attention.probe import causal_lm, find_routers, text_config


class RoutingRecorder:
    """Keeps the expert indices of the newest forward, one tensor [tokens, top_k] for each MoE layer."""

    def __init__(self) -> None:
        self.newest: list[Tensor] = []

    @classmethod
    @contextlib.contextmanager
    def attached(cls, model: nn.Module, *, batch_invariant: bool) -> Iterator[RoutingRecorder | None]:
        """Record inside the block; None for a model without routers.

        batch_invariant: every token's experts are computed on their own (`batched_mm`); the default groups
        tokens by expert, and a token's bits would depend on its batch mates (contract 4).
        """
        routers = find_routers(model)
        if not routers:
            yield None
            return
        recorder, lm = cls(), causal_lm(model)
        before = text_config(model)._experts_implementation
        if batch_invariant:
            lm.set_experts_implementation("batched_mm")
        handles = [routers[0].register_forward_pre_hook(lambda *_: recorder.newest.clear())]
        handles += [m.register_forward_hook(lambda m, a, out: recorder.newest.append(out[-1])) for m in routers]
        try:
            yield recorder
        finally:
            lm.set_experts_implementation(before)
            for handle in handles:
                handle.remove()

    def at(self, row: int, width: int) -> Tensor:
        """Experts of one row of the newest forward, which had `width` tokens: int16 [moe_layers, top_k]."""
        return torch.stack([layer.view(width, -1)[row] for layer in self.newest]).to(torch.int16).cpu()


def flipped(sampler: Tensor, learner: Tensor) -> float:
    """Share of (layer, token) pairs whose set of experts differs: both [moe_layers, tokens, top_k]."""
    return (sampler.sort(dim=-1).values != learner.sort(dim=-1).values).any(dim=-1).float().mean().item()
