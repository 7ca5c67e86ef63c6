"""KeyDiff: keep the keys that differ most from the average key."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy


class KeyDiff(Policy):
    """-cos(k, mean of the normalised keys)."""

    name: ClassVar[str] = "keydiff"
    paper: ClassVar[str] = "KeyDiff, arXiv 2504.15364"

    def score(self, entries: Entries) -> Tensor:
        unit = F.normalize(entries.keys, dim=-1)
        return -F.cosine_similarity(unit, unit.mean(dim=-2, keepdim=True), dim=-1)
