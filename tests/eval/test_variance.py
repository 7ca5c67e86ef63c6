"""`kvrl variance`: the figures by hand, what they must show on a tiny model, and the refusals."""

from __future__ import annotations

import json
import math

import pytest
import torch

import kvrl
from helpers import cache, make_prompts, model, replay, sampling
from kvrl.cli import main, parse_lengths
from kvrl.eval import variance
from kvrl.eval.variance import ess_share, log10_bound, log_ratios, spread, spreads


def test_figures_of_two_sequences_by_hand():
    # ratios 2 and 1/2 in the first sequence, 1 and 4 in the second: weights 1 and 4
    log_ratio = torch.tensor([[2.0, 0.5], [1.0, 4.0]], dtype=torch.float64).log()
    s = spread("dense", log_ratio)
    assert (s.learner, s.length) == ("dense", 2)
    assert s.mean == pytest.approx(math.log(4) / 2)
    assert s.std == pytest.approx(math.log(4) / math.sqrt(2))
    assert s.max_abs == pytest.approx(math.log(4))
    assert s.ess_share == pytest.approx(25 / (2 * 17))
    assert s.d == pytest.approx((4 + 0.25 + 1 + 16) / 4 - 1)
    assert s.log10_bound == pytest.approx(math.log10(5.3125**2 - 1))


def test_lengths_are_prefixes():
    log_ratio = torch.tensor([[2.0, 0.5], [1.0, 4.0]], dtype=torch.float64).log()
    first, second = spreads("dense", log_ratio, [1, 2])
    assert first.mean == pytest.approx(math.log(2) / 2) and first.d == pytest.approx(1.5)
    assert second == spread("dense", log_ratio)


def test_effective_samples_in_logs():
    assert ess_share(torch.full((5,), -2000.0, dtype=torch.float64)) == pytest.approx(1)
    assert ess_share(torch.tensor([3000.0, 0.0, -1.0, 5.0], dtype=torch.float64)) == pytest.approx(1 / 4)


def test_the_bound_beyond_the_range_of_floats():
    assert log10_bound(1.0, 3) == pytest.approx(math.log10(7))
    assert log10_bound(9.0, 2000) == pytest.approx(2000)
    assert log10_bound(1e-12, 1) == pytest.approx(-12)
    assert log10_bound(0.0, 10) is None and log10_bound(-1e-9, 10) is None


def test_log_ratios_are_learner_minus_sampler_whatever_the_micro_batch(monkeypatch):
    prompts = make_prompts([4, 18, 7])
    rollouts = kvrl.rollout(model(), prompts, cache=cache(), sampling=sampling(40), seed=3)
    expected = {
        view: replay(model(), rollouts, view=view).double() - kvrl.sampler_logprobs(rollouts).double()
        for view in ("sparse", "dense")
    }
    for tokens in (10_000, 1):
        monkeypatch.setattr(variance, "SCORED_TOKENS", tokens)
        for view, ratio in expected.items():
            torch.testing.assert_close(log_ratios(model(), rollouts, view), ratio, atol=1e-5, rtol=0)
    assert expected["dense"].sum(1).abs().max() > 0.1 > 1e-3 > expected["sparse"].sum(1).abs().max()


def run(capsys, tmp_path, *flags: str) -> dict:
    assert main(["variance", "--json", "--output", str(tmp_path / "v.png"), *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_spread_grows_for_a_dense_learner_and_not_for_replay(capsys, tmp_path):
    result = run(capsys, tmp_path, "--lengths", "120,30,60", "--n", "6")
    rows = {(r["learner"], r["length"]): r for r in result["rows"]}
    assert sorted(rows) == sorted((k, n) for k in ("dense", "replay", "floor") for n in (30, 60, 120))
    assert (result["model"], result["samples"], result["budget"], result["buffer"]) == ("tiny:llama", 6, 24, 8)
    dense = [rows["dense", n] for n in (30, 60, 120)]
    assert 0.1 < dense[0]["std"] < dense[1]["std"] < dense[2]["std"]
    assert dense[2]["ess_share"] < 0.5 and dense[2]["log10_bound"] > 2
    for kind in ("replay", "floor"):
        assert all(rows[kind, n]["std"] < 1e-3 and rows[kind, n]["ess_share"] > 0.999 for n in (30, 60, 120))
    assert (tmp_path / "v.png").read_bytes().startswith(b"\x89PNG")


def test_the_floor_has_no_eviction_and_sequences_reach_the_longest_length(capsys, tmp_path, monkeypatch):
    seen = []
    sample = variance.sample
    monkeypatch.setattr("kvrl.sampler.engine.eos_ids", lambda model: list(range(97)))  # every token would end one
    monkeypatch.setattr(variance, "sample", lambda *a, **k: seen.append(sample(*a, **k)) or seen[-1])
    run(capsys, tmp_path, "--lengths", "30", "--n", "8", "--policy", "streaming")
    compressed, full = seen
    assert all(len(r.completion_ids) == 30 for r in compressed + full)
    assert all(r.trace.num_events > 0 for r in compressed) and all(r.trace.num_events == 0 for r in full)


def test_a_table_for_the_terminal(capsys, tmp_path):
    flags = ["--lengths", "40", "--n", "2", "--budget", "16", "--output", str(tmp_path / "v.png")]
    assert main(["variance", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tiny:llama, float32, rkv, budget 16 + 8, 2 sequences" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["dense", "replay", "noise"] and lines[-1].endswith("v.png")


def test_prompts_of_a_task_for_a_trained_folder(capsys, tmp_path):
    from kvrl.models.tiny import make_tiny
    from kvrl.tasks import get_task

    make_tiny(tmp_path / "m", get_task("recurrence").vocab, seed=1)
    flags = ["--model", str(tmp_path / "m"), "--n", "2", "--budget", "24", "--buffer", "8"]
    result = run(capsys, tmp_path, *flags, "--task", "recurrence", "--lengths", "40")
    assert result["model"] == str(tmp_path / "m") and result["samples"] == 2
    assert main(["variance", *flags, "--lengths", "500", "--output", str(tmp_path / "v.png")]) == 2
    assert "are over the 512 that" in capsys.readouterr().err


@pytest.mark.parametrize("flags, message", [
    (["--n", "1"], "--n: 1 is below 2"),
    (["--policy", "dense"], "--policy: dense evicts nothing"),
    (["--lengths", "29", "--budget", "24"], "evicts nothing before 30 tokens of some completion; raise --lengths"),
    (["--lengths", "8192"], "lower --lengths to at most 4054"),
    (["--task", "recurrence"], "--task: tiny is random and has no tokenizer"),
    (["--output", "v.jpg"], "--output: v.jpg does not end in .png, .pdf, .svg"),
    (["--output", "none/v.png"], "--output: none/v.png cannot be written (No such file or directory)"),
    (["--model", "tiny:mistral", "--lengths", "40", "--n", "2"], "keeps its sliding windows alone"),
])  # fmt: skip
def test_mistakes(capsys, flags, message):
    assert main(["variance", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_lengths_are_sorted_and_each_counts_once():
    assert parse_lengths("256,64,64") == [64, 256]
