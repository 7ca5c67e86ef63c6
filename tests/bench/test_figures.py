"""Integrals and exponents against closed forms, verdicts, and how many sequences fit."""

from __future__ import annotations

import math

import pytest

from kvrl.bench.figures import (
    Figure,
    dense_sequences,
    fitted_exponent,
    integrated_seconds,
    ratio,
)


def test_linear_cost_is_integrated_exactly_and_beyond_the_points():
    # 1 / speed = 2 + 3 c: the integral from a to b is 2 (b - a) + 3 (b^2 - a^2) / 2
    points = [(c, 1 / (2 + 3 * c)) for c in (1.0, 2.5, 7.0)]
    for a, b in ((1.0, 7.0), (2.0, 3.0), (0.5, 9.0), (0.0, 0.5), (8.0, 10.0)):
        assert integrated_seconds(points, a, b) == pytest.approx(2 * (b - a) + 1.5 * (b * b - a * a))


def test_cost_with_a_bend():
    # 1 / speed is 1 at 0, 3 at 2 and level from there: 4 up to the bend, then 3 for each token
    points = [(0.0, 1.0), (2.0, 1 / 3), (10.0, 1 / 3)]
    assert integrated_seconds(points, 0.0, 10.0) == pytest.approx(4 + 24)
    assert integrated_seconds(points, 1.0, 12.0) == pytest.approx(2.5 + 30)


def test_one_point_is_a_constant_speed():
    assert integrated_seconds([(5.0, 20.0)], 0.0, 100.0) == pytest.approx(5)


@pytest.mark.parametrize("power", [1.0, 1.7, 2.0])
def test_exponent_of_a_power(power):
    lengths = [1000, 2000, 5000]
    assert fitted_exponent(lengths, [0.3 * n**power for n in lengths]) == pytest.approx(power)


def test_exponent_is_the_least_squares_slope():
    # logs (0, 0), (1, 1), (2, 3): slope 3 / 2
    assert fitted_exponent([1, math.e, math.e**2], [1, math.e, math.e**3]) == pytest.approx(1.5)


@pytest.mark.parametrize(("value", "sense", "verdict"), [
    (2.0, "at least", "ok"), (1.99, "at least", "MISSED"), (2.0, "at most", "ok"), (2.01, "at most", "MISSED"),
    (None, "at most", None),
])  # fmt: skip
def test_verdicts(value, sense, verdict):
    assert Figure("f", value, bar=2.0, sense=sense).verdict == verdict
    assert Figure("f", value).verdict is None


def test_ratio_needs_both():
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None and ratio(3.0, None) is None


def test_sequences_of_a_full_cache_by_hand():
    # SmolLM2-135M in bf16: 30 layers x 3 heads x 64 numbers x 2 (K and V) x 2 bytes = 23,040 bytes a token
    assert dense_sequences(23_040, 2 << 30, 8064) == 11
    assert dense_sequences(100, 10_000, 50) == 2
    assert dense_sequences(100, 9_999, 50) == 1
    assert dense_sequences(100, 10, 50) == 1
