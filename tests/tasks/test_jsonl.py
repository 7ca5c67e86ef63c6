"""Rows of a file: what is refused, with file and row named, and what a finished completion scores."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_tokenizer
from kvrl.tasks import completion_text, encode_prompt, get_task

GOOD = {"prompt": "1 + 2", "answer": "3"}


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
    ('{"prompt": "a\u2028b", "answer": "1"}\n\n{bad}\n', "rows.jsonl, line 3 is '{bad}', which is no JSON object"),
    ("[" * 100_000, "rows.jsonl is no list in JSON (maximum recursion depth"),
    ("[{}, 7]", "rows.jsonl, row 2 is 7, which is no JSON object"),
    ("\n \n\n", "rows.jsonl has no rows; add some"),
    ("{}\n", "rows.jsonl has no column prompt (it has none)"),
    ('{"prompt": "\\ud800", "answer": "1"}', "rows.jsonl, row 1 has half of a surrogate pair"),
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


def test_a_file_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "é", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(KvrlError, match=r"rows.jsonl is not UTF-8 text \(byte 13\); save it as UTF-8$"):
        get_task("jsonl", path=str(tmp_path / "rows.jsonl")).rows("train", 1, 0)


def test_every_value_is_as_the_file_has_it_whatever_the_other_rows_have(tmp_path):
    answers = ["2020-01-01", 1, 2.5, 2**70, "1.0", True, [1, "a"], {"a": None}, "\N{GRINNING FACE}"]
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    rows[3] |= {"hint": {"of": "x"}}
    for name, text in (
        ("a[1].jsonl", "\n".join(map(json.dumps, rows))),
        ("a.json", json.dumps(rows, indent=1)),
        ("A.JSON", "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        read = get_task("jsonl", path="x.json", eval_path=str(tmp_path / name)).eval_rows
        assert read == [{"hint": None, **row} for row in rows]
        assert [type(row["answer"]) for row in read] == list(map(type, answers))


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


def test_a_template_that_refuses_a_role_is_told_in_its_own_words():
    tokenizer = build_tiny_tokenizer(["3"])
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('No system\nrole!') }}"
        "{% endif %}{{ message.content }}{% endfor %}"
    )
    system, user = ({"role": role, "content": "3"} for role in ("system", "user"))
    assert encode_prompt(tokenizer, [user]) == tokenizer("3")["input_ids"]
    with pytest.raises(
        KvrlError, match=r"^prompt: chat messages \(system, user\) are refused .* \(No system role!\); "
    ):
        encode_prompt(tokenizer, [system, user])
