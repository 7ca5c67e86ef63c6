"""`kvrl eval` of a run's model: it decodes as the run did, and says where nothing was evicted."""

from __future__ import annotations

import json
import re

import pytest

import kvrl
from kvrl.cli import build_parser, main
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import Evaluation, evaluation_table, idle_budgets
from kvrl.eval.run_defaults import settings_of, uncompressed_of, without_task
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer, make_tiny
from kvrl.tasks import get_task
from kvrl.train.checkpoint import save_model
from runs import make_beacon_config, make_config


@pytest.fixture
def run(tmp_path):
    """A run's folder: 12 + 6 entries, completions of 30 tokens, problems of 3 or 4 steps."""
    make_tiny(tmp_path / "run" / "model", get_task("recurrence").vocab, 0)
    config = make_config(tmp_path / "run", cache={"params": {"mix": 0.25}}, sampling={"temperature": 0.5})
    (tmp_path / "run" / "config.json").write_text(config.model_dump_json())
    return tmp_path / "run"


def settings(*argv: str):
    args = build_parser().parse_args(["eval", *argv])
    return args, *settings_of(args)


def test_the_runs_settings_are_the_defaults(run):
    args, cache, sampling, taken = settings(str(run / "model"), "--budgets", "13,full")
    assert (args.policy, args.task, args.task_params) == ("rkv", "recurrence", {"min_steps": 3, "max_steps": 4})
    assert (cache.budget, cache.buffer, cache.window, cache.sinks, cache.params) == (13, 6, 4, 2, {"mix": 0.25})
    assert (sampling.max_completion_length, sampling.temperature, sampling.num_generations) == (30, 0.5, 1)
    for part in ("buffer 6", "window 4", "sinks 2", 'params {"mix": 0.25}', "max_completion_length 30", "task recurre"):
        assert part in taken


def test_flags_win_over_the_run(run):
    flags = ["--task", "jsonl", "--policy", "recent", "--buffer", "9", "--sinks", "0", "--temperature", "1"]
    args, cache, sampling, taken = settings(str(run / "model"), *flags, "--max_completion_length", "7")
    assert (args.policy, args.task, args.task_params) == ("recent", "jsonl", {})  # nothing of another task
    assert (cache.policy, cache.buffer, cache.window, cache.sinks, cache.params) == ("recent", 9, 4, 0, {})
    assert (sampling.max_completion_length, sampling.temperature) == (7, 1.0)
    assert taken == f"from the run of {run / 'model'}: window 4"


def test_without_a_run_nothing_is_taken(run, tmp_path):
    make_tiny(tmp_path / "alone" / "model", get_task("recurrence").vocab, 0)
    (tmp_path / "alone" / "config.json").write_text('{"model_type": "llama"}')
    for model in (str(tmp_path / "alone" / "model"), "nowhere", "smollm2-135m"):
        args, cache, sampling, taken = settings(model)
        assert (args.task, args.policy, cache.buffer, sampling.max_completion_length) == (None, "rkv", 128, 256)
        assert taken is None


def test_eval_of_a_run_evicts_and_shows_it(run, capsys):
    assert main(["eval", str(run / "model"), "--n", "2", "--budgets", "12,full", "--json"]) == 0
    out, err = capsys.readouterr()
    small, full = json.loads(out)["results"]
    assert (small["buffer"], full["buffer"], full["evictions"]) == (6, None, 0) and small["evictions"] > 0
    assert err.startswith("from the run of") and err.count("\n") == 1


