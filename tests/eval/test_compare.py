"""Comparisons: what is refused before anything runs, and what of an earlier comparison is used again."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from kvrl.errors import KvrlError
from kvrl.eval import compare, starts
from runs import make_config


def arguments(tmp_path: Path, methods: str = "naive,shadow_mask", **changes) -> Namespace:
    changes = {"warm_start": {"steps": 1}, "train": {"max_steps": 1}, "eval": {"n": 2}, **changes}
    config = make_config(tmp_path / "out", **changes).model_dump(mode="json", exclude={"sampling": {"num_generations"}})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    return Namespace(
        config=str(tmp_path / "c.yaml"),
        overrides=[("output_dir", str(tmp_path / "out"))],
        methods=methods.split(","),
        seeds=1,
        first_seed=0,
        json=True,
    )


@pytest.mark.parametrize(("methods", "changes", "message"), [
    ("naive,naive", {}, "--methods: naive is named 2 times"),
    ("naive", {"eval": {"n": 0}}, "eval.n: 0 evaluates nothing"),
    ("naive", {"eval": {"n": 2, "budgets": [12, 16, "full"]}}, r"eval.budgets: .* set eval.budgets to \[12, full\]"),
    ("naive", {"eval": {"n": 2, "budgets": [12]}}, "eval.budgets: "),
    ("naive", {"eval": {"n": 2, "budgets": ["full"]}}, "eval.budgets: "),
])  # fmt: skip
def test_what_the_table_cannot_show_is_refused(tmp_path, methods, changes, message):
    with pytest.raises(KvrlError, match=message):
        compare.run_compare(arguments(tmp_path, methods, **changes))
    assert not (tmp_path / "out").exists()


def test_the_configurations_own_folder_is_left_alone(tmp_path):
    args = arguments(tmp_path)
    args.overrides = []
    assert {Path(c.output_dir).parts[:2] for c in compare.plan(args)} == {("runs", "compare")}


@pytest.mark.parametrize("own", ["shadow_mask", "breadcrumbs"])  # the configuration's method
def test_breadcrumbs_is_a_section_of_its_method_alone(tmp_path, own):
    beacons = {"method": own, "cache": {"policy": "beacon", "params": {"every": 2}}}
    args = arguments(tmp_path, "breadcrumbs,dense,shadow_mask", **beacons)
    args.overrides.append(("breadcrumbs.student", "separate"))
    configs = {config.method: config for config in compare.plan(args)}
    assert {name: c.breadcrumbs.student for name, c in configs.items()} == {
        "breadcrumbs": "separate", "dense": "same", "shadow_mask": "same"
    }  # fmt: skip
    assert compare.base_of(args).output_dir == str(tmp_path / "out")


def test_breadcrumbs_fields_without_the_method_are_refused(tmp_path):
    args = arguments(tmp_path, "dense", cache={"policy": "beacon", "params": {"every": 2}})
    args.overrides.append(("breadcrumbs.student", "separate"))
    with pytest.raises(KvrlError, match="breadcrumbs.student: has no meaning under method .*leave .* out"):
        compare.plan(args)


def test_an_output_dir_that_is_a_file_is_refused_before_the_first_start(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(KvrlError, match="output_dir: .*out is a file"):
        compare.run_compare(arguments(tmp_path))


def test_runs_and_starts_are_used_again_only_where_nothing_changed(tmp_path, monkeypatch, capsys):
    from kvrl.train import run, trainer

    done: list[str] = []
    make_start, train = run.make_start, trainer.train

    def starting(config, folder, say):
        done.append("start")
        make_start(config, folder, say)
        assert folder.name.endswith(".partial")  # a cut start is never taken for a whole one

    monkeypatch.setattr(run, "make_start", starting)
    monkeypatch.setattr(trainer, "train", lambda config: (done.append(config.method), train(config)))

    def runs(**changes) -> list[str]:
        done.clear()
        compare.run_compare(arguments(tmp_path, **changes))
        return list(done)

    assert runs() == ["start", "naive", "shadow_mask"]
    assert {row["method"] for row in json.loads(capsys.readouterr().out)["methods"]} == {"naive", "shadow_mask"}
    assert runs() == []
    assert runs(warm_start={"steps": 2}) == ["start", "naive", "shadow_mask"]  # the runs' own fields are the same
    assert runs(warm_start={"steps": 2}, train={"max_steps": 2}) == ["naive", "shadow_mask"]
    (tmp_path / "out" / "start" / "seed-0" / starts.START).unlink()
    assert runs(warm_start={"steps": 2}, train={"max_steps": 2}) == ["start", "naive", "shadow_mask"]


def test_under_lora_every_run_makes_its_own_start(tmp_path):
    plan = compare.plan(arguments(tmp_path, lora={"r": 2}))
    assert [(c.model.path, c.warm_start.steps) for c in plan] == [("tiny", 1)] * 2
    compare.run_compare(arguments(tmp_path, lora={"r": 2}))
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())["methods"]
    assert rows[0]["start_full_accuracy"] == rows[1]["start_full_accuracy"]
    assert not (tmp_path / "out" / "start").exists()
