"""Random retention (a control)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy
from kvrl.streams import fold, uniform


class Random(Policy):
    """A uniform score from the request's own stream, so that evictions do not depend on batch mates."""

    name: ClassVar[str] = "random"
    paper: ClassVar[str] = "control, as in arXiv 2605.06850"

    def score(self, entries: Entries) -> Tensor:
        heads = torch.arange(entries.position.shape[1], device=entries.stream.device)
        key = fold(entries.stream[:, None], heads)  # [N, H]
        return uniform(fold(key[..., None], entries.position.long())).float()
