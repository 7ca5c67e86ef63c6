"""What all tasks of files share: where rows come from, columns, splits without overlap, prompts by a template."""

from __future__ import annotations

import json

import datasets
import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import get_task


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count):
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


@pytest.fixture
def hub(monkeypatch):
    """A hub whose data sets have one row each, which says what was asked for."""
    asked = []

    def load(path, name=None, split=None, **_):
        asked.append((path, name, split))
        row = {"prompt": f"{path} {name} {split}", "question": f"{path} {split}", "problem": f"{path} {split}"}
        return datasets.Dataset.from_list([{**row, "answer": "#### 1"}])

    monkeypatch.setattr("datasets.load_dataset", load)
    return asked


def test_the_three_kinds_of_files_give_the_same_rows(tmp_path):
    rows = numbered(4)
    (tmp_path / "b=1").mkdir()  # no column, and the brackets no pattern
    paths = [write(tmp_path / "a.jsonl", rows), str(tmp_path / "a.json"), str(tmp_path / "b=1" / "a[1].parquet")]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).to_parquet(paths[2])
    first, *others = [get_task("jsonl", path=path).rows("train", 3, 0) for path in paths]
    assert others == [first, first] and all(row in rows for row in first)


def test_a_held_out_prompt_is_in_no_other_split_however_often_it_stands_in_the_file(tmp_path):
    rows = numbered(20) * 3
    task = get_task("jsonl", path=write(tmp_path / "a.jsonl", rows), eval_share=0.2)
    held_out, kept = [{row["prompt"] for row in part} for part in (task.eval_rows, task.train_rows)]
    assert len(held_out) == 4 and held_out | kept == {f"p{i}" for i in range(20)} and not held_out & kept
    assert len(task.eval_rows) == 12
    turned = get_task("jsonl", path=write(tmp_path / "b.jsonl", rows[::-1]), eval_share=0.2)
    assert {row["prompt"] for row in turned.eval_rows} == held_out
    ends = [{f"p{i}" for i in numbers} for numbers in ([16, 17, 18, 19], [0, 1, 2, 3], [0, 1, 10, 11])]
    assert held_out not in ends  # neither end of a file that may be sorted, nor of the alphabet


def test_a_train_row_that_an_eval_file_holds_is_left_out(tmp_path):
    train, held_out = write(tmp_path / "a.jsonl", numbered(5)), write(tmp_path / "b.jsonl", numbered(2))
    task = get_task("jsonl", path=train, eval_path=held_out)
    assert [row["prompt"] for row in task.train_rows] == ["p2", "p3", "p4"]
    assert [row["prompt"] for row in task.eval_rows] == ["p0", "p1"]
    with pytest.raises(KvrlError, match="task.params.path: every prompt of .*a.jsonl is held out"):
        get_task("jsonl", path=train, eval_path=train).rows("train", 1, 0)


