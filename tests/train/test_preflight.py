"""What would end a run is told before its warm start, and folders that hold no usable model in one line."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoTokenizer, BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

import kvrl
from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_tokenizer, make_tiny
from kvrl.tasks import get_task
from kvrl.train import run as run_module
from kvrl.train.algorithms.settings import GrpoSettings
from kvrl.train.config import Config
from kvrl.train.output import check_output_dir, make_output_dir
from kvrl.train.preflight import check_model, unread, warnings_of
from kvrl.train.run import build, make_start
from kvrl.train.setup import load_model, load_policy
from kvrl.train.trainer import train
from runs import make_config

VOCAB = get_task("recurrence").vocab
ROWS = 2 * 2 * 3 * 2 * (12 + 6) * 32 * 4  # a slot and the staging row: K, V of 3 layers, 2 heads, 12 + 6 entries, fp32


@pytest.fixture
def no_warm_start(monkeypatch):
    monkeypatch.setattr(run_module, "supervise", lambda *_: pytest.fail("the warm start ran"))


@pytest.mark.parametrize(("changes", "message"), [
    ({"rollout": {"max_prompt_length": 2}}, "prompt 0: rollout.max_prompt_length: 2 is below the prompt's"),
    ({"cache": {"protect_prompt": True, "budget": 6, "sinks": 0}, "method": "dense", "eval": {"n": 2}},
     "held-out problem 0: cache.budget: 6 is below"),
    ({"rollout": {"kv_memory": ROWS - 1}}, f"rollout.kv_memory: {ROWS - 1} bytes are below the {ROWS} that one"),
    ({"rollout": {"kv_memory": ROWS}, "eval": {"n": 2}}, f"rollout.kv_memory: {ROWS} bytes are below"),  # full
])  # fmt: skip
def test_prompts_over_the_limits(tmp_path, no_warm_start, changes, message):
    for make in (lambda c: build(c, print), lambda c: make_start(c, tmp_path / "start", print)):
        with pytest.raises(KvrlError, match=message):
            make(make_config(tmp_path / "out", **changes))


def test_models_that_cannot_be_replayed(tmp_path, no_warm_start):
    tokenizer = build_tiny_tokenizer(VOCAB)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 32}  # fmt: skip
    BertLMHeadModel(BertConfig(**shape, is_decoder=True)).save_pretrained(tmp_path / "bert")
    LlamaForCausalLM(LlamaConfig(**shape, attention_dropout=0.1)).save_pretrained(tmp_path / "llama")
    for name in ("bert", "llama"):
        tokenizer.save_pretrained(tmp_path / name)
        with pytest.raises(KvrlError, match=rf"model.path: .*{name} cannot be trained: (?!model:).*dropout"):
            build(make_config(tmp_path / "out", model={"path": str(tmp_path / name)}), print)


def test_the_checked_model_attends_as_before(tmp_path):
    config = make_config(tmp_path)
    model, _ = load_policy(config, get_task("recurrence"), None)
    before = model.config._attn_implementation
    check_model(config, model)
    assert model.config._attn_implementation == before == "sdpa"


@pytest.mark.parametrize(("changes", "field"), [
    ({"method": "naive", "distill": {"weight": 0.1}}, "distill.weight: is read under method shadow_mask alone"),
    ({"correction": {"preset": "tis"}}, "correction.preset: is read under method corrected alone, and method is sh"),
    ({"method": "naive", "sparse_rl": {"max_weight": 2}}, "sparse_rl.max_weight: is read under method sparse_rl alone"),
    ({"algorithm": "ppo", "grpo": {"beta": 0.1}}, "grpo.beta: is read under algorithm grpo alone, and .* is ppo"),
    ({"algorithm": "rloo", "ppo": {"lam": 0.9}}, "ppo.lam: is read under algorithm ppo alone"),
    ({"distill": {"weight": 0.1, "average_decay": 0.9}}, "distill.average_decay: is read where .* is average alone"),
])  # fmt: skip
def test_fields_that_nothing_reads_are_told(tmp_path, changes, field):
    usual = {"num_generations": GrpoSettings().num_generations}  # the tests' own differs, and is told under the others
    (told,) = unread(make_config(tmp_path, **{**changes, "grpo": usual | changes.get("grpo", {})}))
    assert re.match(field, told)


def test_fields_that_are_read_are_not_told(tmp_path):
    assert unread(make_config(tmp_path)) == []
    for changes in (
        {"distill": {"weight": 0.1, "teacher_weights": "average", "average_decay": 0.9}, "grpo": {"beta": 0.1}},
        {"method": "corrected", "correction": {"preset": "mis"}},
        {"method": "sparse_rl", "sparse_rl": {"max_weight": 2}},
    ):
        assert unread(make_config(tmp_path, **changes)) == []
    whole = make_config(tmp_path, method="naive").model_dump(mode="json")  # a run's config.json names every field
    assert unread(Config.model_validate(whole)) == []


def test_warnings_by_hand(tmp_path):
    def told(prompt: int, **changes) -> list[str]:
        config = make_config(tmp_path, **changes)
        return warnings_of(config, load_policy(config, get_task("recurrence"), None)[0], prompt)

    # 12 + 6 entries are full with the 18th token forwarded; the last of a sequence is never forwarded
    assert told(8, sampling={"max_completion_length": 11}) == []
    (line,) = told(8, sampling={"max_completion_length": 10})
    assert line.startswith("cache.budget + cache.buffer: 12 + 6 entries hold the longest sequence (8 prompt tokens + ")
    assert told(8, sampling={"max_completion_length": 10}, method="dense") == []
    # the tiny model has 512 positions
    assert told(12, sampling={"max_completion_length": 500}) == []
    (line,) = told(13, sampling={"max_completion_length": 500})
    assert line.startswith("sampling.max_completion_length: 500 after 13 prompt tokens is over the 512 positions")
    assert line.endswith("at most 499")


def test_positions_of_beacons_count_by_hand(tmp_path):
    """c = 4: 400 tokens have 99 beacons, 398 // 4, and with a prompt of 13 one position at the 512 is left over."""
    for positions, expected in (("sequence", [(400, []), (401, ["400"])]), ("shared", [(499, []), (500, ["499"])])):
        params = {"every": 4, "positions": positions}
        for new, most in expected:
            changes = {"cache": {"policy": "beacon", "params": params}, "sampling": {"max_completion_length": new}}
            config = make_config(tmp_path, warm_start=None, **changes)
            told = warnings_of(config, load_policy(config, get_task("recurrence"), None)[0], 13)
            assert [line.rsplit(" ", 1)[1] for line in told] == most, (positions, new, told)
            assert all(("with 99 positions of beacons," in line) == (positions == "sequence") for line in told)


