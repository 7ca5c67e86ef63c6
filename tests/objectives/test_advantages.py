from __future__ import annotations

import math

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.objectives import group_advantages, overlong_penalty, rloo_advantages

NAN = math.nan


def test_group_scale_by_hand() -> None:
    # Group 1: mean 0.5, unbiased variance (4 * 0.25) / 3. Group 2: mean 2, unbiased variance (4 + 4) / 3.
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 2.0, 2.0, 4.0]), 4)
    first = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    second = 2.0 / (math.sqrt(8 / 3) + 1e-4)
    expected = torch.tensor([first, -first, -first, first, -second, 0.0, 0.0, second])
    torch.testing.assert_close(result.values, expected)
    assert result.values.dtype == torch.float32
    assert result.keep.all() and result.signal.all()
    assert (result.groups, result.groups_dropped, result.groups_without_signal, result.samples_dropped) == (
        2,
        0,
        0,
        0,
    )


def test_batch_scale_and_no_scale_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 3.0, 5.0])
    # All four: mean 2.25, squared deviations 1.5625 + 5.0625 + 0.5625 + 7.5625 = 14.75.
    batch = math.sqrt(14.75 / 3) + 1e-4
    values = group_advantages(rewards, 2, "batch").values
    torch.testing.assert_close(values, torch.tensor([0.5, -0.5, -1.0, 1.0]) / batch)
    values = group_advantages(rewards, 2, "none").values
    torch.testing.assert_close(values, torch.tensor([0.5, -0.5, -1.0, 1.0]))


def test_a_missing_reward_leaves_its_group() -> None:
    result = group_advantages(torch.tensor([1.0, NAN, 0.0, 5.0, 5.0, 8.0]), 3)
    value = 0.5 / (math.sqrt(0.5) + 1e-4)
    low, high = -1.0 / (math.sqrt(3.0) + 1e-4), 2.0 / (math.sqrt(3.0) + 1e-4)
    torch.testing.assert_close(result.values, torch.tensor([value, 0.0, -value, low, low, high]))
    assert result.keep.tolist() == [True, False, True, True, True, True]
    assert result.samples_dropped == 1 and result.groups_dropped == 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_with_fewer_than_two_rewards_is_dropped(scale: str) -> None:
    rewards = torch.tensor([NAN, 7.0, NAN, NAN, 1.0, 3.0])
    result = group_advantages(rewards, 2, scale)
    assert result.keep.tolist() == [False, False, False, False, True, True]
    assert result.signal.tolist() == result.keep.tolist()
    assert result.values[:4].tolist() == [0.0] * 4
    assert result.groups_dropped == 2 and result.groups_without_signal == 0 and result.samples_dropped == 4
    # The lone 7 must not widen the batch's deviation.
    divisor = 1.0 if scale == "none" else math.sqrt(2.0) + 1e-4
    torch.testing.assert_close(result.values[4:], torch.tensor([-1.0, 1.0]) / divisor)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_advantage_zero_exactly_and_stays(scale: str) -> None:
    # In float64 the mean of three 0.1 is not 0.1.
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5], dtype=torch.float64)
    result = group_advantages(rewards, 3, scale)
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.keep.all()
    assert result.signal.tolist() == [False, False, False, True, True, True]
    assert result.groups_without_signal == 1 and result.groups_dropped == 0
    assert result.metrics()["groups_without_signal"] == 1.0


def test_a_batch_without_any_signal_is_zero_not_nan() -> None:
    for scale in ("group", "batch", "none"):
        for rewards in ([1.0, 1.0, NAN, NAN], [NAN, NAN, NAN, NAN]):
            assert group_advantages(torch.tensor(rewards), 2, scale).values.tolist() == [0.0] * 4


def test_interleaved_group_ids_equal_consecutive_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 4.0, 0.5, 0.25, 2.0])
    consecutive = group_advantages(rewards, 3)
    order = torch.tensor([3, 0, 4, 1, 5, 2])
    mixed = group_advantages(rewards[order], torch.tensor([70, 30, 70, 30, 70, 30]))
    assert torch.equal(mixed.values, consecutive.values[order])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(KvrlError, match="num_generations: 4 does not divide the 6 rewards"):
        group_advantages(torch.zeros(6), 4)
    with pytest.raises(KvrlError, match="scale_rewards: 'std' is unknown"):
        group_advantages(torch.zeros(6), 3, "std")


def test_rloo_by_hand() -> None:
    # Each reward minus the mean of the other three, then of the other one.
    values = rloo_advantages(torch.tensor([1.0, 0.0, 2.0, 3.0]), 4).values
    torch.testing.assert_close(values, torch.tensor([1 - 5 / 3, -2.0, 2 - 4 / 3, 3 - 1.0]))
    assert values.dtype == torch.float32
    values = rloo_advantages(torch.tensor([1.0, 0.25]), 2).values
    torch.testing.assert_close(values, torch.tensor([0.75, -0.75]))


def test_rloo_leaves_missing_rewards_out_of_the_baselines() -> None:
    result = rloo_advantages(torch.tensor([1.0, NAN, 4.0, 0.0, 7.0, NAN, NAN, NAN]), 4)
    expected = torch.tensor([1 - 2.0, 0.0, 4 - 0.5, 0 - 2.5, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(result.values, expected)
    assert result.keep.tolist() == [True, False, True, True, False, False, False, False]
    assert (result.groups, result.groups_dropped, result.groups_without_signal, result.samples_dropped) == (2, 1, 0, 5)


def test_rloo_of_equal_rewards_is_zero_exactly_and_stays() -> None:
    result = rloo_advantages(torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.5], dtype=torch.float64), 3)
    assert result.values[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.keep.all() and result.signal.tolist() == [False] * 3 + [True] * 3
    assert result.groups_without_signal == 1


def test_rloo_with_interleaved_groups_and_against_its_definition() -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = torch.tensor([5, 9, 5, 9, 9, 5, 1, 1, 5, 9, 1, 9])
    values = rloo_advantages(rewards, groups).values
    for i in range(12):
        others = [rewards[j] for j in range(12) if j != i and groups[j] == groups[i]]
        assert values[i].item() == pytest.approx(float(rewards[i] - sum(others) / len(others)), rel=1e-6)
    with pytest.raises(KvrlError, match="num_generations: 5 does not divide the 12 rewards"):
        rloo_advantages(rewards, 5)


def test_overlong_penalty_by_hand() -> None:
    # max 100, cache 20: free up to 80, -1/2 at 90, -1 from 100 on.
    penalty = overlong_penalty(torch.tensor([0, 80, 81, 90, 100, 130]), 100, 20)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.05, -0.5, -1.0, -1.0]))


@pytest.mark.parametrize("cache", [0, 101])
def test_overlong_penalty_refuses_a_cache_outside_the_completion(cache: int) -> None:
    with pytest.raises(KvrlError, match=f"cache_length: {cache}"):
        overlong_penalty(torch.tensor([1]), 100, cache)