def test_rows_are_drawn_by_the_seed(tmp_path):
    task = get_task("jsonl", path=write(tmp_path / "a.jsonl", numbered(12)), eval_share=0.4)
    drawn = [[row["prompt"] for row in task.rows("train", 14, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0][:7]) == sorted(drawn[0][7:]) != drawn[0][:7]  # round again, in a new order
    assert drawn[0][:7] != drawn[0][7:]
    with pytest.raises(KvrlError, match="eval.n: 6 is above the 5 held-out rows"):
        task.rows("eval", 6, 0)
    with pytest.raises(KvrlError, match="split: test is neither train nor eval"):
        task.rows("test", 1, 0)


def test_one_prompt_at_least_is_held_out(tmp_path):
    task = get_task("jsonl", path=write(tmp_path / "a.jsonl", numbered(3)))
    assert (len(task.eval_rows), len(task.train_rows)) == (1, 2)


def test_too_few_prompts_for_two_splits(tmp_path):
    path = write(tmp_path / "a.jsonl", numbered(1) * 5)
    with pytest.raises(KvrlError, match="a.jsonl has 1 different prompts, too few for two splits"):
        get_task("jsonl", path=path).rows("train", 1, 0)


def test_columns_of_other_names_and_of_nested_records(tmp_path):
    rows = [{"input": {"text": f"p{i}", "by": "x"}, "answer": "no", "gold": str(i)} for i in range(3)]
    path = write(tmp_path / "a.jsonl", rows)
    task = get_task("jsonl", path=path, eval_path=path, columns={"prompt": "input.text", "answer": "gold"})
    row = next(row for row in task.eval_rows if row["gold"] == "1")
    assert (row["prompt"], row["answer"]) == ("p1", "1")
    missing = {"prompt": "input.name", "answer": "gold"}
    with pytest.raises(KvrlError, match="row 1: prompt is None"):
        get_task("jsonl", path=path, columns=missing).rows("train", 1, 0)


@pytest.mark.parametrize(("columns", "message"), [
    ({}, r"a.jsonl has no column question \(it has input, target\); say which one it is in task.params.columns, "
         r"as {question: NAME}"),
    ({"question": "Input"}, r"has no column Input \(it has input, target\); name another in task.params.columns"),
    ({"question": "input"}, r"has no column answer .*as {answer: NAME}"),
    ({"questions": "input"}, "task.params.columns.questions: task gsm8k has no such column; it has question, answer"),
])  # fmt: skip
def test_a_missing_column_lists_those_that_exist(tmp_path, columns, message):
    path = write(tmp_path / "a.jsonl", [{"input": "a", "target": "#### 1"}])
    with pytest.raises(KvrlError, match=message) as caught:
        get_task("gsm8k", path=path, columns=columns).rows("train", 1, 0)
    assert "\n" not in str(caught.value)


def test_what_is_asked_of_the_hub(hub):
    task = get_task("gsm8k")
    assert task.eval_rows and hub == [("openai/gsm8k", "main", "test")]  # an evaluation does not load the train rows
    assert task.train_rows and hub[1:] == [("openai/gsm8k", "main", "train")]
    hub.clear()
    assert get_task("jsonl", path="org/data", subset="s", split="a", eval_split="b").train_rows
    assert hub == [("org/data", "s", "b"), ("org/data", "s", "a")]
    hub.clear()
    assert get_task("math", path="org/data", eval_path="org/other").train_rows
    assert hub == [("org/other", None, "test"), ("org/data", None, "train")]


@pytest.mark.parametrize(("params", "message"), [
    ({"path": "a.jsonl", "subset": "main"}, "task.params.subset: main is a part of a hub data set, and .*a.jsonl is a"),
    ({"path": "a.jsonl", "split": "train"}, "task.params.split: train is a part of a hub data set"),
    ({"path": "a.jsonl", "eval_split": "test"}, "task.params.eval_split: test is a part .* give eval_path"),
    ({"path": "none.jsonl"}, "task.params.path: none.jsonl cannot be loaded"),
    ({"path": "none.parquet"}, "task.params.path: none.parquet cannot be loaded"),
    ({"path": __file__}, "test_files.py is a file of another kind; give a .jsonl, .json or .parquet file"),
    ({"path": ""}, "task.params.path: is empty; give a .jsonl, .json or .parquet file or a hub name"),
    ({"eval_path": ""}, "task.params.eval_path: is empty; give"),
    ({"path": __file__ + "/a.jsonl"}, r"a.jsonl cannot be loaded \(Not a directory\); give"),
    ({"template": "{q}"}, "task.params.template: has no {question}"),
    ({"system": "s", "chat": False}, "task.params.system: plain text has no system message"),
])  # fmt: skip
def test_refused_parameters(params, message):
    with pytest.raises(KvrlError, match=message):
        get_task("gsm8k", **params).rows("train", 1, 0)


def test_what_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("question,answer")
    with pytest.raises(
        KvrlError, match="a.parquet cannot be loaded .*; give a .jsonl, .json or .parquet file"
    ) as caught:
        get_task("gsm8k", path=str(tmp_path / "a.parquet")).rows("train", 1, 0)
    assert "\n" not in str(caught.value)


def test_a_broken_file_is_told_by_one_message_alone(tmp_path, capfd):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\nno json\n')
    with pytest.raises(KvrlError, match="a.jsonl, line 2 is 'no json', which is no JSON object"):
        get_task("gsm8k", path=str(tmp_path / "a.jsonl")).rows("train", 1, 0)
    assert capfd.readouterr() == ("", "")  # no bar and no line of the library's


def test_the_template_is_filled_once_and_may_be_plain_text(tmp_path):
    row = {"question": "Is {question} \\boxed{}?", "answer": "#### 1"}
    path = write(tmp_path / "a.jsonl", [row])
    chat = get_task("gsm8k", eval_path=path, template="{question} {x} \\boxed{}", system="s").eval_rows[0]["prompt"]
    filled = "Is {question} \\boxed{}? {x} \\boxed{}"
    assert chat == [{"role": "system", "content": "s"}, {"role": "user", "content": filled}]
    plain = get_task("gsm8k", eval_path=path, template="Q: {question}\nA:", chat=False).eval_rows[0]["prompt"]
    assert plain == "Q: Is {question} \\boxed{}?\nA:"
