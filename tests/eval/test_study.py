"""Studies: what is run with which settings, how a setting is chosen, and the numbers of the table."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import ValidationError
from rich.console import Console

from kvrl.beacons.config import beacons_of
from kvrl.beacons.model import NAME
from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.eval import study_report
from kvrl.eval.curve_report import curve_tables
from kvrl.eval.interval import interval, markdown, shown
from kvrl.eval.study import Outcome, Runner, Study, is_curve_of, prepare_report
from kvrl.train.setup import load_model
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
        variants={"a": {"grid": {"correction.bounds": [[None, 2.0], [None, 5.0]]}}, "b": {}},
    )
    asked: list = []

    def all_of(runs):
        asked.append(runs)
        score = {1: 0.1, 2: 0.3, 3: 0.2}
        return [outcome(compressed=score[values["train.learning_rate"]]) for _, values, _ in runs]

    monkeypatch.setattr(made, "all", all_of)
    chosen, trials = made.tune()
    best, tried = chosen["a"], trials["a"]
    assert best == {"correction.bounds": [None, 2.0], "train.learning_rate": 2}  # equal scores: the first of the grid
    assert [[name for name, _, _ in turn] for turn in asked] == [["a"] * 6 + ["b"] * 6, ["a"] * 4]
    assert {seed for turn in asked for _, _, seed in turn} == {7, 8}
    assert chosen["b"] == {"train.learning_rate": 2} and len(trials["b"]) == 3
    assert [t.score for t in tried] == pytest.approx([0.1, 0.3, 0.2, 0.3, 0.3])
    assert asked[0][0][1] == {"correction.bounds": [None, 2.0], "train.learning_rate": 1}


def test_a_run_has_its_own_fields_and_starts_where_others_of_its_seed_start(tmp_path):
    made = runner(tmp_path, overrides={"cache.budget": 13}, variants={"a": {"overrides": {"method": "naive"}}, "b": {}})
    a, b = made.config("a", {"train.learning_rate": 0.5}, 1), made.config("b", {}, 1)
    assert (a.method, a.cache.budget, a.train.learning_rate, a.seed) == ("naive", 13, 0.5, 1)
    assert a.warm_start is None and a.model.path == b.model.path and made.config("a", {}, 0).model.path != a.model.path
    assert a.output_dir != made.config("a", {}, 1).output_dir


@pytest.mark.parametrize(("fields", "message"), [
    ({"tuning": {"seeds": [1, 9], "grid": {}}}, "tuning.seeds: 1 is also reported"),
    ({"variants": {"a": {"grid": {"seed": [1]}}}}, "variants.a.grid: is set and the study has no tuning"),
    ({"variants": {"a": {"overrides": {"method": "nothing"}}}}, r"\.yaml, variant a: method: nothing is not one of"),
    ({"variants": {"a": {}, "b": {"overrides": {"metod": 1}}}}, r"\.yaml, variant b: metod: is not a known"),
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


def test_a_misspelled_field_of_a_study_is_told_with_its_file(tmp_path, capsys):
    file = tmp_path / "s.yaml"
    file.write_text("title: t\nbase: base.yaml\nsedes: [0]\nvariants: {a: {}}\n")
    assert f"{file}: sedes: is not a known field; did you mean seeds? (and 1 more)" in study_error(capsys, str(file))
    file.write_text("")
    assert f"error: {file}: is empty" in study_error(capsys, str(file))


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


FIELDS = {"cache.policy": "beacon", "cache.budget": 512, "cache.buffer": 128, "cache.window": None, "cache.sinks": None,
          "cache.params": {"every": [2, 4]}}  # fmt: skip


def test_what_others_start_from_is_trained_first(tmp_path, monkeypatch):
    """Two seeds of `a`, then `b` from their models, then `c` from b's, whatever the order asked for."""
    made = runner(tmp_path, variants={"a": {}, "b": {"start": "a"}, "c": {"start": "b", "curve": False}})
    done = []

    def train(config, curve, origin):
        if origin is not None:
            origin.result()
        done.append((config, curve))
        return config.output_dir

    monkeypatch.setattr(made, "outcome", train)
    asked = [(name, {}, seed) for seed in (0, 1) for name in ("c", "b", "a")]
    found = made.all(asked)
    names = [Path(config.output_dir).parent.name for config, _ in done]
    assert names == ["a", "a", "b", "b", "c", "c"] and [curve for _, curve in done] == [True] * 4 + [False] * 2
    assert [Path(folder).parent.name for folder in found] == ["c", "b", "a"] * 2  # in the order asked for
    first, second = done[1][0], done[3][0]
    assert second.model.path == f"{first.output_dir}/model" and second.seed == first.seed == 1
    assert second.warm_start is None


