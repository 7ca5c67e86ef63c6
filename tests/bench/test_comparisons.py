"""Figures from given measurements, by hand: ratios, flatness, roofline, exponents, memory; the peak of a process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import model
from kvrl.attention.probe import prepare, probe
from kvrl.bench.cases import Case, Point, make_cases, points_of
from kvrl.bench.figures import Figure
from kvrl.bench.machine import Machine, matrix_weights
from kvrl.bench.memory import RolloutMemory
from kvrl.bench.process import PeakMemory
from kvrl.bench.result import Result, cell, line
from kvrl.bench.rollout import DecodeSpeed
from kvrl.bench.run_memory import figures
from kvrl.bench.run_rollout import compare, exponents, own_figures, wanted
from kvrl.bench.settings import Settings

S = Settings(peers=("vllm", "kvpress"))
TOKEN = 23_040


def speeds_of(case: Case, who: str, cost: float, slope: float = 0.0) -> tuple[dict, dict]:
    """Points of one case and tokens per second whose inverse is cost + slope * context."""
    points = {case.name: points_of(case, who, S, 144, TOKEN)}
    return points, {p: 1 / (cost + slope * p.middle) for p in points[case.name]}


def values(result: Result) -> dict[str, float | None]:
    return {f.name: f.value for f in result.figures}


def test_ratios_and_the_integrals_check():
    result, cases = Result(S, {}), make_cases(S)
    points = {who: {n: points_of(c, who, S, 144, TOKEN) for n, c in cases.items() if who == "kvrl" or who in c.bars}
              for who in ("kvrl", "kvpress")}  # fmt: skip
    speeds = {who: {p: speed for p in wanted(points[who])} for who, speed in (("kvrl", 300.0), ("kvpress", 50.0))}
    full = points["kvrl"]["check: full run"][0]
    speeds["kvrl"][full] = 240.0
    compare(result, cases, points, speeds)
    found = values(result)
    assert found["equal memory, 8,000 new tokens each: kvrl over kvpress"] == pytest.approx(6)
    assert found["equal memory, 8,000 new tokens each: kvrl over vllm"] is None  # asked for, and not measured
    assert "nothing evicted, 128 new tokens each: kvrl over kvpress" not in found
    assert found["kvrl: integral against a full run, difference"] == pytest.approx(300 / 240 - 1)
    row = next(r for r in result.sections["runs"] if r["engine"] == "kvpress")
    assert row["sequences"] == 144 and row["kvrl_faster_by"] == pytest.approx(6)


def test_exponents():
    result, case = Result(S, {}), make_cases(S)["equal memory"]
    own, level = speeds_of(case, "kvrl", 0.01)
    dense, growing = speeds_of(case, "vllm", 0.0, 1e-5)
    exponents(result, case, {"kvrl": own, "vllm": dense}, {"kvrl": level, "vllm": growing})
    found = values(result)
    assert found["kvrl: exponent of time against length, 936 to 7,936 new tokens"] == pytest.approx(1)
    ends = np.array([1000, 2000, 4000, 6000, 8000])  # the time from 64 to c goes with c^2 - 64^2
    slope = np.polyfit(np.log(ends - 64), np.log(ends**2 - 64**2), 1)[0]
    assert found["vllm: exponent of time against length, 936 to 7,936 new tokens"] == pytest.approx(slope)


def test_flatness_and_roofline():
    def decoded(context: int, speed: float, share: float) -> tuple[Point, DecodeSpeed]:
        return Point(8, context, 128, 3, context >= 640), DecodeSpeed(8, context, 576, speed, 0.1, 0.05, share, 1)

    measured = dict(
        [decoded(64, 999.0, 0.9), decoded(640, 999.0, 0.8), decoded(1000, 200.0, 0.7), decoded(8000, 190.0, 0.5)]
    )
    result = Result(S, {})
    own_figures(result, list(measured), measured)
    assert values(result) == {
        "decode step over the roofline, 8 sequences at 8,000": pytest.approx(2.0),
        "tokens/s at 8,000 over tokens/s at 1,000": pytest.approx(0.95),
    }
    assert [f.verdict for f in result.figures] == ["MISSED", "ok"]
    result = Result(replace(S, contexts=(64, 8000)), {})
    own_figures(result, list(measured), measured)
    assert not result.figures and "flatness needs" in result.notes[0]


def test_roofline_by_hand():
    lm = prepare(model())
    spec = probe(lm)
    weights, kv = matrix_weights(lm), 2 * spec.num_layers * spec.kv_heads * spec.head_dim * 10 * 4 * 3
    slow_products = Machine(bandwidth=1e15, matrix_rate=1e3)
    assert slow_products.decode_seconds(lm, spec, 3, 10) == pytest.approx(2 * weights * 3 / 1e3)
    slow_memory = Machine(bandwidth=1e3, matrix_rate=1e15)
    assert slow_memory.decode_seconds(lm, spec, 3, 10) == pytest.approx((4 * weights + kv) / 1e3)


def test_memory_bars_by_hand():
    full = RolloutMemory("dense", 1200, 1500, 0, 0, 1)
    small = RolloutMemory("rkv", 100, 400, 60, 8, 30)
    kv, fall, trace, share = figures(full, small, 0.02)
    assert kv.value == pytest.approx(1 / 12) and kv.verdict == "ok"
    assert fall.value == 1.0 and fall.verdict == "ok"
    assert trace.value == 2.0 and trace.verdict == "ok"
    assert share.verdict == "MISSED"


def test_the_peak_of_a_process_counts_from_now():
    device, mib = torch.device("cpu"), 1 << 20
    torch.ones(80 * mib // 4)  # freed: what was held before does not count
    peak = PeakMemory(device)
    torch.ones(40 * mib // 4)
    assert 39 * mib < peak.bytes < 60 * mib


def test_what_a_table_shows():
    given = [("kv_bytes", 3 << 20), ("a_share", 0.051), ("x", 1234.5), ("x", 0.01234), ("x", None)]
    assert [cell(*each) for each in given] == ["3.00 MiB", "5.1%", "1,234", "0.0123", "-"]
    shown = line(Figure("KV bytes", 0.9, "", 1 / 12, "at most"), judged=True)
    assert " ".join(shown.split()) == "KV bytes 0.9 bar: at most 0.0833 MISSED"
    assert "MISSED" not in line(Figure("KV bytes", 0.9, "", 1 / 12, "at most"), judged=False)
    assert "not measured" in line(Figure("KV bytes", None, "x", 2.0), judged=True)
