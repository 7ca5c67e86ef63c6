"""The reference of the configuration says what the models say."""

from __future__ import annotations

from pathlib import Path

from kvrl.train.config import Config
from kvrl.train.config_file import _paths
from kvrl.train.fields import Entry, entries, page

ROOT = Path(__file__).parents[2]


def test_the_written_page_is_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text() == page(), "python -m kvrl.train.fields > docs/config.md"


def test_every_field_stands_there_once_and_says_what_it_is():
    found = {e.path.replace("[]", ""): e for e in entries(Config)}
    assert len(found) == sum(1 for _ in entries(Config))
    sections = {path.rpartition(".")[0] for path in found}
    assert set(found) == set(_paths(Config)) - (sections - {"reward.funcs"})
    assert [path for path, entry in found.items() if not entry.meaning] == []


def test_entries_by_hand():
    found = {e.path: e for e in entries(Config)}
    assert found["warm_start.steps"] == Entry(
        "warm_start.steps", "int, at least 1", "`200`",
        "Optimiser steps of supervised training before reinforcement learning; for none leave the section out (null).",
    )  # fmt: skip
    assert found["eval.budgets"].type == "list of int at least 1 or `full` or `null`, length at least 1"
    assert found["parity.mean_tolerance"].type == "float above 0 or `null`"
    assert found["correction.bounds"].default == "`[null, 2.0]`"
    assert found["reward.funcs"].default == '`[{"func": "task"}]`' and found["reward.funcs[].func"].default == "needed"
    assert found["cache.params"].default == "`{}`"
