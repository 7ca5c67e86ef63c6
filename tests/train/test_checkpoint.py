"""Which checkpoints a configuration may continue."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.train.checkpoint import check_resume, find_checkpoint
from kvrl.train.config import Config
from kvrl.train.run import build
from kvrl.train.trainer import train
from runs import make_config, metrics_of, noisy_rewards


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("first")
    train(make_config(folder, warm_start=None, checkpoint={"every": 1}))
    return folder


@pytest.fixture
def run(first, tmp_path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "run"))


def resumed(run: Path, **changes) -> Config:
    return make_config(run, **{"warm_start": None, "checkpoint": {"resume": "latest"}, **changes})


def refusal(run: Path, **changes) -> str:
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(KvrlError) as caught:
        train(resumed(run, **changes))
    assert "\n" not in str(caught.value) and (run / "metrics.jsonl").read_text() == before
    return str(caught.value)


@pytest.mark.parametrize(("changes", "field", "was"), [
    ({"method": "naive"}, "method is 'naive'", "had 'shadow_mask'"),
    ({"seed": 5}, "seed is 5", "had 0"),
    ({"cache": {"budget": 13}}, "cache.budget is 13", "had 12"),
    ({"lora": {"r": 2}}, "lora is {", "had null"),
    ({"task": {"params": {"min_steps": 3}}}, "task.params.max_steps is null", "had 4"),
    ({"train": {"learning_rate": 1e-2}}, "train.learning_rate is 0.01", "had 0.001"),
    ({"train": {"max_steps": 9, "lr_scheduler": "linear"}}, "train.max_steps is 9", "had 2"),
])  # fmt: skip
def test_another_configuration_is_refused(run, changes, field, was):
    message = refusal(run, **changes)
    assert message.startswith(f"checkpoint.resume: {field}") and was in message


def test_what_may_change(run, tmp_path):
    config = resumed(
        run, eval={"n": 4, "budgets": [12]}, parity={"samples": 2}, rollout={"slots": 3}, overwrite_output_dir=True,
        train={"max_steps": 3, "micro_batch_tokens": 99, "num_threads": 1}, model={"gradient_checkpointing": True},
    )  # fmt: skip
    folder = find_checkpoint(run, "latest")
    assert folder == run / "checkpoints" / "step-000002"
    check_resume(folder, config)
    check_resume(folder, config.model_copy(update={"output_dir": str(tmp_path / "empty")}))


def test_a_longer_run_goes_on_with_the_same_prompts(run):
    built, done = build(resumed(run, train={"max_steps": 7}), lambda text: None)
    assert (done, built.prompts.position, built.prompts.block) == (2, 6, 6)


def test_a_finished_run_ends_with_its_report_and_a_shorter_one_is_refused(run):
    steps = metrics_of(run)
    (run / "summary.json").unlink()
    train(resumed(run))
    assert (run / "summary.json").is_file() and metrics_of(run) == steps
    first = {"resume": str(run / "checkpoints" / "step-000001")}
    assert "train.max_steps is 1" in refusal(run, train={"max_steps": 1}, checkpoint=first)  # the schedule's end
    message = refusal(run, train={"max_steps": 1})
    assert message.startswith("train.max_steps: 1 is below step 2 of ") and message.endswith("at least 2")


def test_a_checkpoint_of_another_folder_does_not_go_into_an_occupied_one(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    message = refusal(run, checkpoint={"resume": str(other / "checkpoints" / "step-000001")})
    assert message.startswith(f"output_dir: {run} holds another run than {other}")


@pytest.mark.parametrize("name", ["optimizer.pt", "model", "config.json"])
def test_a_missing_part_is_named(run, name):
    part = run / "checkpoints" / "step-000002" / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    assert f"checkpoint.resume: {part} is missing" in refusal(run)


@pytest.mark.parametrize("name", ["state.json", "config.json"])
def test_a_corrupt_file_is_named(run, name):
    (run / "checkpoints" / "step-000002" / name).write_text('{"step": 2, ')
    assert f"{run / 'checkpoints' / 'step-000002' / name} is no JSON" in refusal(run)


def test_a_corrupt_optimiser_is_named_and_a_half_written_checkpoint_is_not_the_latest(run):
    half = Path(shutil.copytree(run / "checkpoints" / "step-000002", run / "checkpoints" / "step-000003.partial"))
    assert half.is_dir()
    (run / "checkpoints" / "step-000002" / "optimizer.pt").write_bytes(b"no archive")
    assert f"{run / 'checkpoints' / 'step-000002' / 'optimizer.pt'} cannot be read" in refusal(run)


def test_an_output_dir_that_is_a_file_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(KvrlError, match=r"output_dir: .*taken is a file; give"):
            train(make_config(folder, model={"path": "nowhere"}))


def test_a_step_without_rewards_is_null_in_valid_json(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    none = lambda self, completions, **columns: [None] * len(completions)  # noqa: E731
    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", none)
    train(make_config(tmp_path, warm_start=None, eval={"n": 2}))

    def refuse(name):
        raise AssertionError(name)

    for file in ("metrics.jsonl", "summary.json"):
        text = (tmp_path / file).read_text()
        lines = text.splitlines() if file == "metrics.jsonl" else [text]
        records = [json.loads(line, parse_constant=refuse) for line in lines]
    steps = [m for m in metrics_of(tmp_path) if "budget" not in m]
    assert [m["reward"] for m in steps] == [None, None] and records[0]["reward_last"] is None


def test_modules_to_save_must_exist(tmp_path):
    with pytest.raises(KvrlError, match="lora.modules_to_save: lm_hed is no module of the model; .*lm_head"):
        build(make_config(tmp_path, warm_start=None, lora={"modules_to_save": ["norm", "lm_hed"]}), lambda text: None)


def test_a_folder_of_adapters_is_a_model(tmp_path):
    from kvrl.models.tiny import make_tiny
    from kvrl.tasks import get_task
    from kvrl.train.setup import load_model

    base = make_tiny(tmp_path / "base", get_task("recurrence").vocab, 0)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    changes = {"warm_start": None, "train": {"max_steps": 1, "learning_rate": 0.1}}
    built, _ = build(make_config(tmp_path, model={"path": str(base)}, lora=lora, **changes), lambda text: None)
    for name, p in built.model.named_parameters():
        if "lora_B" in name:
            p.data.fill_(0.1)
    built.model.save_pretrained(tmp_path / "adapters")
    built.tokenizer.save_pretrained(tmp_path / "adapters")
    ids = torch.tensor([[1, 5, 6]])
    want = built.model.eval()(ids).logits
    for merge in (False, True):
        model, _ = load_model(str(tmp_path / "adapters"), "float32", merge=merge)
        assert torch.allclose(model.eval()(ids).logits, want, atol=1e-5)
    assert not torch.allclose(load_model(str(base), "float32")[0](ids).logits, want, atol=1e-3)
    path = {"path": str(tmp_path / "adapters")}
    full, _ = build(make_config(tmp_path / "full", model=path, **changes), lambda text: None)
    assert all(p.requires_grad for p in full.model.parameters())
    shutil.rmtree(base)
    with pytest.raises(KvrlError, match="adapters whose base model is missing"):
        load_model(str(tmp_path / "adapters"), "float32")


def test_adapters_of_a_model_that_was_never_saved_are_refused(tmp_path):
    from kvrl.train.setup import load_model

    built, _ = build(make_config(tmp_path, warm_start=None, lora={"r": 2}), lambda text: None)
    built.model.save_pretrained(tmp_path / "adapters")
    built.tokenizer.save_pretrained(tmp_path / "adapters")
    with pytest.raises(KvrlError, match="names no base model"):
        load_model(str(tmp_path / "adapters"), "float32")


FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_that_overwrites_leaves_nothing_of_the_former_models(tmp_path):
    from kvrl.models.tiny import make_tiny
    from kvrl.tasks import get_task

    base = {"path": str(make_tiny(tmp_path / "base", get_task("recurrence").vocab, 0))}
    run, changes = tmp_path / "run", {"warm_start": None, "train": {"max_steps": 1}, "overwrite_output_dir": True}
    train(make_config(run, model=base, lora={"r": 2}, grpo={"beta": 0.1}, **changes))
    assert "adapter_config.json" in names_in(run / "model")
    train(make_config(run, model=base, grpo={"beta": 0.1}, **changes))
    assert names_in(run / "model") == FILES and names_in(run / "reference") == FILES - {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    (run / "teacher").mkdir()
    train(make_config(run, model=base, **changes))
    assert names_in(run / "model") == FILES and not {"reference", "teacher"} & names_in(run)


def test_nothing_is_lost_before_a_run_can_start(run, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    changes = {"overwrite_output_dir": True, "checkpoint": {}, "grpo": {"beta": 0.1}}
    monkeypatch.setattr("kvrl.train.run.make_optimizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(resumed(run, **changes))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (run / "metrics.jsonl").unlink()
    with pytest.raises(KvrlError, match="output_dir: .* holds another run; give another folder"):
        train(resumed(run, checkpoint={}))  # a model alone is not written over either
    model = {"path": str(run / "model")}
    with pytest.raises(KvrlError, match="output_dir: .* is cleared of its models before training, and model.path"):
        train(resumed(run, **changes, model=model))


def test_a_run_that_goes_on_elsewhere_takes_its_start_along(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    changes = {"grpo": {"beta": 0.1}, "checkpoint": {"every": 1}}
    train(make_config(tmp_path / "one", **changes))
    whole, first = metrics_of(tmp_path / "one")[-1], tmp_path / "one" / "checkpoints" / "step-000001"
    train(make_config(tmp_path / "two", **{**changes, "checkpoint": {"every": 1, "resume": str(first)}}))
    assert metrics_of(tmp_path / "two")[-1]["kl/mean"] == whole["kl/mean"] > 0
    again = str(tmp_path / "two" / "checkpoints" / "step-000002")  # and from there once more
    build(make_config(tmp_path / "three", **{**changes, "checkpoint": {"resume": again}}), lambda text: None)


@pytest.mark.parametrize("start", ["tiny", "adapters"])
def test_adapters_whose_base_no_folder_holds_are_saved_merged(tmp_path, monkeypatch, start):
    """`model/` and each checkpoint's is the trained model; resuming goes on with the adapters, bit for bit."""
    from kvrl.models.tiny import make_tiny
    from kvrl.tasks import get_task
    from kvrl.train.setup import load_model

    noisy_rewards(monkeypatch)
    changes = {"lora": {"r": 2}, "warm_start": None, "train": {"max_steps": 2, "learning_rate": 0.05}}
    if start == "adapters":
        base = make_tiny(tmp_path / "base", get_task("recurrence").vocab, 1)
        train(make_config(tmp_path / "one", model={"path": str(base)}, **changes))
        assert "adapter_config.json" in names_in(tmp_path / "one" / "model")
        changes["model"] = {"path": str(tmp_path / "one" / "model")}
    two = tmp_path / "two"
    train(make_config(two, checkpoint={"every": 1}, **changes))
    whole, ids = metrics_of(two), torch.tensor([[1, 5, 6, 7, 8]])
    again = {"checkpoint": {"resume": "latest"}, **changes}
    trained = build(make_config(two, **again), lambda text: None)[0].model.eval()
    untrained = build(make_config(tmp_path / "none", **changes), lambda text: None)[0].model.eval()
    want = trained(ids).logits.log_softmax(-1)
    assert (untrained(ids).logits.log_softmax(-1) - want).abs().max() > 1e-2
    for folder in (two / "model", two / "checkpoints" / "step-000002" / "model"):
        assert names_in(folder) == FILES
        saved = load_model(str(folder), "float32")[0].eval()
        assert (saved(ids).logits.log_softmax(-1) - want).abs().max() < 1e-5
    again["checkpoint"] = {"resume": str(two / "checkpoints" / "step-000001")}
    train(make_config(two, **again))
    assert (
        metrics_of(two)[-1]["loss"] == whole[-1]["loss"] and metrics_of(two)[-1]["grad_norm"] == whole[-1]["grad_norm"]
    )
    shutil.rmtree(two / "checkpoints" / "step-000001" / "adapters")
    with pytest.raises(KvrlError, match="step-000001/adapters is missing; resume from a complete checkpoint"):
        build(make_config(two, **again), lambda text: None)


@pytest.mark.parametrize("lora", [
    {"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]},
])  # fmt: skip
def test_adapters_of_a_tied_head_or_embedding_alone_are_merged_into_it_alone(tmp_path, lora):
    from kvrl.models.tiny_families import build_family
    from kvrl.train.setup import add_lora, merged

    config = make_config(tmp_path, warm_start=None, lora={"r": 2, **lora})
    model = add_lora(build_family("llama", tie_word_embeddings=True), config, None).eval()
    for name, p in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            p.data.add_(torch.linspace(-0.1, 0.2, p.numel()).view_as(p))
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    want = model(ids).logits
    whole = merged(model)
    whole.save_pretrained(tmp_path / "whole")
    for found in (whole, type(whole).from_pretrained(tmp_path / "whole")):
        assert torch.allclose(found.eval()(ids).logits, want, atol=1e-4)
