from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvrl.errors import KvrlError
from kvrl.rewards import REWARDS, get_reward
from kvrl.train.config import Config, load_config


def load(folder: Path, text: str) -> Config:
    path = folder / "c.yaml"
    path.write_text(text)
    return load_config(path)


def test_the_task_s_own_scorer_is_the_default() -> None:
    reward = Config().reward
    assert [(entry.func, entry.params) for entry in reward.funcs] == [("task", {})]
    assert reward.all_weights == [1.0] and reward.on_error == "stop" and reward.timeout is None


def test_names_and_mappings(tmp_path: Path) -> None:
    text = "reward:\n  funcs: [task, {func: f1, weight: 0.5, params: {column: gold}}]\n  timeout: 3\n"
    reward = load(tmp_path, text).reward
    assert [entry.func for entry in reward.funcs] == ["task", "f1"]
    assert reward.funcs[1].params == {"column": "gold"}
    assert reward.all_weights == [1.0, 0.5] and reward.timeout == 3


def test_weights_as_a_list(tmp_path: Path) -> None:
    assert load(tmp_path, "reward: {funcs: [task, f1], weights: [2, 0.5]}").reward.all_weights == [2.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward: {funcs: [task, f1], weights: [1]}", "reward.weights: 1 weights for 2 functions in reward.funcs"),
        (
            "reward: {funcs: [{func: f1, weight: 1}], weights: [1]}",
            "reward.weights: is given, and so is the weight of f1",
        ),
        ("reward: {funcs: []}", "reward.funcs: "),
        (
            "reward: {funcs: [{func: f1, wieght: 1}]}",
            "reward.funcs.0.wieght: is not a known field; did you mean reward.fu",
        ),
        ("reward: {funcs: [{weight: 1}]}", "reward.funcs.0.func: is missing; set it"),
        ("reward: {funcs: [{func: f1, weight: .inf}]}", "reward.funcs.0.weight: inf"),
        ("reward: {timeout: 0}", "reward.timeout: 0 is not above 0; set it above 0"),
        ("reward: {func: [task]}", "reward.func: is not a known field; did you mean reward.funcs?"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(KvrlError) as refused:
        load(tmp_path, text)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_configuration_survives_its_own_json() -> None:
    config = Config.model_validate({"reward": {"funcs": ["task", {"func": "f1", "weight": 2}], "on_error": "drop"}})
    again = Config.model_validate_json(config.model_dump_json())
    assert again.reward == config.reward and again.reward.all_weights == [1.0, 2.0]


def test_weights_survive_it_too() -> None:
    config = Config.model_validate({"reward": {"funcs": ["task", "f1"], "weights": [1, 2]}})
    assert Config.model_validate_json(config.model_dump_json()).reward.all_weights == [1.0, 2.0]


def test_the_examples_of_the_documentation_are_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 7
    for example in examples:
        for entry in Config.model_validate(yaml.safe_load(example)).reward.funcs:
            if entry.func in REWARDS:
                get_reward(entry.func, **entry.params)
