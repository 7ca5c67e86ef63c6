"""Studies: what is run with which settings, how a setting is chosen, and the numbers of the table."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.eval import study_report
from kvrl.eval.study import Outcome, Runner, Study, prepare_report
from runs import make_config


def runner(tmp_path: Path, **fields) -> Runner:
    config = make_config(tmp_path / "out", eval={"n": 2}).model_dump(
        mode="json", exclude={"sampling": {"num_generations"}}
    )
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    study = Study(**{"title": "t", "base": "base.yaml", "seeds": [0, 1], "variants": {"a": {}, "b": {}}, **fields})
    return Runner(study, tmp_path / "s.yaml", tmp_path / "runs", 1, Console(stderr=True))


def outcome(compressed=0.5, full=0.5, rewards=(0.5,), **fields) -> Outcome:
    return Outcome(compressed, full, 0.1, 0.2, [{"reward": r, "grad_norm": 1.0, **fields} for r in rewards])


def test_tuning_moves_one_field_after_the_other(tmp_path, monkeypatch):
    made = runner(
        tmp_path,
        tuning={"seeds": [7, 8], "grid": {"train.learning_rate": [1, 2, 3]}},
        variants={"a": {"grid": {"correction.bounds": [[None, 2.0], [None, 5.0]]}}},
    )
    asked = []

    def all_of(runs):
        asked.extend(runs)
        score = {1: 0.1, 2: 0.3, 3: 0.2}
        return [outcome(compressed=score[values["train.learning_rate"]]) for _, values, _ in runs]

    monkeypatch.setattr(made, "all", all_of)
    best, tried = made.tune("a")
    assert best == {"correction.bounds": [None, 2.0], "train.learning_rate": 2}  # equal scores: the first of the grid
    assert len(asked) == (3 + 2) * 2 and {seed for _, _, seed in asked} == {7, 8}
    assert [t.score for t in tried] == pytest.approx([0.1, 0.3, 0.2, 0.3, 0.3])
    assert asked[0][1] == {"correction.bounds": [None, 2.0], "train.learning_rate": 1}


def test_a_run_has_its_own_fields_and_starts_where_others_of_its_seed_start(tmp_path):
    made = runner(tmp_path, overrides={"cache.budget": 13}, variants={"a": {"overrides": {"method": "naive"}}, "b": {}})
    a, b = made.config("a", {"train.learning_rate": 0.5}, 1), made.config("b", {}, 1)
    assert (a.method, a.cache.budget, a.train.learning_rate, a.seed) == ("naive", 13, 0.5, 1)
    assert a.warm_start is None and a.model.path == b.model.path and made.config("a", {}, 0).model.path != a.model.path
    assert a.output_dir != made.config("a", {}, 1).output_dir


@pytest.mark.parametrize(("fields", "message"), [
    ({"tuning": {"seeds": [1, 9], "grid": {}}}, "tuning.seeds: 1 is also reported"),
    ({"variants": {"a": {"grid": {"seed": [1]}}}}, "variants.a.grid: is set and the study has no tuning"),
    ({"variants": {"a": {"overrides": {"method": "nothing"}}}}, "method"),
    ({"tuning": {"seeds": [9], "grid": {"train.learning_rate": [0.1, -1]}}}, "train.learning_rate: -1"),
    ({"overrides": {"eval.n": 0}}, "eval.n 0"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_does(tmp_path, fields, message):
    with pytest.raises(KvrlError, match=message):
        runner(tmp_path, **fields).check()
    assert not (tmp_path / "runs").exists()


def study_error(capsys, *argv: str) -> str:
    assert main(["study", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_folder_and_report_are_checked_before_anything_runs(tmp_path, monkeypatch, capsys):
    runner(tmp_path)
    file = tmp_path / "s.yaml"
    file.write_text("title: t\nbase: base.yaml\nseeds: [0]\nvariants: {a: {}}\n")
    monkeypatch.setattr(Runner, "run", lambda self: pytest.fail("ran"))
    (tmp_path / "file").write_text("")
    assert "--output_dir: " in study_error(capsys, str(file), "--output_dir", str(tmp_path / "file"))
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    flags = ["--output_dir", str(tmp_path / "runs"), "--report"]
    assert "has no lines <!-- study: s -->" in study_error(capsys, str(file), *flags, str(page))
    assert "cannot be written" in study_error(capsys, str(file), *flags, str(tmp_path / "none" / "page.md"))
    assert "is no study (it has no base and no variants)" in study_error(capsys, str(tmp_path / "base.yaml"))


def test_a_missing_report_is_made_with_its_markers(tmp_path):
    prepare_report(tmp_path / "new.md", ["tight", "gentle"])
    for name in ("tight", "gentle"):
        study_report.insert(tmp_path / "new.md", name, f"| {name} |")
    text = (tmp_path / "new.md").read_text()
    assert text.index("<!-- study: tight -->") < text.index("| tight |") < text.index("| gentle |")


def test_interval_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303
    found = study_report.interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["half_width_95"] == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(study_report.interval([0.4])["half_width_95"])
    assert study_report.shown(study_report.interval([0.4])) == "0.400"


def test_collapse():
    assert study_report.collapsed([0.5] * 10 + [0.2] * 90) and not study_report.collapsed([0.5] * 10 + [0.26] * 90)


def test_table_shows_every_variant_and_what_was_tried():
    results = {
        "tis": {
            "values": {"correction.bounds": [None, 2.0]},
            "tried": [SimpleNamespace(values={"correction.bounds": [None, 2.0]}, score=0.25)],
            "outcomes": {
                0: outcome(0.25, 0.75, [0.5, 0.1], **{"correction/share_rejected": 0.5}),
                1: outcome(0.35, 0.85),
            },
        }
    }
    rows = {name: study_report.summarise(result) for name, result in results.items()}
    line = study_report.main_table(rows).splitlines()[-1]
    assert "0.300 ± 0.635" in line and "0.800 ± 0.635" in line and ".25 .35" in line  # t(1) = 12.706
    assert "1 of 2" in line and "50.0%" in line and "bounds [None, 2.0]" in line
    assert "0.250" in study_report.tuning_table(rows)[0]


def test_tables_go_between_their_markers_alone(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- study: tight -->\nold\n<!-- end of study -->\nafter\n")
    study_report.insert(page, "tight", "| new |")
    assert page.read_text() == "before\n<!-- study: tight -->\n\n| new |\n\n<!-- end of study -->\nafter\n"
    with pytest.raises(KvrlError, match="study: gentle"):
        study_report.insert(page, "gentle", "x")
