from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.models.tiny import make_tiny
from kvrl.rewards import REWARDS, Reward, get_reward
from kvrl.rewards.base import require
from kvrl.rewards.build import build_rewards
from kvrl.rewards.config import RewardSettings
from kvrl.rewards.judge import Judge
from kvrl.rewards.pairs import Preferences
from kvrl.tasks import get_task
from kvrl.train.run import build, check_scored_alone
from kvrl.train.trainer import train
from runs import make_config

COLUMNS = {"prompt": ["p", "q"], "answer": ["paris", "rome"]}

FUNCTIONS = """
async def remote(completions, answer, factor=1.0, **kwargs):
    return [factor * len(a) for a in answer]

def count(prompts, completions, **kwargs):
    return [float(len(c)) for c in completions]

class Thing:
    pass
"""


class Task:
    """A task as far as rewards see it."""

    name = "stub"

    def reward(self, completions: list[str], **columns: list) -> list[float | None]:
        return [100.0] * len(completions)


def rewards_of(*funcs: Any, **settings: Any):
    return build_rewards(RewardSettings(funcs=list(funcs), **settings), Task())  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_functions_of_every_kind_are_summed(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kvrl_test_module.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    rewards = rewards_of(
        "task", {"func": "exact_match", "weight": 10}, {"func": f"{file}:remote", "params": {"factor": 1000.0}},
        "kvrl_test_module:count", f"{file}:count",
    )  # fmt: skip
    assert rewards.names == ["task", "exact_match", "remote", "count_3", "count_4"]
    assert rewards.weights == [1.0, 10.0, 1.0, 1.0, 1.0]
    scores = rewards(["Paris", "Oslo"], COLUMNS)
    assert scores.per_function.tolist() == [[100.0, 1.0, 5000.0, 5.0, 5.0], [100.0, 0.0, 4000.0, 4.0, 4.0]]
    assert scores.rewards.tolist() == [5120.0, 4108.0]
    assert scores.metrics()["rewards/task/mean"] == 100.0


def test_a_file_is_read_again_and_nothing_is_left_beside_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1.0, 2.0):  # texts of one size, in one second
        file.write_text(f"def score(completions, **kwargs):\n    return [{number}]\n")
        os.utime(file, (1e9, 1e9))
        assert rewards_of(f"{file}:score")(["a"], {"prompt": [""]}).rewards.tolist() == [number]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_settings_reach_the_call(file: Path) -> None:
    file.write_text("def odd(completions, **kwargs):\n    return [1.0, float('nan')]\n")
    rewards = rewards_of(f"{file}:odd", "task", weights=[2.0, 0.5], on_error="drop")
    with pytest.warns(UserWarning) as told:
        assert rewards(["a", "b"], COLUMNS).rewards.tolist() == [52.0, 50.0]
        assert rewards(["a", "b"], COLUMNS).errors == 1
    assert len(told) == 1  # of the first error that is dropped
    assert str(told[0].message).startswith("reward.funcs.odd: returned nan for sample 1 (prompt 'q'); counted as None")
    file.write_text("import time\ndef slow(completions, **kwargs):\n    time.sleep(5)\n")
    with pytest.raises(KvrlError, match="slow: took over 0.01 s"):
        rewards_of(f"{file}:slow", timeout=0.01)(["a", "b"], COLUMNS)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("exact_mach", "reward.funcs: exact_mach is not one of task, .*; did you mean exact_match?"),
        (
            {"func": "f1", "params": {"colum": "x"}},
            "reward.funcs.f1.params.colum: f1 has no such parameter; it has column",
        ),
        (
            {"func": "fuzzy_match", "params": {"threshold": 2}},
            "reward.funcs.fuzzy_match.params.threshold: 2 is above the",
        ),
        ({"func": "reward_model"}, "reward.funcs.reward_model.params.path: is missing; set it"),
        ({"func": "task", "params": {"a": 1}}, "reward.funcs.task.params: the task's scorer has none"),
        ("MINE:wrong", "has no function 'wrong'; it has count, remote"),
        ("MINE:Thing", "has no function 'Thing'; it has count, remote"),
        ({"func": "BAD:f"}, r"bad.py cannot be imported \(ZeroDivisionError: division by zero\)"),
        ({"func": "EXITS:f"}, r"exits.py cannot be imported \(SystemExit: 2\)"),
        ("builtins:max", r"reward\.funcs\.max: does not tell its arguments .*from a function of your own"),
        ("missing.py:f", r"missing.py cannot be imported \(FileNotFoundError"),
        ("no_such_package.module:f", r"no_such_package.module cannot be imported \(ModuleNotFoundError"),
    ],
)
def test_mistakes_are_told_before_anything_runs(file: Path, entry: Any, message: str) -> None:
    (file.parent / "bad.py").write_text("1 / 0\n")
    (file.parent / "exits.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n")
    entry = {"func": entry} if isinstance(entry, str) else dict(entry)
    entry["func"] = entry["func"].replace("MINE", str(file)).replace("BAD", str(file.parent / "bad.py"))
    entry["func"] = entry["func"].replace("EXITS", str(file.parent / "exits.py"))
    with pytest.raises(KvrlError, match=message) as refused:
        rewards_of(entry)
    assert "\n" not in str(refused.value)


