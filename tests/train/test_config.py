"""The configuration: derived values, refused combinations, and one-line explanations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.train.config import Config, load_config

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "config.yaml"


def load(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return load_config(file, overrides)


def refusal(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(KvrlError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_quickstart_is_valid_and_says_what_the_recipe_says():
    config = load_config(QUICKSTART)
    assert (config.method, config.model.path, config.task.name) == ("shadow_mask", "tiny", "recurrence")
    cache = config.cache
    assert (cache.budget, cache.buffer, cache.window, cache.sinks) == (24, 8, 6, 3)
    assert config.warm_start is not None
    assert (config.warm_start.steps, config.train.max_steps, config.slots) == (250, 60, 96)
    assert config.eval_budgets == [24, "full"]


def test_a_field_alone_leaves_the_others_at_their_defaults(tmp_path):
    assert load(tmp_path, "seed: 0") == Config()


def test_an_empty_file_and_a_study_are_refused(tmp_path):
    assert "config.yaml: is empty" in refusal(tmp_path, "# nothing\n")
    assert "is a study, not a configuration; run it with `kvrl study" in refusal(
        tmp_path, "base: b.yaml\nvariants: {a: {}}\n"
    )


def test_lists_in_the_comma_form(tmp_path):
    cache = "cache: {budget: 24, window: 8, sinks: 2}"
    assert load(tmp_path, cache, ("eval.budgets", "24,full")).eval_budgets == [24, "full"]
    assert load(tmp_path, cache, ("eval.budgets", "24")).eval_budgets == [24]
    assert load(tmp_path, cache, ("eval.budgets", "[16, full]")).eval_budgets == [16, "full"]
    assert [e.func for e in load(tmp_path, cache, ("reward.funcs", "task,f1")).reward.funcs] == ["task", "f1"]
    assert load(tmp_path, cache, ("lora.target_modules", "all-linear")).lora.target_modules == "all-linear"
    message = refusal(tmp_path, cache, ("sampling.stop", "a,b"))  # a stop may hold a comma: it is never split
    assert message == "sampling.stop: a,b is refused: it is no list; write it as [value, value]"


@pytest.mark.parametrize(("flag", "message"), [
    (("model", "tiny"), "model: tiny is refused: model is a section, not a value; set one of its fields, as in"),
    (("cache", "dense"), "cache: dense is refused: cache is a section, not a value; set one of its fields, as in"),
    (("cache.params", "3"), "cache.params: 3 is refused: it is no mapping; write it as {name: value}"),
    (("cache.budget", ""), "--cache.budget: has no value; write --cache.budget VALUE (null for none"),
    (("output_dir", ""), "--output_dir: has no value; write --output_dir VALUE"),
    (("cache.budget", "many"), "cache.budget: many is refused: it is no whole number; write one, such as 32"),
    (("cache.protect_prompt", "3"), "cache.protect_prompt: 3 is refused: it is neither true nor false"),
])  # fmt: skip
def test_a_flag_of_the_wrong_kind_says_what_to_write(tmp_path, flag, message):
    assert refusal(tmp_path, "seed: 1", flag).startswith(message)


def test_parameters_left_from_another_task(tmp_path):
    file = "task: {name: recurrence, params: {min_steps: 3}}"
    message = refusal(tmp_path, file, ("task.name", "gsm8k"))
    assert message == (
        'task.params.min_steps: is left from the file\'s task recurrence; give --task "{name: gsm8k, params: {...}}"'
    )
    assert load(tmp_path, file, ("task", "{name: gsm8k, params: {eval_share: 0.5}}")).task.name == "gsm8k"
    shared = "task: {name: math, params: {path: a.jsonl}}"
    assert load(tmp_path, shared, ("task.name", "gsm8k")).task.params == {"path": "a.jsonl"}


def test_flags_lie_over_the_file_and_are_parsed_as_yaml(tmp_path):
    text = "grpo: {beta: 0.5, epsilon: 0.3}\nlora: null\n"
    flags = [("grpo.beta", "1e-3"), ("lora.r", "4"), ("eval.budgets", "[24, full]"), ("output_dir", "runs/x")]
    config = load(tmp_path, text, *flags)
    assert (config.grpo.beta, config.grpo.epsilon) == (0.001, 0.3)
    assert config.lora is not None and config.lora.r == 4
    assert (config.eval_budgets, config.output_dir) == ([24, "full"], "runs/x")


def test_numbers_without_a_dot_stay_numbers_in_free_parameters(tmp_path):
    config = load(tmp_path, "cache: {params: {threshold: 5e-1, mix: 1E-1}}")
    assert config.cache.params == {"threshold": 0.5, "mix": 0.1}


def test_the_samplers_group_size_follows_grpo(tmp_path):
    config = load(tmp_path, "grpo: {num_generations: 6}")
    assert config.sampling.num_generations == 6
    assert Config.model_validate(config.model_dump()) == config
    message = refusal(tmp_path, "grpo: {num_generations: 6}\nsampling: {num_generations: 4}")
    assert message == (
        "sampling.num_generations: 4 differs from grpo.num_generations (6), which it follows; "
        "set grpo.num_generations alone"
    )


@pytest.mark.parametrize(
    ("method", "learner", "sampler", "policy"),
    [
        ("dense", "dense", "dense", "dense"),
        ("naive", "dense", "sparse", "rkv"),
        ("corrected", "dense", "sparse", "rkv"),
        ("shadow_mask", "sparse", "sparse", "rkv"),
    ],
)
def test_views_of_each_method(method, learner, sampler, policy):
    config = Config(method=method)
    assert (config.learner_view, config.sampler_view) == (learner, sampler)
    assert config.rollout_cache.policy == policy
    assert config.cache.policy == "rkv"
    if learner != sampler:
        with pytest.raises(ValueError, match="grpo.old_logprobs: sampler gives log-probs in the sparse view"):
            Config(method=method, grpo={"old_logprobs": "sampler"})
    else:
        assert Config(method=method, grpo={"old_logprobs": "sampler"}).grpo.old_logprobs == "sampler"


def test_slots_default_is_the_batch_capped():
    assert Config(train={"prompts_per_step": 3}, grpo={"num_generations": 4}).slots == 12
    assert Config(train={"prompts_per_step": 300}).slots == 128
    assert Config(train={"prompts_per_step": 300}, rollout={"slots": 200}).slots == 200


def test_parity_tolerances_depend_on_the_dtype_unless_given():
    assert Config().parity_tolerances == (1e-5, 1e-4)
    assert Config(model={"dtype": "bfloat16"}).parity_tolerances == (0.05, 0.3)
    assert Config(parity={"p99_tolerance": 0.5}).parity_tolerances == (1e-5, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpo: {num_generations: 1}",
            "grpo.num_generations: 1 is below the minimum 2; raise it to at least 2",
        ),
        (
            "train: {learning_rate: 0}",
            "train.learning_rate: 0 is not above 0; set it above 0",
        ),
        ("train: {adam_beta2: 1.0}", "train.adam_beta2: 1.0 is not below 1; set it below 1"),
        (
            "grpo: {loss_type: ppo}",
            "grpo.loss_type: ppo is not one of 'grpo', 'dr_grpo', 'dapo', 'gspo' or 'cispo'; choose one of them",
        ),
        ("grpo: {epsilom: 0.1}", "grpo.epsilom: is not a known field; did you mean grpo.epsilon?"),
        ("learning_rate: 1", "learning_rate: is not a known field; did you mean train.learning_rate?"),
        ("num_generations: 8", "num_generations: is not a known field; did you mean grpo.num_generations?"),
        (
            "lora: {rank: 8}",
            "lora.rank: is not a known field; lora has r, alpha, target_modules, modules_to_save, dropout",
        ),
        ("grpo: {overlong_penalty: {}}", "grpo.overlong_penalty.cache_length: is missing; set it"),
        ("eval: {budgets: [0]}", "eval.budgets.0: 0 is below the minimum 1; raise it to at least 1"),
        (
            "lora: {dropout: 0.1}",
            "lora.dropout: 0.1 is not 0, and its noise would make the learner differ from the sampler; "
            "set lora.dropout to 0",
        ),
        (
            "sampling: {temperature: 0}",
            "sampling.temperature: 0 is greedy, so all completions of a prompt are equal and nothing can be "
            "learned; set sampling.temperature above 0",
        ),
        (
            "cache: {policy: dense}",
            "cache.policy: dense keeps every entry, so method shadow_mask has nothing to compress; "
            "set method to dense, or cache.policy to one that `kvrl policies` lists",
        ),
        (
            "grpo: {overlong_penalty: {cache_length: 300}}",
            "grpo.overlong_penalty.cache_length: 300 is above sampling.max_completion_length (256); "
            "lower it to at most 256",
        ),
        (
            "grpo: {num_minibatches: 9}",
            "grpo.num_minibatches: 9 is above train.prompts_per_step (8); lower it or raise train.prompts_per_step",
        ),
        (
            "train: {max_steps: 5, warmup_steps: 10}\ngrpo: {num_iterations: 2}",
            "train.warmup_steps: 10 is not below the run's 10 optimiser steps; lower it to at most 9",
        ),
        (
            "checkpoint: {resume: no/such/folder}",
            "checkpoint.resume: no/such/folder is not a folder; give a checkpoint folder or `latest`, or leave it out",
        ),
    ],
)
def test_a_wrong_field_is_told_in_one_line(tmp_path, text, message):
    assert refusal(tmp_path, text) == message


def test_wrong_types_infinities_and_several_mistakes(tmp_path):
    assert refusal(tmp_path, "train: {max_steps: many}").startswith("train.max_steps: many is refused: ")
    assert refusal(tmp_path, "grpo: {beta: .inf}").startswith("grpo.beta: inf is refused: ")
    assert refusal(tmp_path, "grpo: 3").startswith("grpo: 3 is refused: ")
    assert refusal(tmp_path, "seed: -1\ngrpo: {beta: -1}").endswith("at least 0 (and 1 more)")


def test_policies_and_budgets_are_checked_when_the_file_is_read(tmp_path):
    assert "'rkvv' is not one of" in refusal(tmp_path, "cache: {policy: rkvv}")
    cache = "cache: {budget: 24, window: 8, sinks: 2}\n"
    assert load(tmp_path, cache + "eval: {budgets: [full, 10]}").eval_budgets == ["full", 10]
    message = refusal(tmp_path, cache + "eval: {budgets: [full, 9]}")
    assert message.startswith("eval.budgets: 9 is refused: cache.budget: 9 is below the 10 entries")
    assert refusal(tmp_path, "cache: {budget: 9, window: 8, sinks: 2}").startswith("cache.budget: 9 is below the 10")


def test_flex_needs_cuda(tmp_path, monkeypatch):
    text = "replay: {backend: flex}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "replay.backend: flex needs CUDA" in refusal(tmp_path, text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load(tmp_path, text).replay.backend == "flex"


def test_resume_from_latest_or_a_folder_that_exists(tmp_path):
    assert load(tmp_path, "checkpoint: {resume: latest}").checkpoint.resume == "latest"
    assert load(tmp_path, f"checkpoint: {{resume: '{tmp_path}'}}").checkpoint.resume == str(tmp_path)


def test_files_that_are_not_a_configuration(tmp_path):
    with pytest.raises(KvrlError, match="none.yaml: cannot be read .No such file or directory."):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(KvrlError, match="cannot be read .Is a directory."):
        load_config(tmp_path)
    assert "config.yaml: holds a list, not a mapping" in refusal(tmp_path, "- 1\n- 2\n")
    assert "config.yaml: is not valid YAML: line 3, column 1" in refusal(tmp_path, "seed: 1\ngrpo: {beta: 1\n")
    assert "line 2, column 1 repeated key seed" in refusal(tmp_path, "seed: 1\nseed: 2\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KvrlError, match="binary.yaml: is not UTF-8 text"):
        load_config(tmp_path / "binary.yaml")


def test_a_flag_below_a_field_that_has_no_fields(tmp_path):
    assert refusal(tmp_path, "seed: 3", ("seed.x", "1")) == "--seed.x: seed is 3 and has no fields; set seed itself"
    assert "--seed: is not valid YAML" in refusal(tmp_path, "seed: 1", ("seed", "[1"))


def test_a_dense_policy_is_evaluated_with_the_full_cache_alone(tmp_path):
    dense = "method: dense\ncache: {policy: dense}\n"
    assert load(tmp_path, dense).eval_budgets == ["full"]
    assert load(tmp_path, "method: dense\ncache: {budget: 64}").eval_budgets == [64, "full"]
    message = refusal(tmp_path, dense + "eval: {budgets: [24, full]}")
    assert message.startswith("eval.budgets: 24 has no meaning under cache.policy dense")


def test_an_infinite_temperature(tmp_path):
    assert refusal(tmp_path, "sampling: {temperature: .inf}").startswith("sampling.temperature: inf is refused")
