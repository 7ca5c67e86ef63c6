"""Advantages from the rewards of a group, and the penalty for completions that nearly fill their length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.objectives.groups import group_index

ScaleRewards = Literal["group", "batch", "none"]

STD_EPSILON = 1e-4  # TRL's


@dataclass(frozen=True)
class Advantages:
    """Advantages of one rollout batch of N samples, and what happened to its groups."""

    values: Tensor
    """[N] float32; 0 for dropped samples."""
    keep: Tensor
    """[N] bool; False if the reward is missing or the group was dropped: take the tokens out of the mask."""
    signal: Tensor
    """[N] bool; True for the kept samples of groups whose rewards differ: what dynamic sampling asks for."""
    groups: int
    """Groups in the batch."""
    groups_dropped: int
    """Groups left with fewer than two rewards."""
    groups_without_signal: int
    """Kept groups whose rewards are all equal: advantage 0, tokens and KL terms stay."""
    samples_dropped: int
    """Samples with keep False."""

    def metrics(self) -> dict[str, float]:
        """The counts, for the log."""
        return {
            "groups_dropped": float(self.groups_dropped),
            "groups_without_signal": float(self.groups_without_signal),
            "samples_dropped": float(self.samples_dropped),
        }


def group_advantages(rewards: Tensor, groups: int | Tensor, scale_rewards: ScaleRewards = "group") -> Advantages:
    """Reward minus the mean of its group, divided by a standard deviation (arXiv 2402.03300, section 4.1.2).

    rewards: [N] float, NaN = missing (a None reward): the sample leaves its group, whose statistics are
    taken over the rest. groups: [N] integer group of each sample (groups may be interleaved), or
    `num_generations` for consecutive groups of that size. scale_rewards, as in TRL: "group" divides by the
    group's unbiased standard deviation + 1e-4, "batch" by that of all kept rewards + 1e-4 (arXiv
    2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783). Raises KvrlError if `num_generations` does
    not divide N, and for an unknown `scale_rewards`.
    """
    if scale_rewards not in ("group", "batch", "none"):
        raise KvrlError(f"scale_rewards: {scale_rewards!r} is unknown; use one of 'group', 'batch', 'none'")
    group = _Centred(rewards, groups)
    values, counts, index = group.values, group.counts, group.index

    if scale_rewards == "group":
        squares = values.new_zeros(counts.numel()).index_add(0, index, values.square())  # [G]
        std = (squares / (counts - 1).clamp(min=1)).sqrt()  # [G]
        values = values / (std[index] + STD_EPSILON)
    elif scale_rewards == "batch" and group.signal.any():
        values = values / (rewards[group.keep].double().std() + STD_EPSILON)
    return group.advantages(values)


def rloo_advantages(rewards: Tensor, groups: int | Tensor) -> Advantages:
    """Reward minus the mean reward of the group's other samples (leave one out: RLOO, arXiv 2402.14740).

    rewards: [N] float, NaN = missing: the sample leaves its group and the others' baselines. groups: as in
    `group_advantages`. Nothing is divided by a standard deviation. Raises KvrlError if `num_generations` does
    not divide N.
    """
    group = _Centred(rewards, groups)
    # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean): equal rewards give 0 exactly.
    factor = group.counts / (group.counts - 1).clamp(min=1)  # [G]
    return group.advantages(group.values * factor[group.index])


class _Centred:
    """Rewards minus their group's mean, what is missing, and what is equal: common to both estimators."""

    def __init__(self, rewards: Tensor, groups: int | Tensor) -> None:
        self.index, count_groups = group_index(groups, rewards)  # [N]
        index, present = self.index, ~rewards.isnan()  # [N]
        self.counts = rewards.new_zeros(count_groups, dtype=torch.long).index_add(0, index, present.long())  # [G]
        self.kept_group = self.counts >= 2  # [G]
        self.keep = present & self.kept_group[index]  # [N]

        values = torch.where(self.keep, rewards, 0).double()  # [N]
        totals = values.new_zeros(count_groups).index_add(0, index, values)  # [G]
        means = totals / self.counts.clamp(min=1)  # [G]

        # Equality is asked of the rewards themselves: the mean of equal floats need not be one of them.
        kept_index, kept_values = index[self.keep], values[self.keep]
        low = values.new_full((count_groups,), torch.inf).scatter_reduce(0, kept_index, kept_values, "amin")  # [G]
        high = values.new_full((count_groups,), -torch.inf).scatter_reduce(0, kept_index, kept_values, "amax")  # [G]
        self.varied = self.kept_group & (low != high)  # [G]
        self.signal = self.keep & self.varied[index]  # [N]
        self.values = torch.where(self.signal, values - means[index], 0)  # [N] float64

    def advantages(self, values: Tensor) -> Advantages:
        """The result for advantages [N]."""
        return Advantages(
            values=values.float(),
            keep=self.keep,
            signal=self.signal,
            groups=self.counts.numel(),
            groups_dropped=int((~self.kept_group).sum()),
            groups_without_signal=int((self.kept_group & ~self.varied).sum()),
            samples_dropped=int((~self.keep).sum()),
        )


def overlong_penalty(lengths: Tensor, max_completion_length: int, cache_length: int) -> Tensor:
    """Soft overlong punishment, to be added to the rewards (DAPO, arXiv 2503.14476, eq. 13).

    lengths: [N] tokens of each completion -> [N] float32: 0 up to max_completion_length - cache_length,
    from there linearly down to -1 at max_completion_length, -1 beyond. Raises KvrlError unless 1 <=
    cache_length <= max_completion_length.
    """
    if not 1 <= cache_length <= max_completion_length:
        raise KvrlError(
            f"cache_length: {cache_length} must lie between 1 and max_completion_length "
            f"({max_completion_length}); choose the number of last tokens over which the penalty grows"
        )
    over = lengths.float() - (max_completion_length - cache_length)  # [N]
    return -(over / cache_length).clamp(0.0, 1.0)
