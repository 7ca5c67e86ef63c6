"""`kvrl plan`: every example, the phases, the words, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from kvrl.cli import main, parse_bytes
from kvrl.plan import make_plan, size
from kvrl.train.config import Config, load_config

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*/*.yaml"))
EXAMPLES = [path for path in FILES if "variants" not in yaml.safe_load(path.read_text())]  # the others are studies
GIB = 1 << 30


def names(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", EXAMPLES, ids=names)
def test_every_example_can_be_planned(path):
    config = load_config(path)
    if config.task.name in ("countdown", "star_graph"):
        pytest.importorskip("reasoning_gym")
    plan = make_plan(config, memory=400 * GIB)
    assert plan.parameters > 0 and set(plan.phases) >= {"rollout", "backward", "optimiser step"}
    assert all(total > plan.resident["weights"] for total in plan.totals.values())
    assert plan.activations["checkpointed"] < plan.activations["kept"]
    assert plan.fits is not None
    if not config.rollout_cache.is_dense:
        assert plan.kv_per_slot < plan.full_kv_per_slot and plan.fits["cache"] > plan.fits["full"]


def test_slots_follow_from_a_memory_figure():
    config = tiny(train={"prompts_per_step": 40})
    slot = make_plan(config).kv_per_slot
    limited = make_plan(tiny(train={"prompts_per_step": 40}, rollout={"kv_memory": 13 * slot}))
    assert (make_plan(config).slots, limited.slots) == (128, 12)
    assert limited.phases["rollout"]["KV slots"] == 13 * slot
    few = tiny(train={"prompts_per_step": 1}, rollout={"kv_memory": 13 * slot})
    assert make_plan(few).slots == 8  # as many as there are completions


def tiny(**changes) -> Config:
    base = {"cache": {"budget": 24, "buffer": 8, "sinks": 3, "window": 6}, "sampling": {"max_completion_length": 100}}
    return Config(**{**base, **changes})


def test_phases_add_up_to_totals():
    plan = make_plan(tiny())
    fixed = plan.resident["weights"] + plan.resident["optimiser"]
    assert plan.totals == {name: fixed + sum(items.values()) for name, items in plan.phases.items()}
    assert plan.phases["backward"]["gradients"] == plan.phases["optimiser step"]["gradients"] == 4 * plan.trainable
    assert plan.fits is None and plan.slots == 64 and plan.micro_batch == 64


def test_checkpointing_changes_the_backward_pass_alone():
    plain, saving = make_plan(tiny()), make_plan(tiny(model={"gradient_checkpointing": True}))
    assert plain.activations == saving.activations
    assert plain.phases["backward"]["activations"] == plain.activations["kept"]
    assert saving.phases["backward"]["activations"] == plain.activations["checkpointed"]
    assert {n: p for n, p in plain.phases.items() if n != "backward"} == {
        n: p for n, p in saving.phases.items() if n != "backward"
    }


def test_the_evaluation_is_its_largest_budget_with_its_own_slots():
    plan = make_plan(tiny(eval={"n": 60}))
    full = make_plan(tiny(method="dense", rollout={"slots": 60}))
    assert plan.phases["evaluation"] == full.phases["rollout"]
    tight = make_plan(tiny(eval={"n": 60, "budgets": [20, 24, 22]}))
    assert tight.phases["evaluation"] == make_plan(tiny(rollout={"slots": 60})).phases["rollout"]
    assert "evaluation" not in make_plan(tiny(eval={"n": 0})).phases


def test_beacons():
    """Slots hold the prompt, beacons of the shortest windows and one of the longest; the trace covers beacons too."""
    beacons = {"cache": {"policy": "beacon", "params": {"every": [4, 10]}}}
    plan = make_plan(tiny(**beacons))
    assert plan.kv_per_slot == 2 * 3 * 2 * 32 * 4 * (5 + 23 + 10 + 2)  # K and V, layers, heads, width, float32
    assert plan.trace_per_sequence == 2 * 3 * 2 * (5 + 100 + 24) + 4 * 24
    taught = make_plan(tiny(method="breadcrumbs", **beacons))
    assert taught.kv_per_slot == taught.full_kv_per_slot == plan.full_kv_per_slot
    assert taught.activations["kept"] > 1.5 * plan.activations["kept"] > 0  # both policies have a gradient
    assert plan.phases["evaluation"] == make_plan(tiny(method="dense", **beacons)).phases["rollout"]


def test_the_prompts_length():
    assert make_plan(tiny()).prompt_length == 5  # <bos> #20 3 7 and the sign to start: the tiny model's own task
    assert make_plan(tiny(rollout={"max_prompt_length": 30})).prompt_length == 30
    assert make_plan(tiny(rollout={"max_prompt_length": 30}), prompt_length=9).max_tokens == 109
    smol = {"path": "smollm2-135m", "dtype": "bfloat16"}
    assumed = make_plan(tiny(model=smol))
    assert assumed.prompt_length == 512 and assumed.notes[0].startswith("prompts are taken to have up to 512 tokens")
    assert make_plan(tiny(model=smol), prompt_length=512).notes == []


def test_what_is_not_counted_is_said():
    plan = make_plan(tiny(warm_start={"batch_size": 32}, reward={"funcs": [
        {"func": "reward_model", "params": {"path": "someone/judge"}}]}))  # fmt: skip
    assert plan.notes == [
        "not counted: the warm start's batches of 32 demonstrations", "not counted: the reward model someone/judge",
    ]  # fmt: skip


def test_experts_in_float32_are_refused(tmp_path, capsys):
    from kvrl.models.tiny_families import build_family

    build_family("qwen3_moe").save_pretrained(tmp_path / "moe")
    (tmp_path / "c.yaml").write_text(f"model: {{path: {tmp_path}/moe}}\n")
    assert main(["plan", str(tmp_path / "c.yaml")]) == 2
    assert "plan with --model.dtype bfloat16" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "c.yaml"), "--model.dtype", "bfloat16", "--json"]) == 0


def test_the_command(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("cache: {budget: 24, buffer: 8}\nsampling: {max_completion_length: 100}\n")
    assert main(["plan", "--memory", "1GiB", str(file), "--train.prompts_per_step", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["slots"], plan["memory"], plan["totals"]["rollout"] > 0) == (32, GIB, True)
    assert main(["plan", str(file), "--memory=1GiB", "--prompt_length", "20"]) == 0
    out = capsys.readouterr().out
    assert "sequences of up to 20 + 100 tokens: 64 slots, 64 in a micro-batch" in out
    assert "in 1.00 GiB: everything fits" in out and "with this cache" in out
    assert main(["plan", str(file), "--memory", "100MiB"]) == 0
    assert "in 100 MiB: backward does not fit: lower train.micro_batch_tokens" in capsys.readouterr().out


@pytest.mark.parametrize("text, expected", [
    ("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("1.5gib", 3 * GIB // 2), ("512MiB", GIB // 2),
    ("2 GiB", 2 * GIB), ("1TiB", 1024 * GIB),
])  # fmt: skip
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["24", "GiB", "24XiB", "2PiB", "", "-1GiB", "lots", "0GiB", "inf"])
def test_wrong_sizes(text, capsys):
    assert main(["plan", "c.yaml", f"--memory={text}"]) == 2
    assert "is no size up to 1 PiB; write it as 24GiB" in capsys.readouterr().err


def test_sizes_are_written():
    assert [size(n) for n in (17, 2048, 150 << 10, 3 << 29, 200 * GIB)] == [
        "17 B", "2.00 KiB", "150 KiB", "1.50 GiB", "200 GiB",
    ]  # fmt: skip