def test_a_parameter_that_the_function_lacks(file: Path) -> None:
    file.write_text("def f(completions, answer):\n    return [1.0] * 2\n")
    with pytest.raises(KvrlError, match=r"reward\.funcs\.f\.params\.factor: .* its arguments: completions, answer"):
        rewards_of({"func": f"{file}:f", "params": {"factor": 1}})
    file.write_text(FUNCTIONS)
    with pytest.raises(KvrlError, match=r"remote\.params\.facto: .* did you mean factor\?"):  # **kwargs would take it
        rewards_of({"func": f"{file}:remote", "params": {"facto": 1}})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"func": "exact_match", "params": {"column": "gold"}},
            "exact_match: needs column gold, and the data has prompts",
        ),
        (
            {"func": "MINE:remote", "params": {"answer": ["x"]}},
            "remote.params.answer: the data has a column of that name",
        ),
    ],
)
def test_columns_are_checked_on_the_first_rows(file: Path, entry: dict[str, Any], message: str) -> None:
    rewards = rewards_of(entry | {"func": entry["func"].replace("MINE", str(file))})
    with pytest.raises(KvrlError, match=message):
        rewards.check(COLUMNS)
    rewards_of("exact_match", "task", f"{file}:count").check(COLUMNS)


def test_a_reward_sees_the_first_rows() -> None:
    seen = []

    class Picky(Reward):
        name = "picky"

        def check(self, columns: Mapping[str, list]) -> None:
            seen.append(dict(columns))

    rewards = rewards_of("task")
    rewards.funcs.append(Picky())
    rewards.names.append("picky")
    rewards.check(COLUMNS)
    assert seen == [{"prompts": ["p", "q"], "answer": ["paris", "rome"]}]


@pytest.mark.parametrize(
    ("name", "params", "package", "extra"),
    [
        ("math_verify", {}, "math_verify", "rewards"),
        ("rouge_l", {}, "rouge_score", "rewards"),
        ("fuzzy_match", {}, "rapidfuzz", "rewards"),
        ("judge", {"base_url": "http://localhost:1/v1", "model": "m"}, "openai", "judge"),
    ],
)
def test_a_missing_package_names_its_extra(
    name: str, params: dict, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [_Hidden(package), *sys.meta_path])
    with pytest.raises(KvrlError, match=rf"{name}: needs the package {package}, .* pip install -e '\.\[{extra}\]'"):
        rewards_of({"func": name, "params": params})


