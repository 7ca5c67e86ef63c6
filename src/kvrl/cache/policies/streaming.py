"""StreamingLLM: attention sinks and the most recent entries."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy


class Streaming(Policy):
    """Sinks stay, then the newest entries; positions do not shift (unlike the paper's re-rotation)."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    window: int = Field(0, ge=0, description="newest entries that always stay (the score keeps them anyway)")

    def score(self, entries: Entries) -> Tensor:
        return entries.position.float()
