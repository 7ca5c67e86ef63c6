"""R-KV: keep what recent queries attend to and what no kept key repeats."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from kvrl.cache.policies.base import Entries, Policy, importance, masked_softmax
from kvrl.native.compaction import newest_similar


class RKV(Policy):
    """Importance against redundancy among the candidates: score = mix * I - (1 - mix) * R.

    I is the max-pooled attention of the newest `window` queries, R the softmax of each key's mean cosine
    similarity with the other candidates. Of the keys that a row finds similar, the newest is spared.
    """

    name: ClassVar[str] = "rkv"
    paper: ClassVar[str] = "R-KV, arXiv 2505.24133"

    kernel: int = Field(7, ge=1, description="width of the max pooling of I; odd")
    mix: float = Field(0.1, ge=0, le=1, description="lambda: weight of importance, the rest is redundancy")
    threshold: float = Field(0.5, ge=0, le=1, description="cosine similarity above which two keys count as repeated")

    @property
    def num_queries(self) -> int:
        return max(self.window, 1)

    def scratch_floats(self, heads: int, group: int, n: int, head_dim: int, *, native: bool) -> int:
        similarities = 0 if native else 3 * heads * n * n
        return super().scratch_floats(heads, group, n, head_dim, native=native) + similarities

    def score(self, entries: Entries) -> Tensor:
        attention = importance(entries, self.num_queries, "max", self.kernel)
        repeated = (redundancy_native if entries.native else redundancy)(
            entries.keys, entries.candidate, self.threshold
        )
        return self.mix * attention - (1 - self.mix) * repeated


def redundancy(keys: Tensor, candidate: Tensor, threshold: float) -> Tensor:
    """R of R-KV (section 3.3): keys [N, H, n, D], candidate [N, H, n] -> [N, H, n], sums to 1 over candidates."""
    unit = F.normalize(keys, dim=-1)
    similar = torch.matmul(unit, unit.transpose(-1, -2))  # [N, H, n, n]
    similar.diagonal(dim1=-2, dim2=-1).zero_()
    similar *= candidate[..., None, :] & candidate[..., :, None]
    n = similar.shape[-1]
    # 1-based slot of the newest entry above the threshold in each row, 0 if there is none
    newest = ((similar > threshold) * torch.arange(1, n + 1, device=keys.device)).amax(dim=-1)
    found = newest > 0
    slot = (newest - 1).clamp(min=0).unsqueeze(-1)  # [N, H, n, 1]
    similar.scatter_(-1, slot, similar.gather(-1, slot).masked_fill(found[..., None], 0.0))
    mean = similar.sum(dim=-2) / candidate.sum(dim=-1, keepdim=True)
    return masked_softmax(mean, candidate)


def redundancy_native(keys: Tensor, candidate: Tensor, threshold: float) -> Tensor:
    """The same without the matrix: sum_i u_i.u_j = (sum_i u_i).u_j, and only the newest similar keys are looked for."""
    unit = F.normalize(keys, dim=-1) * candidate[..., None]
    others = (unit * (unit.sum(dim=-2, keepdim=True) - unit)).sum(dim=-1)  # [N, H, n]
    mean = (others - newest_similar(unit, candidate, threshold)) / candidate.sum(dim=-1, keepdim=True)
    return masked_softmax(mean, candidate)
