"""Every example: its file is valid, its task and reward exist, and its README says what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from kvrl.eval.study import Runner, Study
from kvrl.rewards import REWARDS
from kvrl.tasks import get_task
from kvrl.train.config import Config, load_config
from kvrl.train.config_file import read_config

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = [file for file in sorted(EXAMPLES.glob("*/*.yaml")) if file.parent.name != "results"]  # suites, not runs
IDS = [str(file.relative_to(EXAMPLES)) for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_an_example_is_valid(file):
    config = load_config(file)
    assert Config.model_validate(config.model_dump()) == config
    if config.task.name in ("reasoning_gym", "countdown", "star_graph"):
        pytest.importorskip("reasoning_gym")
    assert get_task(config.task.name, **config.task.params).name == config.task.name
    assert all(entry.func == "task" or entry.func in REWARDS for entry in config.reward.funcs)
    assert config.output_dir.startswith("runs/")


@pytest.mark.parametrize("file", FILES, ids=IDS)
def test_an_example_states_its_hardware(file):
    readme = (file.parent / "README.md").read_text()
    assert file.name in readme and "hardware" in readme.lower()


def test_the_study_that_is_explained_is_valid(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", (EXAMPLES / "results" / "README.md").read_text(), re.DOTALL)
    assert text is not None
    base = EXAMPLES / "quickstart" / "config.yaml"
    (tmp_path / "study.yaml").write_text(text[1].replace("../quickstart/config.yaml", str(base)))
    study = read_config(Study, tmp_path / "study.yaml")
    Runner(study, tmp_path / "study.yaml", tmp_path, 1, Console()).check()


def test_every_study_is_valid_and_named():
    readme = (EXAMPLES / "results" / "README.md").read_text()
    for file in EXAMPLES.glob("results/*.yaml"):
        Runner(read_config(Study, file), file, EXAMPLES / "results", 1, Console()).check()
        assert file.name in readme


def test_sparse_rl_has_the_papers_settings():
    configs = [load_config(file) for file in EXAMPLES.glob("sparse_rl/*.yaml")]
    assert {config.model.path for config in configs} == {
        "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.2-1B",
    }  # fmt: skip
    for config in configs:
        assert (config.method, config.algorithm, config.grpo.loss_type) == ("sparse_rl", "grpo", "grpo")
        cache, rule = config.cache, config.sparse_rl
        assert (cache.policy, cache.budget, cache.buffer, cache.window) == ("rkv", 512, 128, 8)
        assert (rule.reject_below, rule.max_weight, rule.band, rule.normalize) == (1e-4, 1.5, (0.5, 1.5), True)
        assert (config.grpo.beta, config.grpo.epsilon, config.grpo.num_generations) == (1e-4, 0.2, 8)
        assert (config.train.prompts_per_step, config.train.learning_rate) == (128, 1e-6)
        assert (config.grpo.num_minibatches, config.grpo.num_iterations, config.train.max_steps) == (4, 1, 100)
        assert (config.train.weight_decay, config.train.adam_beta1, config.train.adam_beta2) == (0.1, 0.9, 0.98)
        assert (config.sampling.max_completion_length, config.sampling.temperature) == (4096, 1.0)
        assert config.task.name == "math" and config.task.params["levels"] == [3, 4, 5]


def test_shadow_mask_has_the_papers_objective():
    configs = {file.stem: load_config(file) for file in EXAMPLES.glob("shadow_mask/*.yaml")}
    assert {name: config.model.path for name, config in configs.items()} == {
        "gsm8k": "Qwen/Qwen2.5-1.5B", "tldr": "Qwen/Qwen3-0.6B", "govreport": "Qwen/Qwen3-1.7B",
        "hotpotqa": "Qwen/Qwen3-4B",
    }  # fmt: skip
    for name, config in configs.items():
        assert (config.method, config.task.name) == ("shadow_mask", name)
        # lambda KL(dense || sg(sparse)): the sparse view teaches, and the student's distribution comes first
        assert (config.distill.weight, config.distill.teacher, config.distill.kl) == (0.1, "sparse", "reverse")
