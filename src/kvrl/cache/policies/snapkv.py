"""SnapKV: keep what the newest queries attend to."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy, importance


class SnapKV(Policy):
    """Pooled attention of the newest queries.

    Between the chunks of a prompt the paper's setting (64 queries, average pooling 5), while decoding the
    one of R-KV's comparison (8 queries, max pooling 7).
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV, arXiv 2404.14469"

    window: int = Field(8, ge=1, description="newest entries that always stay, and whose queries vote, while decoding")
    kernel: int = Field(7, ge=1, description="width of the max pooling while decoding; odd")
    prompt_window: int = Field(64, ge=1, description="the window between two chunks of a prompt")
    prompt_kernel: int = Field(5, ge=1, description="width of the average pooling between two chunks of a prompt; odd")

    @property
    def num_queries(self) -> int:
        return max(self.window, self.prompt_window)

    def window_at(self, in_prompt: bool) -> int:
        return self.prompt_window if in_prompt else self.window

    def score(self, entries: Entries) -> Tensor:
        if entries.in_prompt:
            return importance(entries, self.prompt_window, "avg", self.prompt_kernel)
        return importance(entries, self.window, "max", self.kernel)
