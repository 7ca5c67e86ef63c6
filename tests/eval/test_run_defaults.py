"""`kvrl eval` of a run's model: it decodes as the run did, and says where nothing was evicted."""

from __future__ import annotations

import json

import pytest

from kvrl.cli import build_parser, main
from kvrl.eval.evaluate import Evaluation, evaluation_table, idle_budgets
from kvrl.eval.run_defaults import settings_of
from kvrl.models.tiny import make_tiny
from kvrl.tasks import get_task
from runs import make_config


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
    for part in ("buffer 6", "window 4", "sinks 2", "params {'mix': 0.25}", "max_completion_length 30", "task recurre"):
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