class _Hidden:
    """An import hook under which a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_the_registry_s_names_are_the_classes_own(name: str) -> None:
    needed = {"reward_model": {"path": "x"}, "judge": {"base_url": "x", "model": "m"}}
    assert get_reward(name, **needed.get(name, {})).name == name


def test_a_run_refuses_a_missing_column_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrl.train.run.load_policy", lambda *_: pytest.fail("a model was loaded"))
    config = make_config(tmp_path, reward={"funcs": ["task", {"func": "rouge_l", "params": {"column": "gold"}}]})
    with pytest.raises(KvrlError, match="rouge_l: needs column gold, and the data has prompts, n, answer"):
        build(config, lambda _: None)


def test_a_package_that_lacks_a_package_of_its_own_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvrl_test_broken.py").write_text("import kvrl_test_nothing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="kvrl_test_nothing"):
        require("kvrl_test_broken", "rewards", "rouge_l")


@pytest.fixture
def unanswered(tmp_path: Path, file: Path) -> dict[str, Any]:
    """A run on prompts without answers, which a function of the user's scores."""
    words = [str(n) for n in range(10)]
    make_tiny(tmp_path / "model", words, 0)
    rows = [{"prompt": f"{a} {b}", "topic": a} for a in words for b in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file.write_text("def number(completions, topic, **kwargs):\n    return [float(t) for t in topic]\n")
    return {
        "model": {"path": str(tmp_path / "model")}, "warm_start": None, "train": {"max_steps": 1},
        "task": {"name": "jsonl", "params": {"path": str(tmp_path / "rows.jsonl"), "answers": False}},
        "reward": {"funcs": [f"{file}:number"]}, "sampling": {"max_completion_length": 8},
        "cache": {"policy": "rkv", "budget": 6, "buffer": 2, "window": 2, "sinks": 2}, "eval": {"n": 4},
    }  # fmt: skip


def test_the_run_s_rewards_score_held_out_prompts_without_answers(tmp_path: Path, unanswered: dict[str, Any]) -> None:
    ended = train(make_config(tmp_path / "run", **unanswered))["evaluations"][1]
    task = get_task("jsonl", **unanswered["task"]["params"])
    mean = sum(int(row["topic"]) for row in task.rows("eval", 4, 0)) / 4
    assert [(e["budget"], e["accuracy"]) for e in ended] == [("6", mean), ("full", mean)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"reward": {"funcs": ["task"]}}, "reward.funcs: task, and jsonl has no scorer without answers; name another"),
    ({"reward": {"funcs": [{"func": "rouge_l", "params": {"column": "gold"}}]}}, "needs column gold"),
])  # fmt: skip
def test_what_cannot_score_is_told_before_a_model_is_loaded(
    tmp_path: Path, unanswered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, changes: Any, message: str
) -> None:
    monkeypatch.setattr("kvrl.train.run.load_policy", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(KvrlError, match=message):
        build(make_config(tmp_path / "run", **{**unanswered, **changes}), lambda _: None)


def test_a_pairwise_judge_scores_no_held_out_completion(tmp_path: Path, unanswered: dict[str, Any]) -> None:
    judge = get_reward("judge", base_url="http://localhost:1", model="m", mode="pairwise")
    assert isinstance(judge, Judge)
    config = make_config(tmp_path / "run", **unanswered)
    with pytest.raises(KvrlError, match="eval.n: 4 held-out completions, .* can score one alone; set eval.n to 0"):
        check_scored_alone(config, Preferences(judge, 4), {})


def test_an_evaluation_by_command_needs_answers(
    tmp_path: Path, unanswered: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    params = json.dumps(unanswered["task"]["params"])
    for more in ([], ["--curve"]):
        flags = ["--task", "jsonl", "--task_params", params, "--n", "4", *more]
        assert main(["eval", str(tmp_path / "model"), *flags]) == 2
        assert "jsonl with answers: false has nothing to score completions by" in capsys.readouterr().err
