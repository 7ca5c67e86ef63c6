"""What is measured for each case, how it becomes a run's speed, and the settings behind it."""

from __future__ import annotations

import argparse

import pytest

from helpers import cache, model
from kvrl.attention.probe import prepare
from kvrl.bench.cases import Case, Point, make_cases, points_of
from kvrl.bench.rollout import most_slots, slots_within
from kvrl.bench.settings import Settings
from kvrl.cli import build_parser
from kvrl.errors import KvrlError

TOKEN = 23_040  # bytes of SmolLM2-135M's K and V of one token


def settings(*argv: str) -> Settings:
    args: argparse.Namespace = build_parser().parse_args(["bench", *argv])
    return Settings.of(args)


def test_slots_in_bytes_by_hand():
    # 640 entries of 23,040 bytes: 145.6 rows in 2 GiB, one of them for staging, and a multiple of 4
    assert most_slots(640 * TOKEN, 2 << 30) == 144
    assert most_slots(10, 100) == 8
    assert most_slots(10, 59) == 4
    assert most_slots(10, 40) == 3
    assert most_slots(10, 5) == 1


def test_slots_of_a_model_fit_and_the_next_do_not():
    lm = prepare(model())
    config, bytes_of = lm.config, lm.dtype.itemsize
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 32 * bytes_of  # 24 + 8 entries
    assert slots_within(lm, cache(), 9 * slot, 100) == 8
    assert slots_within(lm, cache(), 9 * slot - 1, 100) == 4


def test_points_at_equal_memory():
    s = settings("rollout")
    case = make_cases(s)["equal memory"]
    own = points_of(case, "kvrl", s, 144, TOKEN)
    assert [p.context for p in own] == [64, 384, 640, 1000, 2000, 4000, 6000, 8000]
    assert {(p.sequences, p.steps, p.repeats) for p in own} == {(144, 128, 3)}
    assert [p.context for p in own if p.evicting] == [640, 1000, 2000, 4000, 6000, 8000]
    dense = points_of(case, "vllm", s, 144, TOKEN)
    assert [p.context for p in dense] == [64, 1000, 2000, 4000, 6000, 8000]
    assert {(p.sequences, p.steps) for p in dense} == {(11, 16)}
    assert points_of(case, "kvpress", s, 144, TOKEN) == [Point(144, 512, 128, 3)]


def test_full_caches_that_fit_anew_at_each_context():
    s = settings("rollout", "--fit", "each")
    dense = points_of(make_cases(s)["equal memory"], "generate", s, 144, TOKEN)
    # 2 GiB are 93,206 tokens of K and V; 48 of each sequence are decoded, and 256 sequences are the most
    assert [p.sequences for p in dense] == [256, 88, 45, 23, 15, 11]


def test_fixed_number_of_sequences():
    s = settings("rollout")
    case = make_cases(s)["fixed number"]
    for who in ("kvrl", "vllm"):
        assert {p.sequences for p in points_of(case, who, s, 144, TOKEN)} == {16}
    assert [p.context for p in points_of(case, "vllm", s, 144, TOKEN)] == [64, 1000, 2000, 4000]


def test_a_full_run_is_one_measurement():
    s = settings("rollout")
    short = make_cases(s)["nothing evicted"]
    for who in ("kvrl", "vllm"):
        assert points_of(short, who, s, 144, TOKEN) == [Point(128, 64, 128, 1)]
    point = Point(128, 64, 128, 1)
    assert short.speed([point], {point: 250.0}) == 250.0


def test_a_runs_speed_by_hand():
    # 10 ms a token at the middle of the first measurement (context 10), 30 ms at that of the second (110)
    case = Case("c", 10, 110, (8, 108), 4, {})
    first, second = Point(4, 8, 4, 1), Point(4, 108, 4, 1)
    speeds = {first: 100.0, second: 100 / 3}
    assert case.seconds([first, second], speeds, 60) == pytest.approx(50 * 0.015)
    assert case.speed([first, second], speeds) == pytest.approx(50.0)


def test_compaction_begins_where_the_slots_are_full():
    # 10 ms a token at 10 and 14 ms at 50 (so 15 ms at 60), then 20 ms from 60 on: 50 x 12.5 ms and 40 x 20 ms
    case = Case("c", 10, 100, (8, 90), 4, {})
    points = [Point(4, 8, 4, 1), Point(4, 48, 4, 1), Point(4, 60, 4, 1, True), Point(4, 90, 4, 1, True)]
    speeds = dict(zip(points, (100.0, 1000 / 14, 50.0, 50.0), strict=True))
    assert case.seconds(points, speeds, 100) == pytest.approx(50 * 0.0125 + 40 * 0.02)
    assert case.seconds(points, speeds, 60) == pytest.approx(50 * 0.0125)
    assert case.seconds(points[2:], speeds, 100) == pytest.approx(90 * 0.02)  # full from the start


def test_what_is_measured_before_a_slot_is_full_holds_no_compaction():
    s = settings("rollout", "--contexts", "64,600,639,640")
    own = points_of(make_cases(s)["equal memory"], "kvrl", s, 144, TOKEN)
    assert [(p.context, p.steps, p.evicting) for p in own] == [
        (64, 128, False), (384, 128, False), (600, 38, False), (640, 128, True)
    ]  # fmt: skip


def test_defaults_of_each_benchmark():
    assert settings("rollout").repeats == 3 and settings("step").repeats == 1
    assert settings("step").completions == 32 and settings("memory").completions == 8
    assert settings("rollout", "--kv_memory", "1GiB", "--peers").kv_memory == 1 << 30
    assert settings("rollout", "--peers", "vllm,kvpress").peers == ("vllm", "kvpress")
    assert settings("step", "--peers").peers == ("trl",)
    assert settings("rollout", "--peers", "all").peers == ("vllm", "generate", "continuous", "kvpress")
    assert settings("learner", "--quick", "--lengths", "80,100").lengths == (80, 100)


@pytest.mark.parametrize(("argv", "message"), [
    (["rollout", "--contexts", "64"], "--contexts: 64 alone"),
    (["rollout", "--contexts", "900,1000", "--new_tokens", "100"], "--contexts: 900 is beyond the run's end at 164"),
    (["rollout", "--new_tokens", "20"], "--contexts: 1000 is beyond the run's end at 84"),
    (["learner", "--lengths", "640,1280"], "--lengths: 640,1280 must be two lengths or more, each above 640"),
    (["learner", "--lengths", "128"], "--lengths: 128 must be"),
    (["step", "--completions", "12"], "--completions: 12 is not a multiple"),
    (["memory", "--tokens", "640"], "--tokens: 640 fit into budget 512 + buffer 128"),
    (["rollout", "--peers", "vlm"], "--peers: 'vlm' is not one of vllm"),
    (["rollout", "--peers", "generate,trl"], "--peers: 'trl' is not one of vllm"),
    (["step", "--peers", "vllm"], "--peers: 'vllm' is not one of trl; name"),
])  # fmt: skip
def test_sizes_that_measure_nothing(argv, message):
    with pytest.raises(KvrlError, match=message.replace("+", r"\+")):
        settings(*argv)
