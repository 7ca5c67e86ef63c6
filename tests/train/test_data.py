"""The prompts of a run: limits that stop it or drop a prompt, the count, and data that is wrong from the start."""

from __future__ import annotations

import pytest

from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_tokenizer
from kvrl.train import run as run_module
from kvrl.train.config import RolloutSettings
from kvrl.train.data import PromptLimits, PromptStream
from kvrl.train.run import build
from runs import make_config

LENGTHS = [2, 6, 3, 9]  # of the prompts, again and again


class Lengths:
    """A block has the lengths from the first on, or one of them, by its seed."""

    name = "lengths"

    def rows(self, split, n, seed):
        return [{"prompt": " ".join(["1"] * LENGTHS[(i + (seed if n == 1 else 0)) % 4])} for i in range(n)]


def stream(protect_prompt=False, block=4, **settings):
    cache = CacheConfig(policy="recent", budget=8, buffer=4, window=3, sinks=0, protect_prompt=protect_prompt)
    limits = PromptLimits.of(RolloutSettings(**settings), cache)
    return PromptStream(Lengths(), build_tiny_tokenizer(["1"]), seed=0, block=block, limits=limits)


def test_a_prompt_over_the_limit_is_dropped_and_counted_or_stops_the_run():
    prompts = stream(max_prompt_length=3, on_long_prompt="drop")
    assert [(len(row.ids), row.number) for row in prompts.take(3)] == [(2, 0), (3, 2), (2, 4)]
    assert (prompts.dropped, prompts.position) == (2, 5)
    with pytest.raises(KvrlError, match="prompt 1: rollout.max_prompt_length: 5 is below the prompt's 6 tokens; raise"):
        stream(max_prompt_length=5).take(2)
    assert [len(row.ids) for row in stream(max_prompt_length=9).take(4)] == LENGTHS
    assert [len(row.ids) for row in stream().take(4)] == LENGTHS  # no limit unless one is set


def test_a_run_ends_only_if_no_prompt_fits(monkeypatch):
    monkeypatch.setattr("kvrl.train.data.PATIENCE", 10)
    for block in (1, 4, 20):
        drop = {"block": block, "on_long_prompt": "drop"}
        prompts = stream(max_prompt_length=2, **drop)
        assert [len(row.ids) for row in prompts.take(9)] == [2] * 9 and prompts.dropped == 24
        with pytest.raises(KvrlError) as caught:
            stream(max_prompt_length=1, **drop).take(1)
        assert str(caught.value) == (
            "prompt 9: it and all 9 before it are over the limits: rollout.max_prompt_length: 1 is below the prompt's "
            "6 tokens; raise it"  # not `set on_long_prompt to drop`, which it is
        )


def test_many_long_prompts_after_one_that_fits_are_dropped(monkeypatch):
    monkeypatch.setattr("kvrl.train.data.PATIENCE", 2)
    prompts = stream(max_prompt_length=2, on_long_prompt="drop")  # 2, then 6, 3 and 9
    assert len(prompts.take(2)) == 2 and prompts.dropped == 3


def test_each_limit_has_its_own_choice():
    # 6 tokens and 3 newest entries exceed the budget of 8; 9 tokens exceed the length as well
    settings = {"protect_prompt": True, "max_prompt_length": 8}
    prompts = stream(on_small_budget="drop", on_long_prompt="drop", **settings)
    assert [len(row.ids) for row in prompts.take(3)] == [2, 3, 2] and prompts.dropped == 2
    with pytest.raises(KvrlError, match="prompt 1: cache.budget: 8 is below the 9 entries"):
        stream(on_long_prompt="drop", **settings).take(2)
    with pytest.raises(KvrlError, match="prompt 3: rollout.max_prompt_length"):
        stream(on_small_budget="drop", **settings).take(3)


@pytest.mark.parametrize(("task", "evaluated", "message"), [
    ({"name": "jsonl", "params": {"path": "none.jsonl"}}, 0, "task.params.path: none.jsonl cannot be loaded"),
    ({"name": "recurrence", "params": {}}, 9999, "eval.n: 9999 is above the"),
])  # fmt: skip
def test_wrong_data_is_told_before_a_model_is_loaded(tmp_path, monkeypatch, task, evaluated, message):
    monkeypatch.setattr(run_module, "load_policy", None)
    with pytest.raises(KvrlError, match=message):
        build(make_config(tmp_path, task=task, eval={"n": evaluated}), lambda text: None)


def test_the_sampler_is_made_for_the_length_limit(tmp_path, monkeypatch):
    from kvrl.train import trainer

    seen = {}

    def rollout(*_, **given):
        seen.update(given)
        raise InterruptedError

    monkeypatch.setattr(trainer, "rollout", rollout)
    run, _ = build(make_config(tmp_path, warm_start=None, rollout={"max_prompt_length": 40}), lambda text: None)
    with pytest.raises(InterruptedError):
        trainer.sample(run, 1)
    assert seen["max_prompt_length"] == 40