def test_a_run_waits_for_the_one_that_it_starts_from(tmp_path):
    """Nothing of it is begun before, nor at all if that one failed."""
    made = runner(tmp_path, variants={"a": {}, "b": {"start": "a"}})
    origin: Future = Future()
    origin.set_exception(KvrlError("study: a failed"))
    config = made.config("b", {}, 0)
    with pytest.raises(KvrlError, match="study: a failed"):
        made.outcome(config, origin=origin)
    assert not Path(config.output_dir).exists()


def test_a_run_that_fails_ends_the_study(tmp_path, monkeypatch):
    """Its error is told, not that of what was waiting, which is never begun."""
    made, begun = runner(tmp_path, variants={"a": {}, "b": {}, "c": {}}), []

    def train(config, curve, origin):
        begun.append(config.output_dir)
        time.sleep(0.02)  # while the others are lined up
        raise KvrlError("study: a run failed")

    monkeypatch.setattr(made, "outcome", train)
    with pytest.raises(KvrlError, match="study: a run failed"):
        made.all([(name, {}, 0) for name in "abc" for _ in range(20)])
    assert len(begun) < 30


@pytest.mark.parametrize(("fields", "message"), [
    ({"variants": {"a": {"start": "b"}, "b": {}}}, "variants.a.start: b is none of the variants before it"),
    ({"variants": {"a": {}, "b": {"start": "a"}}, "tuning": {"seeds": [7], "grid": {}}}, "variants.b.start: is set"),
    ({"seeds": [0, 1, 0]}, "seeds: 0 is named twice"),
    ({"tuning": {"seeds": [7, 7], "grid": {"train.learning_rate": [1e-4]}}}, "tuning.seeds: 7 is named twice"),
])  # fmt: skip
def test_starts_that_are_refused(tmp_path, fields, message):
    with pytest.raises(KvrlError, match=message):
        runner(tmp_path, **fields).check()


def test_a_decoding_has_no_field_that_evaluation_does_not_take(tmp_path):
    with pytest.raises(ValidationError, match="protect_prompt"):
        runner(tmp_path, decodings={"x": {"policy": "rkv", "params": {"protect_prompt": True}}})


def test_beacons_may_have_several_windows(tmp_path):
    runner(tmp_path, overrides=FIELDS).check()
    with pytest.raises(KvrlError, match="eval.budgets: .'full'. with eval.n 2 is not one compressed budget and full"):
        runner(tmp_path, overrides={**FIELDS, "eval.budgets": ["full"]}).check()


def test_a_start_has_no_beacon_as_runs_differ_in_theirs(tmp_path):
    made = runner(tmp_path, overrides=FIELDS, variants={"a": {}, "b": {"overrides": {"cache.params": {"every": 3}}}})
    made.make_starts([0])
    config = made.config("b", {}, 0)
    model, tokenizer = load_model(config.model.path, "float32")
    assert beacons_of(model) is None and NAME not in tokenizer.get_vocab()
    assert config.model.path == made.config("a", {}, 0).model.path


def commands(made, monkeypatch) -> list[tuple[str, ...]]:
    """The commands that the runner gives, which leave what those of variant `a`, seed 0, would."""
    config = made.config("a", {}, 0)
    folder = Path(config.output_dir)
    calls = []

    def kvrl(log, *arguments):
        calls.append(arguments)
        if arguments[0] == "train":
            (folder / "model").mkdir(exist_ok=True)
            lines = [{"step": s, "budget": b, "accuracy": a} for s in (0, config.train.max_steps)
                     for b, a in (("c=2", 0.5), ("c=4", 0.3), ("full", 0.9))]  # fmt: skip
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            (folder / "summary.json").write_text("{}")
            (folder / "config.json").write_text(config.model_dump_json(indent=2))
        if "--curve" in arguments:
            names = arguments[arguments.index("--baselines") + 1].split(",")
            methods = {name: {} for name in ("beacons", *names, "truncated")}
            return json.dumps({"methods": methods, "protect_prompt": "--protect_prompt" in arguments,
                               "uncompressed": arguments[1]})  # fmt: skip
        return json.dumps({"results": [{"accuracy": len(calls)}]})

    monkeypatch.setattr(made, "kvrl", kvrl)
    return calls