def test_a_budget_that_never_evicts_is_warned_of(run, capsys):
    flags = ["--n", "2", "--budgets", "12,full", "--buffer", "128", "--json"]
    assert main(["eval", str(run / "model"), *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["results"][0]["evictions"] == 0
    assert "nothing was evicted under budget + buffer 12 + 128" in err.splitlines()[1] and err.count("\n") == 2


def result(budget: str, buffer: int | None, evictions: float, longest: int) -> Evaluation:
    return Evaluation(budget, 0.5, 1, 0.5, 1.0, 0.0, buffer=buffer, evictions=evictions, longest=longest)


def test_the_warnings_remedy_by_hand():
    # the last of 111 tokens is never cached: 110 entries at most, so 24 + 86 is the first capacity that fills
    assert "lower --buffer to at most 86" in idle_budgets([result("24", 128, 0.0, 111), result("full", None, 0.0, 111)])
    assert "lower --budgets below 110" in idle_budgets([result("200", 8, 0.0, 111)])
    assert idle_budgets([result("24", 8, 1.5, 111), result("full", None, 0.0, 111)]) is None


def test_the_table_shows_buffer_and_evictions():
    table = evaluation_table([result("24", 8, 1.5, 9), result("full", None, 0.0, 9)], "")
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["budget + buffer"] == ["24 + 8", "full"] and cells["evictions"] == ["1.5", "0.0"]
    assert evaluation_table([result("c=2", None, 1.5, 9)], "").columns[0].header == "decoding"


def folder_of(root, **changes) -> str:
    """The model's folder of a run with beacons, without weights."""
    (root / "model").mkdir(parents=True)
    (root / "config.json").write_text(make_beacon_config(root, **changes).model_dump_json())
    return str(root / "model")


SEPARATE = {"method": "breadcrumbs", "breadcrumbs": {"student": "separate", "rl": False, "teacher": "start"}}
BY_START = {"method": "breadcrumbs", "breadcrumbs": {"rl": False, "teacher": "start"}}


def test_the_uncompressed_policy_of_every_recipe(tmp_path):
    """What kept its skill without beacons while `model` learnt to read them."""
    student = folder_of(tmp_path / "student", **SEPARATE)
    teacher = str(tmp_path / "student" / "teacher")
    assert uncompressed_of(student) == teacher and uncompressed_of(teacher) == teacher
    start = {"path": student}
    went_on = folder_of(tmp_path / "went_on", model=start, warm_start=None)  # by shadow_mask, with beacons alone
    again = folder_of(tmp_path / "again", model={"path": went_on}, warm_start=None, lora={"r": 2})
    assert uncompressed_of(went_on) == uncompressed_of(again) == teacher
    for name, changes in {
        "scratch": {},
        "joint": {"method": "breadcrumbs"},
        "live": {"method": "breadcrumbs", "breadcrumbs": {"rl": False}, "model": start},
        "rewards": {"method": "breadcrumbs", "breadcrumbs": {"teacher": "start"}, "model": start},
        "dense": {"method": "dense", "model": start},
    }.items():
        model = folder_of(tmp_path / name, warm_start=None, **changes)
        assert uncompressed_of(model) == model
    for lora in (None, {"r": 2}):
        model = folder_of(
            tmp_path / f"start{lora}", **BY_START, model={"path": "somewhere"}, warm_start=None, lora=lora
        )
        assert uncompressed_of(model) == "somewhere"
    assert uncompressed_of("nowhere") == "nowhere"


def test_a_start_that_is_not_there_any_more(tmp_path, monkeypatch):
    """Its teacher would be the uncompressed policy: the model itself, which learnt beacons, must not stand for it."""
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "runs" / "student", **SEPARATE)
    went_on = folder_of(tmp_path / "went_on", model={"path": "runs/student/model"}, warm_start=None)
    assert uncompressed_of(went_on) == str(tmp_path / "runs" / "student" / "teacher")
    gone = "--teacher: the run of .* started from {}, which is not there .*; name the uncompressed policy"
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(KvrlError, match=gone.format("runs/student/model")):
        uncompressed_of(went_on)
    beside = folder_of(tmp_path / "beside", model={"path": "student_was/model"}, warm_start=None)
    with pytest.raises(KvrlError, match=gone.format("student_was/model")):
        uncompressed_of(beside)
    own = folder_of(tmp_path / "renamed", model={"path": str(tmp_path / "renamed" / "model")}, warm_start=None)
    with pytest.raises(KvrlError, match=gone.format(own)):
        uncompressed_of(own)
    known = folder_of(tmp_path / "known", model={"path": "org/name"}, warm_start=None)  # of the hub
    assert uncompressed_of(known) == known


@pytest.mark.parametrize(("field", "value", "named"), [
    ("cache", {}, "cache/policy"), ("cache", None, "cache"),
    ("cache", {"policy": "beacon", "params": [2]}, "cache/params"),
    ("sampling", [], "sampling"), ("task", "recurrence", "task"), ("model", None, "model"), ("method", 3, "method"),
    ("breadcrumbs", {"student": "same"}, "breadcrumbs/teacher"),
])  # fmt: skip
def test_a_runs_configuration_that_was_changed(tmp_path, capsys, field, value, named):
    model = folder_of(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert main(["eval", model]) == 2
    error = capsys.readouterr().err
    assert f"{file}: {named} cannot be read" in error and error.count("\n") == 1


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": {"path": "tiny"}, "warm_start": None}, "--teacher: .*model.path tiny.*, in no folder; name a folder"),
    ({"model": {"path": "somewhere"}}, "--teacher: .*model.path somewhere, warm_start.*, in no folder; name a folder"),
])  # fmt: skip
def test_a_start_that_taught_and_is_in_no_folder(tmp_path, capsys, changes, message):
    model = folder_of(tmp_path / "run", **BY_START, **changes)
    with pytest.raises(KvrlError, match=message):
        uncompressed_of(model)
    assert main(["eval", model, "--curve"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("flags", "names"), [
    (["--every", "2", "--budgets", "full"], ["c=2", "full"]),
    (["--policy", "recent", "--budgets", "12,full", "--buffer", "2"], ["12", "full"]),
    (["--policy", "dense"], ["full"]),
])  # fmt: skip
def test_without_beacons_a_separate_students_teacher_decodes(tmp_path, capsys, flags, names):
    folder = tmp_path / "run"
    model = folder_of(folder, **SEPARATE)
    for name, seed in (("model", 0), ("teacher", 1)):
        tokenizer = build_tiny_tokenizer(get_task("recurrence").vocab)
        lm = build_tiny_model(tokenizer, seed)
        kvrl.add_beacon(lm, tokenizer, every=[2, 3])
        save_model(folder / name, lm, tokenizer)

    def decoded(name):
        assert main(["eval", str(folder / name), "--n", "4", *flags, "--json"]) == 0
        out, err = capsys.readouterr()
        return [(r["budget"], r["held_entries"]) for r in json.loads(out)["results"]], err

    (theirs, silent), (ours, said) = decoded("teacher"), decoded("model")
    assert [budget for budget, _ in ours] == names and "its teacher decodes" not in silent
    assert [row in theirs for row in ours] == [name != "c=2" for name in names]
    assert f"{model} is a separate student: without beacons its teacher decodes, {folder / 'teacher'}" in said
    never = "warning: .*/teacher is the teacher of a separate student and never learned to read beacons"
    assert bool(re.search(never, silent)) == ("c=2" in names) and not re.search(never, said)


def test_a_model_without_a_task_is_told_what_it_may_be(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    assert "is the folder of a run; give its model, " in str(without_task(str(tmp_path / "run"), "--task"))
    assert "is no folder" in str(without_task(str(tmp_path / "rum" / "model"), "--task"))
    assert "--task: is missing, and gpt2 is not the model of a run" in str(without_task("gpt2", "--task"))
    assert "--task: is missing" in str(without_task(str(tmp_path / "run" / "model"), "--task"))


def test_a_students_beacons_alone_need_no_teacher(tmp_path, capsys):
    model = folder_of(tmp_path / "run", **SEPARATE)
    tokenizer = build_tiny_tokenizer(get_task("recurrence").vocab)
    lm = build_tiny_model(tokenizer, 0)
    kvrl.add_beacon(lm, tokenizer, every=[2, 3])
    save_model(tmp_path / "run" / "model", lm, tokenizer)
    assert main(["eval", model, "--n", "2", "--json"]) == 0
    assert "teacher" not in capsys.readouterr().err
    assert main(["eval", model, "--n", "2", "--budgets", "full"]) == 2
    assert "the run's teacher: " in capsys.readouterr().err.splitlines()[-1]
