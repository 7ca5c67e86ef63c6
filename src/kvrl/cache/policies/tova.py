"""TOVA: drop what the newest query attends to least."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from kvrl.cache.config import Granularity
from kvrl.cache.policies.base import Entries, Policy, attention_probs


class TOVA(Policy):
    """Attention of the newest query, averaged over all heads: one set for each layer.

    The paper evicts at every token (`buffer: 1`) and protects nothing (`sinks: 0, window: 0`).
    """

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "TOVA, arXiv 2401.06104"

    window: int = Field(1, ge=0, description="newest entries that always stay")
    granularity: Granularity = Field("per_layer", description="whose scores choose together")

    @property
    def num_queries(self) -> int:
        return 1

    def score(self, entries: Entries) -> Tensor:
        assert entries.queries is not None
        every = torch.ones_like(entries.candidate)[:, :, None]
        probs = attention_probs(entries.queries, entries.keys, every, entries.scaling, entries.softcap)
        return probs.mean(dim=(2, 3))  # [N, H, n]
