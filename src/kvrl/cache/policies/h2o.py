"""H2O: heavy hitters of the attention so far, and the recent half."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvrl.cache.policies.base import Entries, Observation, Policy, attention_probs

_QUERY_BLOCK = 64  # bounds the attention matrix that a prompt's chunk holds at once


class H2O(Policy):
    """Attention mass over all past queries, summed over the query group; `window` is half the budget unless set."""

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O, arXiv 2306.14048"
    gathers_state: ClassVar[bool] = True

    @classmethod
    def defaults(cls, budget: int) -> dict[str, int]:
        return {"window": budget // 2}

    def score(self, entries: Entries) -> Tensor:
        assert entries.state is not None
        return entries.state

    def observe(self, state: Tensor, seen: Observation) -> None:
        for start in range(0, seen.q.shape[2], _QUERY_BLOCK):
            rows = slice(start, start + _QUERY_BLOCK)
            visible = seen.visible if seen.visible.shape[2] == 1 else seen.visible[:, :, rows]
            probs = attention_probs(seen.q[:, :, rows], seen.k, visible, seen.scaling, seen.softcap)
            state += probs.sum(dim=(2, 3))
