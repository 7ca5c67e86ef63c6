"""`cache.policy: beacon` in a run: what is refused, what a step does, and that the folder decodes by itself."""

from __future__ import annotations

import json

import pytest
import torch

from kvrl.beacons.config import BeaconSet, beacons_of
from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.eval.run_defaults import run_of
from kvrl.train.preflight import unclosed
from kvrl.train.run import build, make_start
from kvrl.train.setup import load_model
from kvrl.train.trainer import train
from runs import make_beacon_config as make
from runs import make_config, metrics_of, noisy_rewards


def beacons(**params):
    return {"policy": "beacon", "params": params}


def test_a_run_learns_by_replay_and_its_folder_decodes_with_beacons(tmp_path, capsys, monkeypatch):
    noisy_rewards(monkeypatch)
    result = train(make(tmp_path / "run", eval={"n": 4}))
    steps = [m for m in metrics_of(tmp_path / "run") if "reward" in m]
    assert len(steps) == 2 and all(m["parity/max"] < 1e-4 and m["parity/mean"] < 1e-5 for m in steps)
    assert all(m["dense_mismatch"] > 1e-3 for m in steps[:1])  # the learner's view is not the dense one
    assert all(m["evictions"] > 3 and m["grad_norm"] > 0 for m in steps)
    assert all(0 < m["held_entries"] < m["held_entries_max"] <= 4 + 15 + 2 + 4 for m in steps)
    assert [e["budget"] for e in result["evaluations"][2]] == ["c=2", "c=3", "full"]
    two, three, full = result["evaluations"][2]
    assert full["held_entries"] > two["held_entries"] > 0 and three["buffer"] is None
    model, tokenizer = load_model(str(tmp_path / "run" / "model"), "float32")
    assert beacons_of(model) == BeaconSet(len(tokenizer) - 1, (2, 3), "sequence")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run" / "model"), "--n", "3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"] == "beacon" and [r["budget"] for r in printed["results"]] == ["c=2", "c=3"]
    assert (
        main(["eval", str(tmp_path / "run" / "model"), "--n", "3", "--every", "3", "--budgets", "full", "--json"]) == 0
    )
    assert [r["budget"] for r in json.loads(capsys.readouterr().out)["results"]] == ["c=3", "full"]
    for flags, message in (
        (["--every", "4"], "--every: 4 is not one of the 2, 3 that the model was trained with"),
        (["--budgets", "24"], "--budgets: 24 has no meaning under --policy beacon, whose dial is --every"),
        (["--buffer", "8"], "--buffer: 8 has no meaning under --policy beacon"),
        (["--window", "8"], "--window: 8 has no meaning under policy beacon"),
        (["--policy", "rkv", "--every", "2"], "--every: chooses the windows of beacons, and --policy is rkv"),
    ):
        assert main(["eval", str(tmp_path / "run" / "model"), "--n", "3", *flags]) == 2
        assert message in capsys.readouterr().err
    assert run_of(str(tmp_path / "run" / "model")) is not None


def test_the_beacons_embedding_learns(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run, _ = build(make(tmp_path, warm_start=None), lambda text: None)
    row = run.model.get_input_embeddings().weight[-1].detach().clone()
    from kvrl.train.trainer import train_step

    train_step(run, 1)
    assert not torch.equal(run.model.get_input_embeddings().weight[-1], row)


def test_under_lora_the_adapters_folder_keeps_the_beacon(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    base = make(tmp_path / "base", train={"max_steps": 1})
    from kvrl.train.run import make_start

    make_start(base.model_copy(update={"cache": base.cache.as_dense()}), tmp_path / "start", lambda text: None)
    train(make(tmp_path / "run", model={"path": str(tmp_path / "start")}, warm_start=None, lora={"r": 4}))
    model, tokenizer = load_model(str(tmp_path / "run" / "model"), "float32", merge=True)
    assert beacons_of(model) == BeaconSet(len(tokenizer) - 1, (2, 3), "sequence")
    start, known = load_model(str(tmp_path / "start"), "float32")
    rows, before = (m.get_input_embeddings().weight.detach()[: len(known)] for m in (model, start))
    assert torch.equal(rows, before)
    beacon = model.get_input_embeddings().weight.detach()[len(tokenizer) - 1]
    assert (beacon - before.mean(dim=0)).abs().max() > 1e-5  # it was learned, where the other rows stay
    again = make(tmp_path / "again", model={"path": str(tmp_path / "run" / "model")}, warm_start=None)
    run, _ = build(again, lambda text: None)
    assert beacons_of(run.model) == BeaconSet(len(tokenizer) - 1, (2, 3), "sequence")


def test_a_folder_trained_with_other_windows_is_refused(tmp_path):
    make_start(make(tmp_path), tmp_path / "start", lambda text: None)
    for every in (2, [2, 3]):
        config = make(tmp_path, model={"path": str(tmp_path / "start")}, cache=beacons(every=every))
        build(config.model_copy(update={"warm_start": None}), lambda text: None)
    with pytest.raises(KvrlError, match="cache.params.every: 5 is not one of the 2, 3 that the model was trained with"):
        config = make(tmp_path, model={"path": str(tmp_path / "start")}, cache=beacons(every=[2, 5]))
        build(config.model_copy(update={"warm_start": None}), print)


def test_a_warm_start_of_a_model_with_beacons_is_refused(tmp_path):
    """It would train the model without them."""
    make_start(make(tmp_path), tmp_path / "start", lambda text: None)
    config = make(tmp_path, model={"path": str(tmp_path / "start")}, cache=beacons(every=2))
    with pytest.raises(KvrlError, match="warm_start: would train .*start without the beacons that it has.* to null"):
        build(config, print)


def test_a_warm_start_of_a_runs_model_is_told(tmp_path):
    said = []
    train(make_config(tmp_path / "first", train={"max_steps": 1}, eval={"n": 0}))
    build(make_config(tmp_path / "second", model={"path": str(tmp_path / "first" / "model")}), said.append)
    assert sum("first/model is the model of a run already; set warm_start to null" in line for line in said) == 1


@pytest.mark.parametrize("changes, message", [
    ({"cache": beacons()}, "cache.params.every: is missing; give the raw tokens that a beacon stands for"),
    ({"cache": beacons(every=0)}, "cache.params.every: 0 is below 1"),
    ({"cache": beacons(every=[4, 31])}, r"every: 31 is over sampling.max_completion_length \(30\)"),
    ({"cache": {**beacons(every=2), "budget": 12}}, "cache.budget: has no meaning under cache.policy beacon"),
    ({"eval": {"budgets": [24, "full"]}}, "eval.budgets: 24 has no meaning under cache.policy beacon"),
    ({"cache": {"policy": "rkv"}, "beacons": {"start": "the"}}, "cache.policy rkv has no beacons"),
])  # fmt: skip
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):  # pydantic's wraps it where no file is read
        make(tmp_path, **changes)


def test_windows_that_never_close_are_told():
    config = make("runs/none", cache=beacons(every=[4, 28, 29, 30]))
    assert [text.split(":")[1].split()[3] for text in unclosed(config.cache, 30)] == ["29", "30"]


@pytest.mark.parametrize("method", ["shadow_mask", "breadcrumbs"])  # whose rollouts have the full cache
def test_a_run_tells_of_windows_that_never_close(tmp_path, method):
    said: list[str] = []
    build(make(tmp_path, method=method, cache=beacons(every=[4, 29])), said.append)
    (line,) = (text for text in said if "warning" in text)
    assert "a window of 29 tokens never closes" in line