def test_a_run_warns_before_its_warm_start(tmp_path):
    said: list[str] = []
    build(make_config(tmp_path, cache={"buffer": 600}), said.append)
    assert said[0].startswith("warning: cache.budget + cache.buffer: 12 + 600") and "warm start" in said[1]


def test_a_run_warns_of_fields_that_nothing_reads(tmp_path):
    said: list[str] = []
    build(make_config(tmp_path, correction={"preset": "tis"}), said.append)
    assert said[0].startswith("warning: correction.preset: is read under method corrected alone")


def test_a_runs_folder_is_told_from_its_models(tmp_path):
    config = make_config(tmp_path / "run")
    make_output_dir(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(config.model_dump_json())
    with pytest.raises(KvrlError, match=r"MODEL: .*run is a run of kvrl that has no model yet; give .*step-N/model"):
        load_model(str(tmp_path / "run"), "float32", field="MODEL")
    make_tiny(tmp_path / "run" / "model", VOCAB, 0)
    with pytest.raises(KvrlError, match=r"model.path: .*run is a run of kvrl; its model is .*run/model$"):
        load_model(str(tmp_path / "run"), "float32")


def break_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def break_type(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "unheard_of"}))


def break_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{")


def remove_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def break_shape(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 32}))


def break_field(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": "many"}))


@pytest.mark.parametrize("spoil", [
    break_weights, break_type, break_tokenizer, remove_tokenizer, break_shape, break_field,
])  # fmt: skip
def test_a_broken_folder_is_told_in_one_line(tmp_path, spoil):
    folder = make_tiny(tmp_path / "m", VOCAB, 0)
    spoil(folder)
    with pytest.raises(KvrlError, match=r"^model\.path: .*cannot be loaded \(.+\); give ") as caught:
        load_model(str(folder), "float32")
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_):
        raise LocalEntryNotFoundError("many\nlines")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_: pytest.fail("asked again"))
    with pytest.raises(KvrlError, match=r"nobody/nothing is no folder here, and the hub did not give it \(it cannot"):
        load_model("nobody/nothing", "float32")


def test_an_output_dir_that_cannot_be_made_is_told_before_the_model(tmp_path, no_warm_start):
    with pytest.raises(KvrlError, match=r"output_dir: /proc/foo cannot be written \(.+\); give another folder"):
        train(make_config("/proc/foo"))
    with pytest.raises(KvrlError, match="output_dir: is empty"):
        check_output_dir(make_config(""))
    (tmp_path / "file").write_text("")
    with pytest.raises(KvrlError, match="--output_dir: .*file is a file"):
        make_output_dir(tmp_path / "file" / "x", "--output_dir")


def test_a_single_rollout_is_not_a_list(tmp_path):
    run, _ = build(make_config(tmp_path, warm_start=None), print)
    (one,) = kvrl.rollout(run.model, [[1, 5, 6]], cache=run.config.cache,
                          sampling=kvrl.SamplingConfig(max_completion_length=4))  # fmt: skip
    with pytest.raises(KvrlError, match=r"rollouts: is a single Rollout; give a list of them"):
        kvrl.logprobs(run.model, one)
