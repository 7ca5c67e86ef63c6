"""`kvrl parity`: the figures, the bars and the exit code."""

from __future__ import annotations

import json

import pytest
import torch

from kvrl.attention.replay import ReplayContext
from kvrl.cache.config import CacheConfig
from kvrl.cli import main
from kvrl.eval.parity import Figures


def run(capsys, *flags: str) -> tuple[int, dict]:
    code = main(["parity", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_figures_by_hand():
    figures = Figures.of(torch.arange(1, 201).flip(0) / 100)
    assert (figures.max, figures.mean, figures.p99) == pytest.approx((2.0, 1.005, 1.98))


def test_bars_hold_on_tiny_models(capsys):
    code, report = run(capsys, "--model", "tiny:gemma2", "--policy", "rkv,recent")
    assert code == 0 and report["passed"]
    assert [(r["model"], r["policy"]) for r in report["reports"]] == [
        (f"gemma2/window{w}", p) for w in (8, 40) for p in ("rkv", "recent")
    ]
    for r in report["reports"]:
        assert r["max_abs_logp_diff"] <= 1e-4 and r["oracle_max_abs_logp_diff"] <= 3 * r["stock_error"]
        assert r["dense_mean_abs_logp_diff"] > 1e-2 and r["evictions"] == 13 and r["tokens"] == 120
        assert set(r["backends"]) == {"mask", "segments"}


def test_a_broken_replay_misses_the_bar(capsys, monkeypatch):
    class Broken(ReplayContext):
        def __init__(self, traces, *args, **kwargs):
            super().__init__(None if kwargs["backend"] == "segments" else traces, *args, **kwargs)

    monkeypatch.setattr("kvrl.views.ReplayContext", Broken)
    code, report = run(capsys, "--model", "tiny:llama", "--policy", "rkv")
    assert code == 1 and not report["passed"]
    backends = report["reports"][0]["backends"]
    assert backends["segments"]["max"] > 1e-2 > backends["mask"]["max"]


def test_bfloat16_has_a_noise_floor(capsys):
    code, report = run(capsys, "--model", "tiny:llama", "--policy", "knorm", "--dtype", "bfloat16")
    (r,) = report["reports"]
    assert code == 0 and r["tokens"] >= 4000 and r["oracle_max_abs_logp_diff"] is None
    assert r["mean_abs_logp_diff"] <= 1.15 * r["noise_floor"]["mean"] and r["noise_floor"]["mean"] > 0


@pytest.mark.parametrize("flags, message", [
    (["--policy", "rvk"], "did you mean 'rkv'"),
    (["--model", "tiny:lama"], "'lama' is not one of llama"),
    (["--model", "tiny:llama", "--budget", "5"], "at least 12"),
    (["--model", "tiny:llama", "--policy", "recent", "--budget", "100"], "82 tokens, so nothing is evicted; lower"),
])  # fmt: skip
def test_mistakes(capsys, flags, message):
    assert main(["parity", *flags]) == 2
    assert message in capsys.readouterr().err


def test_layers_that_are_all_rings_pass_and_say_that_nothing_was_evicted(capsys):
    code, report = run(capsys, "--model", "tiny:mistral", "--policy", "recent")
    ring, slot = report["reports"]
    assert code == 0 and ring["evictions"] == 0 and ring["passed"] and slot["evictions"] > 0 and slot["note"] is None
    assert ring["note"].startswith("nothing was evicted: every layer keeps its sliding window")


def test_a_policy_that_evicts_nothing_does_not_pass(capsys, monkeypatch):
    from kvrl.eval import parity

    sample = parity.sample
    dense = CacheConfig(policy="dense")
    monkeypatch.setattr(parity, "sample", lambda subject, cache, seed: sample(subject, dense, seed))
    assert main(["parity", "--model", "tiny:llama", "--policy", "recent"]) == 1
    assert "MISSED  (nothing was evicted)" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_beacons(capsys, family):
    code, report = run(capsys, "--model", f"tiny:{family}", "--policy", "beacon,recent")
    assert code == 0 and report["passed"]
    for r in report["reports"]:
        assert r["max_abs_logp_diff"] <= 1e-4 and r["oracle_max_abs_logp_diff"] <= 3 * r["stock_error"]
        if r["policy"] == "beacon":
            assert r["evictions"] > 20 and r["budget"] == r["buffer"] == 0
        assert set(r["backends"]) == {"mask", "segments"}
    (r,) = run(capsys, "--model", "tiny:llama", "--policy", "beacon", "--every", "10")[1]["reports"]
    assert r["evictions"] == 9  # three in each of three completions of 40


@pytest.mark.parametrize("flags, message", [
    (["--every", "4"], "--every: chooses the windows of beacons, and --policy is all"),
    (["--policy", "beacon", "--every", "39"], "--every: no window of llama's completions of 40 tokens closes; lower"),
    (["--policy", "beacon", "--every", "41"], "--every: 41 is over --max_completion_length (40)"),
])  # fmt: skip
def test_mistakes_with_beacons(capsys, flags, message):
    assert main(["parity", "--model", "tiny:llama", *flags]) == 2
    assert message in capsys.readouterr().err
