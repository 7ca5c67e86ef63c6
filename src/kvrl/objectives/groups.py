"""Which samples answer the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrl.errors import KvrlError


def group_index(groups: int | Tensor, rewards: Tensor) -> tuple[Tensor, int]:
    """Group of each sample as 0..G-1 [N], and G, for rewards [N].

    groups: [N] integer group of each sample (groups may be interleaved), or `num_generations` for consecutive
    groups of that size. Raises KvrlError if `num_generations` does not divide N.
    """
    size = rewards.shape[0]
    if isinstance(groups, int):
        if groups < 1 or size % groups:
            raise KvrlError(
                f"num_generations: {groups} does not divide the {size} rewards of the batch; "
                "give every prompt the same number of completions, or pass the group of each sample"
            )
        return torch.arange(size, device=rewards.device) // groups, size // groups
    unique, index = groups.to(rewards.device).unique(return_inverse=True)
    return index, unique.numel()
