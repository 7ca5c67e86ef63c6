"""KNorm: keep the keys of small norm."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy


class KNorm(Policy):
    """-|k|: keys of small norm receive much attention."""

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = "A simple and effective L2 norm-based strategy, arXiv 2406.11430"

    def score(self, entries: Entries) -> Tensor:
        return -entries.keys.norm(dim=-1)
