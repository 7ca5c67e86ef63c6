"""Beacons that cannot be: each mistake is one line on stderr and exit code 2, from a configuration and from flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import kvrl
from kvrl.cli import main
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks import get_task
from kvrl.train.checkpoint import save_model
from runs import make_beacon_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model trained with c of 2 and 4, some without beacons, one whose beacon prompts hold, a run's configuration."""
    root = tmp_path_factory.mktemp("beacons")
    for name in ("trained", "plain", "tied", "short", "held"):
        tokenizer = build_tiny_tokenizer(get_task("recurrence").vocab)
        lm = build_tiny_model(tokenizer, 0)
        if name == "trained":
            kvrl.add_beacon(lm, tokenizer, every=[2, 4])
        if name == "tied":
            lm.config.tie_word_embeddings = True
            lm.tie_weights()
        if name == "short":
            lm.config.max_position_embeddings = 40
            lm.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        if name == "held":
            lm.config.kvrl_beacons = {"token_id": tokenizer.bos_token_id, "every": [2], "positions": "sequence"}
        save_model(root / name, lm, tokenizer)
    config = make_beacon_config(root / "run", method="breadcrumbs", warm_start=None)
    given = config.model_dump(mode="json", exclude={"sampling": {"num_generations"}})
    (root / "config.yaml").write_text(yaml.safe_dump(given))
    return root


def error_of(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("kvrl: error: ")
    return error


@pytest.mark.parametrize(("flags", "message"), [
    (["--cache.params.every", "0"], "cache.params.every: 0 is below 1; a beacon stands for one raw token at least"),
    (["--cache.params.every", "[4, -2]"], "cache.params.every: -2 is below 1"),
    (["--cache.params.every", "31"], "cache.params.every: 31 is over sampling.max_completion_length (30)"),
    (["--cache.params.every", "4", "--beacons.token", "<free>", "--model.path", "{root}/plain"],
     "beacons.token: '<free>' is no token of this tokenizer"),
    (["--cache.params.every", "4", "--beacons.token", "<eos>", "--model.path", "{root}/plain"],
     "beacons.token: '<eos>' has a meaning already"),
    (["--cache.params.every", "4", "--beacons.token", "'='", "--model.path", "{root}/plain"],
     "beacons.token: '=' is an ordinary token, which texts may hold"),
    (["--cache.params.every", "4", "--beacons.token", "'='", "--model.path", "{root}/trained"],
     "beacons.token: '=' is not the beacon that the model has, '<|beacon|>'; leave beacons.token out"),
    (["--cache.params.every", "4", "--beacons.start", "'='", "--model.path", "{root}/trained"],
     "beacons.start: '=' has no meaning for a model that has a beacon already; leave it out"),
    (["--cache.params.every", "true"], "cache.params.every: True is refused; it should be a whole number or a list"),
    (["--cache.params.every", "31"], "lower it to at most 28, or raise sampling.max_completion_length to at least 33"),
    (["--cache.params.every", "3", "--sampling.max_completion_length", "2"],
     "so no window would ever close; raise sampling.max_completion_length to at least 5"),
    (["--cache.params.every", "4", "--method", "shadow_mask", "--rollout.kv_memory", "1000"],
     ", or lower sampling.max_completion_length"),
    (["--cache.params.every", "4", "--model.path", "{root}/plain", "--lora", "{modules_to_save: [embed_tokens]}"],
     "lora.modules_to_save: embed_tokens is the embedding, of which a beacon's row is trained alone; leave"),
    (["--cache.params.every", "4", "--model.path", "{root}/plain", "--lora", "{target_modules: [embed_tokens]}"],
     "lora.target_modules: embed_tokens is the embedding"),
    (["--cache.params.every", "4", "--model.path", "{root}/tied", "--lora", "{modules_to_save: [lm_head]}"],
     "lora.modules_to_save: lm_head is the embedding"),
    (["--cache.params.every", "4", "--model.path", "{root}/tied", "--lora", "{target_modules: [q_proj, lm_head]}"],
     "lora.target_modules: lm_head is the embedding"),
    (["--cache.params.every", "2", "--model.path", "{root}/short"],
     "prompt + sampling.max_completion_length: 49 tokens (14 of them beacons) are over 40"),
    (["--cache.params.every", "2", "--model.path", "{root}/held"],
     "prompt 0: holds the beacon's id 1, which only the engine feeds"),
    (["--cache.params.every", "[2, 8]", "--model.path", "{root}/trained"],
     "cache.params.every: 8 is not one of the 2, 4 that the model was trained with"),
    (["--cache.params", "{every: 2, positions: shared}", "--model.path", "{root}/trained"],
     "cache.params.positions: shared is not the sequence that the model was trained with"),
    (["--cache.params", "{every: [2, 4], schedule: [4, 8]}"],
     "cache.params.schedule: 8 is not one of the 2, 4 of cache.params.every"),
    (["--cache.params", "{}"], "cache.params.every: is missing"),
    (["--breadcrumbs.student", "apart"], "breadcrumbs.student: apart is not one of 'same' or 'separate'"),
])  # fmt: skip
def test_in_training(folder, capsys, flags, message):
    flags = [flag.replace("{root}", str(folder)) for flag in flags]
    assert message in error_of(capsys, "train", str(folder / "config.yaml"), *flags)
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("model", "flags", "message"), [
    ("trained", ["--every", "0"], "--every: 0 is below the minimum 1"),
    ("trained", ["--every", "3"], "--every: 3 is not one of the 2, 4 that the model was trained with"),
    ("trained", ["--every", "4", "--max_completion_length", "3"], "--every: 4 is over --max_completion_length (3)"),
    ("plain", ["--every", "4"], "a model that has"),
])  # fmt: skip
def test_in_evaluation(folder, capsys, model, flags, message):
    given = ["--task", "recurrence", "--n", "2", "--policy", "beacon", *flags]
    assert message in error_of(capsys, "eval", str(folder / model), *given)
    assert message in error_of(capsys, "eval", str(folder / model), *given, "--curve", "--baselines", "recent")


@pytest.mark.parametrize(("flags", "message"), [
    (["--policy", "beacon", "--schedule", "2,0"], "--schedule: 0 is below the minimum 1"),
    (["--policy", "beacon", "--schedule", "4,3"], "--schedule: 3 is not one of the 2, 4 that the model"),
    (["--policy", "beacon", "--every", "4", "--schedule", "4,2"], "--schedule: 2 is not one of the 4 of --every"),
    (["--policy", "rkv", "--schedule", "4"], "--schedule: chooses the windows of beacons, and --policy is rkv"),
    (["--curve", "--schedule", "4"], "--schedule: has no meaning under --curve"),
])  # fmt: skip
def test_a_schedule_in_evaluation(folder, capsys, flags, message):
    assert message in error_of(capsys, "eval", str(folder / "trained"), "--task", "recurrence", "--n", "2", *flags)


def test_a_schedule_is_evaluated(folder, capsys):
    flags = ["--task", "recurrence", "--n", "2", "--policy", "beacon", "--schedule", "2,2,4", "--json"]
    assert main(["eval", str(folder / "trained"), *flags, "--max_completion_length", "12"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["budget"] == "c=2,2,4" and found["evictions"] > 0


def test_a_tokenizer_without_room(folder, capsys, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "add_tokens", lambda *_, **__: 0)
    flags = ["--cache.params.every", "4", "--model.path", str(folder / "plain")]
    message = error_of(capsys, "train", str(folder / "config.yaml"), *flags)
    assert "beacons.token: this tokenizer takes no new token; name a reserved one that it has" in message