def test_a_curve_is_measured_once_and_again_after_another_training(tmp_path, monkeypatch):
    made = runner(tmp_path, overrides=FIELDS, curve={"baselines": ["tova"], "protect_prompt": True})
    config = made.config("a", {}, 0)
    folder = Path(config.output_dir)
    calls = commands(made, monkeypatch)
    for _ in range(2):
        found = made.outcome(config)
    assert [c[0] for c in calls] == ["train", "eval"] and list(found.curve["methods"]) == [
        "beacons",
        "tova",
        "truncated",
    ]
    assert found.compressed == pytest.approx(0.4) and found.full == 0.9
    assert calls[1][1] == str(folder / "model") and "--protect_prompt" in calls[1]
    assert made.outcome(config, curve=False).curve is None
    (folder / "summary.json").unlink()  # it must be trained anew
    made.outcome(config)
    assert [c[0] for c in calls] == ["train", "eval"] * 2


@pytest.mark.parametrize(("settings", "again"), [
    ({"baselines": ["tova", "recent"]}, 0),
    ({"baselines": ["recent", "tova"]}, 0),  # the same ones
    ({"baselines": ["tova"]}, 1),
    ({"baselines": ["tova", "recent", "rkv"]}, 1),
    ({"baselines": ["tova", "recent"], "protect_prompt": True}, 1),
])  # fmt: skip
def test_a_curve_of_other_settings_is_measured_again(tmp_path, monkeypatch, settings, again):
    for curve, count in (({"baselines": ["tova", "recent"]}, 2), (settings, again)):
        made = runner(tmp_path, overrides=FIELDS, curve=curve)
        calls = commands(made, monkeypatch)
        made.outcome(made.config("a", {}, 0))
        assert len(calls) == count


def test_a_curve_that_does_not_say_its_uncompressed_policy_had_the_one_beside_the_model(tmp_path, monkeypatch):
    """Of the model itself it is kept; `b` went on by shadow_mask from a student, whose teacher is the policy."""
    apart = {"method": "breadcrumbs", "breadcrumbs.student": "separate", **FIELDS}
    made = runner(tmp_path, variants={"a": {"overrides": apart}, "b": {"overrides": FIELDS, "start": "a"}}, curve={})
    settings = made.study.curve
    old = {"methods": {"beacons": {}, "tova": {}, "streaming": {}, "truncated": {}}, "protect_prompt": False}
    folders = [Path(made.config(name, {}, 0).output_dir) for name in "ab"]
    for name, folder in zip("ab", folders, strict=True):
        (folder / "model").mkdir(parents=True)
        (folder / "config.json").write_text(made.config(name, {}, 0).model_dump_json())
    a, b = (str(folder / "model") for folder in folders)
    teacher = str(folders[0] / "teacher")
    assert is_curve_of(old, settings, a) and is_curve_of({**old, "uncompressed": teacher}, settings, a)
    assert not is_curve_of(old, settings, b) and is_curve_of({**old, "uncompressed": teacher}, settings, b)
    assert not is_curve_of({**old, "uncompressed": a}, settings, a)


def test_a_decoding_of_other_settings_is_measured_again(tmp_path, monkeypatch):
    def decoded(count, **decoding) -> float:
        made = runner(tmp_path, decodings={"d": decoding})
        calls = commands(made, monkeypatch)
        found = made.outcome(made.config("a", {}, 0)).decoded["d"]
        assert len(calls) == count
        return found

    first = {"policy": "recent", "params": {"budget": 13, "buffer": 2}}
    assert decoded(2, **first) == 2  # trained, then decoded by the second command
    assert decoded(0, **first) == 2
    for params in ({"budget": 14, "buffer": 2}, {"budget": 13, "buffer": 3}, {"budget": 13, "buffer": 2, "sinks": 1}):
        assert decoded(1, policy="recent", params=params) == 1
    assert decoded(1, policy="tova", params=first["params"]) == 1


def test_a_variant_whose_start_taught_needs_a_folder_of_it_for_a_curve(tmp_path):
    """A start that the study makes is one; under LoRA a run makes its own."""
    taught = {"method": "breadcrumbs", "breadcrumbs": {"rl": False, "teacher": "start"}, **FIELDS}
    lora = {**taught, "lora.r": 2}
    runner(tmp_path, overrides=taught, curve={}).check()
    with pytest.raises(KvrlError, match="variants.a.curve: the start taught .* set curve to false for it"):
        runner(tmp_path, overrides=lora, curve={}).check()
    runner(tmp_path, overrides=lora, variants={"a": {"curve": False}}, curve={}).check()
    runner(tmp_path, overrides=lora).check()


