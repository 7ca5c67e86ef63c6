"""What a run shows: width, no table twice, the model's folder at the end; and the page that explains its metrics."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from rich.console import Console

from kvrl.eval.report import WIDTH, widened
from kvrl.train.runlog import RunLog
from kvrl.train.trainer import train
from runs import make_config, metrics_of, noisy_rewards

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_without_a_terminal_lines_are_wide_unless_the_user_says(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert widened(Console(file=io.StringIO())).width == WIDTH == 120
    terminal = Console(file=io.StringIO(), force_terminal=True)
    before = terminal.width
    assert widened(terminal).width == before
    monkeypatch.setenv("COLUMNS", "90")
    assert widened(Console(file=io.StringIO())).width == 90


def test_a_step_shows_what_went_wrong_and_nothing_where_nothing_did(tmp_path):
    shown = io.StringIO()
    with RunLog(tmp_path, 2, Console(file=shown)) as log:
        log.step(1, {"reward": 0.5, "reward_errors": 0.0, "samples_dropped": 0.0, "updates_skipped": 0.0})
        log.step(2, {"reward": 0.5, "reward_errors": 3.0, "samples_dropped": 4.0, "updates_skipped": 1.0})
    first, second = shown.getvalue().splitlines()
    assert first == "step    1  reward 0.500  kl off"
    assert second == "step    2  reward 0.500  kl off  reward errors 3  dropped 4  updates skipped so far 1"


def test_a_run_shows_each_table_once_and_its_metrics_are_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    noisy_rewards(monkeypatch)
    train(make_config(tmp_path / "out", eval={"n": 4, "every": 1}))
    shown = capsys.readouterr().out
    assert [title for title in re.findall(r"held out, steps? [\d and]*\d", shown)] == [
        "held out, step 0", "held out, step 1", "held out, steps 0 and 2",
    ]  # fmt: skip
    assert shown.splitlines()[-1] == f"model: {tmp_path / 'out' / 'model'}"
    assert max(len(line) for line in shown.splitlines() if set(line) & set("┏┃┡│└")) <= WIDTH
    last = [r for r in metrics_of(tmp_path / "out") if r["step"] == 2 and r.get("budget") == "12"]
    assert len(last) == 1 and f"{last[0]['accuracy']:.3f}" in shown
    explained = set(re.findall(r"`([^`]+)`", METRICS.read_text()))
    keys = {k for r in metrics_of(tmp_path / "out") for k in r} - {"rewards/task/mean"}
    assert keys - explained == set()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["steps"] == 2
