"""Held-out accuracy: prompts over a budget, the EOS of finished completions, and wrong flags."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvrl.cache.config import CacheConfig
from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import evaluate, evaluation_table, rewards_of
from kvrl.eval.report import smooth, to_json
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer, make_tiny
from kvrl.sampler.config import SamplingConfig
from kvrl.tasks import get_task
from kvrl.train.checkpoint import save_model
from kvrl.train.config import Config, RolloutSettings
from kvrl.train.run import build
from runs import make_config

VOCAB = get_task("recurrence").vocab


class Mixed:
    """Prompts of 2, 6 and 3 tokens; every completion scores its prompt's length."""

    name = "mixed"

    def rows(self, split, n, seed):
        return [{"prompt": "<bos>" + " 1" * k, "size": k + 1} for k in (1, 5, 2)][:n]

    def reward(self, completions, size, **_):
        self.seen = completions
        return [float(k) for k in size]


def measured(task, n=3, on_small_budget="drop", eos=None, **limits):
    tokenizer = build_tiny_tokenizer(VOCAB)
    cache = CacheConfig(policy="recent", budget=8, buffer=4, window=3, sinks=0, protect_prompt=True)
    return evaluate(
        build_tiny_model(tokenizer, 0), tokenizer, task, cache=cache, budgets=[8, "full"], seed=0, slots=4, n=n,
        sampling=SamplingConfig(max_completion_length=4, eos_token_ids=eos),
        rollout=RolloutSettings(on_small_budget=on_small_budget, **limits),
    )  # fmt: skip


def test_problems_over_a_budget_are_left_out_under_all_or_stop():
    results = measured(Mixed())  # 6 prompt tokens and 3 newest exceed 8
    assert [(r.accuracy, r.dropped) for r in results] == [(2.5, 1)] * 2
    assert "1 problems left out" in evaluation_table(results, "").caption
    with pytest.raises(KvrlError, match="held-out problem 1: cache.budget: 8 is below the 9 entries"):
        measured(Mixed(), on_small_budget="stop")


def test_problems_over_the_length_limit_are_left_out_or_stop():
    results = measured(Mixed(), max_prompt_length=2, on_long_prompt="drop")  # lengths 2, 6 and 3
    assert [(r.accuracy, r.dropped) for r in results] == [(2, 2)] * 2
    with pytest.raises(KvrlError, match="held-out problem 1: rollout.max_prompt_length: 5 is below the prompt's 6 tok"):
        measured(Mixed(), max_prompt_length=5)
    with pytest.raises(KvrlError, match="eval.n: none of the 3 held-out problems is within the limits .*3 tokens"):
        measured(Mixed(), max_prompt_length=1, on_long_prompt="drop")


@pytest.mark.parametrize(("reward", "message"), [
    (lambda size, **_: [1.0, float("nan")], "returned nan for sample 1 .*; return a finite number, or None to drop the "
     "sample$"),
    (lambda size, **_: [1 / (k - 6) for k in size], "raised ZeroDivisionError: .* for sample 1 .* to drop the sample$"),
    (lambda size, **_: [1 / (len(size) - 2)] * len(size), "on no single sample of it; mend the function$"),
])  # fmt: skip
def test_a_bad_reward_stops_without_advice_that_only_a_training_run_can_follow(reward, message):
    rows = Mixed().rows("eval", 2, 0)  # of sizes 2 and 6
    with pytest.raises(KvrlError, match=f"^reward.funcs.task: .*{message}"):
        rewards_of(SimpleNamespace(reward=reward), rows, ["", ""])


def test_a_length_limit_fixes_the_slots_of_the_full_cache():
    sizes = [measured(Mixed(), n=1, max_prompt_length=limit)[1].kv_bytes for limit in (None, 2, 9)]
    assert sizes[0] == sizes[1] < sizes[2]  # without one, the longest prompt (2 tokens) decides


def test_a_training_run_passes_its_choice_on(tmp_path, monkeypatch):
    from kvrl.train import trainer

    seen = {}

    class Run:
        config: Config = make_config(tmp_path, rollout={"on_small_budget": "drop"})
        model = tokenizer = task = on_step = score = None

        def decoded(self):
            return [(None, ["full"])]

    monkeypatch.setattr(trainer, "evaluate", lambda *_, **given: seen.update(given) or [])
    trainer.evaluate_now(Run())  # type: ignore[arg-type]
    assert seen["rollout"].on_small_budget == "drop"


def test_rewards_read_completions_without_their_eos():
    task = Mixed()
    measured(task, n=1, eos=list(range(len(VOCAB) + 4)))  # whatever is drawn ends the completion
    assert task.seen == [""]


@pytest.mark.parametrize(("flags", "message"), [
    (["--temperature", "nan"], "--temperature: nan is refused: input should be a finite number"),
    (["--temperature", "inf"], "--temperature: inf is refused: input should be a finite number"),
    (["--temperature", "-1"], "--temperature: -1.0 is below the minimum 0"),
    (["--policy", "dense", "--budgets", "24,full"], "--budgets: 24 has no meaning under --policy dense"),
    (["--policy", "rkvv"], "'rkvv' is not one of"),
])  # fmt: skip
def test_wrong_flags_are_told_before_a_model_is_loaded(capsys, flags, message):
    assert main(["eval", "nowhere", "--task", "recurrence", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_eval_prints_json(capsys, tmp_path):
    make_tiny(tmp_path / "m", VOCAB, 0)
    flags = ["--task", "recurrence", "--n", "2", "--max_completion_length", "4", "--json"]
    assert main(["eval", str(tmp_path / "m"), *flags]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["budget"] == "full" and result["dropped"] == 0


def test_eval_of_a_folder_of_adapters(capsys, tmp_path):
    base = make_tiny(tmp_path / "base", VOCAB, 0)
    config = make_config(tmp_path, model={"path": str(base)}, warm_start=None, lora={"r": 2})
    run, _ = build(config, lambda text: None)
    save_model(tmp_path / "adapters", run.model, run.tokenizer)
    flags = ["--task", "recurrence", "--n", "2", "--max_completion_length", "40", "--json"]
    cache = ["--policy", "recent", "--budgets", "16,full", "--buffer", "4", "--window", "4", "--sinks", "2"]
    assert main(["eval", str(tmp_path / "adapters"), *flags, *cache]) == 0
    assert [r["budget"] for r in json.loads(capsys.readouterr().out)["results"]] == ["16", "full"]


def test_numbers_that_are_not_finite_become_null_and_do_not_count():
    nan = float("nan")
    assert to_json({"a": [nan, 1.0], "b": float("inf")}) == '{"a": [null, 1.0], "b": null}'
    assert smooth([2.0, nan, 4.0], width=2) == [2.0, 2.0, 4.0]
