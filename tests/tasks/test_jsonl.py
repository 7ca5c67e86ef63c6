"""Rows of a file: what is refused, with file and row named, and what a finished completion scores."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_tokenizer
from kvrl.tasks import completion_text, encode_prompt, get_task

GOOD = {"prompt": "1 + 2", "answer": "3"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def refusal(tmp_path, text: str) -> str:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(KvrlError) as caught:
        get_task("jsonl", path=str(tmp_path / "rows.jsonl")).rows("train", 1, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("text", "message"), [
    ("", "rows.jsonl is empty"),
    (json.dumps(GOOD) + '\n{"prompt": \n', "line 2 is '{\"prompt\": ', which is no JSON object"),
    (json.dumps(GOOD) + "\n7\n", "line 2 is '7', which is no JSON object"),
    (json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "prompt": None}), "row 2: prompt is None; give text"),
    (json.dumps({**GOOD, "prompt": 3}), "row 1: prompt is 3; give text"),
    (json.dumps({**GOOD, "prompt": ""}), "row 1: prompt is ''; give text"),
    (json.dumps({**GOOD, "prompt": []}), "row 1: prompt is []; give text"),
    (json.dumps({**GOOD, "prompt": [{"role": "user"}]}), "messages with role and content"),
    (json.dumps({**GOOD, "answer": None}), "row 1: answer is null"),
    (json.dumps({"prompt": "a"}), "has no column answer"),
    (json.dumps({**GOOD, "completions": "x"}), "has a column completions"),
])  # fmt: skip
def test_a_wrong_file_names_its_row(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


def test_text_and_chat_rows_are_taken(tmp_path):
    text, chat = GOOD, {"prompt": [{"role": "user", "content": "1 + 2"}], "answer": "3", "hint": "add"}
    for row in (text, chat):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        task = get_task("jsonl", path=str(tmp_path / "rows.jsonl"), eval_path=str(tmp_path / "rows.jsonl"))
        assert task.rows("eval", 1, 0) == [row]


def test_rows_without_answers_are_for_other_rewards(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": p, "topic": p}) for p in "ab"))
    task = get_task("jsonl", path=str(tmp_path / "rows.jsonl"), answers=False)
    (row,) = task.rows("train", 1, 0)
    assert row in ({"prompt": "a", "topic": "a"}, {"prompt": "b", "topic": "b"})


def test_a_finished_completion_matches_its_answer_and_a_cut_one_keeps_its_tokens(tmp_path):
    tokenizer = build_tiny_tokenizer(["3", "7"])
    ids = tokenizer("3 7 <eos>")["input_ids"]
    ended = SimpleNamespace(completion_ids=ids, finish_reason="eos")
    cut = SimpleNamespace(completion_ids=ids, finish_reason="length")
    assert completion_text(tokenizer, ended) == "3 7" and completion_text(tokenizer, cut) == "3 7 <eos>"
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(GOOD)] * 2))
    task = get_task("jsonl", path=str(tmp_path / "rows.jsonl"))
    assert task.reward([completion_text(tokenizer, ended)], answer=["3 7"]) == [1.0]


def test_chat_without_a_template_is_refused():
    with pytest.raises(KvrlError, match="prompt: a list of 1 chat messages.*no chat template"):
        encode_prompt(build_tiny_tokenizer(["3"]), [{"role": "user", "content": "3"}])