def curve_of(full, kept, area, tova):
    points = [{"decoding": f"c={c}", "retained": r, "held_entries": 40.0 - c} for c, r in kept.items()]
    return {"full": {"accuracy": full, "held_entries": 50.0},
            "methods": {"beacons": {"auac": area, "points": points}, "tova": {"auac": tova, "points": []}}}  # fmt: skip


def test_tables_of_curves():
    """Two seeds: shares kept and areas are means over them; a variant without curves has no row."""
    outcomes = {}
    for seed, shift in ((0, 0.0), (1, 0.2)):
        made = outcome(**{"breadcrumbs/overhead": 0.5 + shift, "seconds": 60.0})
        curve = curve_of(0.8, {16: 0.2 + shift, 2: 0.6 + shift}, 0.3 + shift, 0.1)
        outcomes[seed] = dataclasses.replace(made, curve=curve)
    results = {"joint": {"values": {}, "tried": [], "outcomes": outcomes},
               "dense": {"values": {}, "tried": [], "outcomes": {0: outcome(seconds=60.0)}}}  # fmt: skip
    rows = {name: study_report.summarise(result) for name, result in results.items()}
    kept, areas = curve_tables(rows)
    assert kept.splitlines()[0].split(" | ")[2:4] == ["share kept, c=2", "share kept, c=16"]
    assert len(kept.splitlines()) == 3 and "0.700 ± 1.271" in kept and "0.300 ± 1.271" in kept and "0.600" in kept
    assert "1.000" in kept.splitlines()[2].split("|")[-2]  # minutes
    assert "0.400 ± 1.271" in areas and "0.100 ± 0.000" in areas
    assert curve_tables({"dense": rows["dense"]}) == []


def test_a_table_has_no_empty_columns():
    table = markdown(["a", "b", "c"], [["1", "", "x"], ["2", "", ""]])
    assert table.splitlines() == ["| a | c |", "| --- | --- |", "| 1 | x |", "| 2 |  |"]


def test_interval_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["half_width_95"] == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(interval([0.4])["half_width_95"])
    assert shown(interval([0.4])) == "0.400"


def test_collapse():
    assert study_report.collapsed([0.5] * 10 + [0.2] * 90) and not study_report.collapsed([0.5] * 10 + [0.26] * 90)


def test_table_shows_every_variant_and_what_was_tried():
    results = {
        "tis": {
            "values": {"correction.bounds": [None, 2.0]},
            "tried": [SimpleNamespace(values={"correction.bounds": [None, 2.0]}, score=0.25)] * 2,
            "outcomes": {
                0: outcome(0.25, 0.75, [0.5, 0.1], **{"correction/share_rejected": 0.5}),
                1: outcome(0.35, 0.85),
            },
        }
    }
    rows = {name: study_report.summarise(result) for name, result in results.items()}
    line = study_report.main_table(rows).splitlines()[-1]
    assert "0.300 ± 0.635" in line and "0.800 ± 0.635" in line and ".25 .35" in line  # t(1) = 12.706
    assert "1 of 2" in line and "50.0%" in line and "bounds [null, 2.0]" in line
    (table,) = study_report.tuning_table(rows)
    assert table.splitlines()[2:] == ["| tis | bounds [null, 2.0] | 0.250 |"]


def test_tables_go_between_their_markers_alone(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("before\n<!-- study: tight -->\nold\n<!-- end of study -->\nafter\n")
    study_report.insert(page, "tight", "| new |")
    assert page.read_text() == "before\n<!-- study: tight -->\n\n| new |\n\n<!-- end of study -->\nafter\n"
    with pytest.raises(KvrlError, match="study: gentle"):
        study_report.insert(page, "gentle", "x")


def test_a_page_gets_the_files_that_it_links_to(tmp_path):
    folder, page = tmp_path / "runs" / "tight", tmp_path / "results.md"
    folder.mkdir(parents=True)
    for name in ("table.md", "study.json", "plot.png"):
        (folder / name).write_text(f"new {name}")
    page.write_text("<!-- study: tight -->\n<!-- end of study -->\n[numbers](tight.json)\n")
    study_report.publish(page, folder)
    assert "new table.md" in page.read_text() and (tmp_path / "tight.json").read_text() == "new study.json"
    assert not (tmp_path / "tight.png").exists()
    page.write_text(page.read_text() + "![plot](tight.png)\n")
    study_report.publish(page, folder)
    assert (tmp_path / "tight.png").read_text() == "new plot.png"
