"""The papers' tasks: what their rows are made of, how completions are scored, and worked solutions."""

from __future__ import annotations

import json
import re

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import TASKS, get_task

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture
def make(tmp_path):
    """A task whose eval rows, and train rows if there are several, come from these records."""

    def task(name, *records, **params):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        if len(records) > 1:
            return get_task(name, path=str(file), **params)
        return get_task(name, path=str(file), eval_path=str(file), **params)

    return task


def user(text):
    return [{"role": "user", "content": text}]


GSM8K = [
    {"question": " How many? ", "answer": "He has 48/2 = <<48/2=24>>24.\nNow <<24*50=1200>>1,200.\n#### 1,200"},
    {"question": "How much?", "answer": "<<1+1=2>>2.\n#### 2"},
]


def test_gsm8k_rows(make):
    (row,) = make("gsm8k", GSM8K[0]).eval_rows
    solution = "He has 48/2 = 24.\nNow 1,200."
    assert row == {"prompt": user("How many?" + INSTRUCTION), "answer": "1200", "solution": solution}
    with pytest.raises(KvrlError, match="rows.jsonl, row 1: answer has no `#### value` at its end"):
        make("gsm8k", {"question": "a", "answer": "3"}).rows("eval", 1, 0)
    with pytest.raises(KvrlError, match="rows.jsonl, row 1: question is ' '; give text"):
        make("gsm8k", {"question": " ", "answer": "#### 3"}).rows("eval", 1, 0)


def test_gsm8k_demonstrations_are_right_and_of_the_train_rows(make):
    task = make("gsm8k", *GSM8K, eval_share=0.5)
    (row,) = task.train_rows
    demonstrations = task.demonstrations(3, seed=0)
    assert {prompt[0]["content"] for prompt, _ in demonstrations} == {row["prompt"][0]["content"]}
    completions = [completion for _, completion in demonstrations]
    assert completions == [f"{row['solution']}\n\\boxed{{{row['answer']}}}"] * 3 and "<<" not in completions[0]
    assert task.reward(completions, answer=[row["answer"]] * 3, solution=[None] * 3) == [1.0] * 3
    assert task.reward(["\\boxed{3}", "", "4 and 5"], answer=["4"] * 3) == [0.0] * 3


MATH = [
    {"problem": "1?", "answer": None, "solution": "so \\boxed{1}", "level": "Level 1"},
    {"problem": "3?", "answer": "$3$", "solution": "it is 3", "level": "Level 3"},
    {"problem": "5?", "answer": "5", "solution": "so $\\boxed{\\frac{10}{2}}$.", "level": "Level 5"},
    {"problem": "9?", "answer": "9", "solution": None, "level": "Level ?"},
]


def test_math_rows_by_level(make):
    everything = make("math", *MATH)
    found = {row["prompt"][0]["content"].removesuffix(INSTRUCTION): row["answer"]
             for row in everything.train_rows + everything.eval_rows}  # fmt: skip
    assert found == {"1?": "1", "3?": "3", "5?": "5", "9?": "9"}
    hard = make("math", *MATH, levels=[3, 4, 5])
    assert sorted(row["answer"] for row in hard.train_rows + hard.eval_rows) == ["3", "5"]
    numbers = [{**row, "level": i} for i, row in enumerate(MATH, start=2)]
    two = make("math", *numbers, levels=[3, 4])
    assert sorted(row["answer"] for row in two.train_rows + two.eval_rows) == ["3", "5"]
    with pytest.raises(KvrlError, match="none of the 4 rows of .* is kept"):
        make("math", *MATH, levels=[2]).rows("train", 1, 0)


def test_math_needs_an_answer(make):
    with pytest.raises(KvrlError, match="row 1: no answer, and no .boxed{} in a solution; .*on_missing_answer to drop"):
        make("math", {"problem": "a", "answer": "", "solution": "b"}).rows("eval", 1, 0)
    with pytest.raises(KvrlError, match="row 1: there is neither a column answer nor solution"):
        make("math", {"problem": "a"}).rows("eval", 1, 0)
    with pytest.raises(KvrlError, match="has no column level"):
        make("math", {"problem": "a", "answer": "1"}, levels=[1]).rows("eval", 1, 0)
    rows = [{"problem": str(i), "answer": "" if i == 1 else "2"} for i in range(3)]
    assert len((task := make("math", *rows, on_missing_answer="drop")).train_rows) + len(task.eval_rows) == 2


def test_math_answers_of_other_kinds(make):
    def answers(kind):
        return make("math", {"problem": "a", "final": kind}, columns={"answer": "final"}).eval_rows[0]["answer"]

    assert answers(27.0) == "27" and answers(["$1$", "$2$"]) == "1, 2" and answers("$69$,$84$") == "69,84"
    with pytest.raises(KvrlError, match="rows.jsonl, row 1: answer is nan; give text, a finite number"):
        answers(float("nan"))


def test_math_demonstrations_have_their_answer_in_a_box(make):
    rows = [{**row, "problem": f"{row['problem']} {i}"} for row in MATH for i in range(5)]
    shown = make("math", *rows).demonstrations(60, seed=0)
    assert {text for _, text in shown} == {"so \\boxed{1}", "so $\\boxed{\\frac{10}{2}}$."}
    with pytest.raises(KvrlError, match="no solution in the data has a .boxed{} answer"):
        make("math", *[{"problem": str(i), "answer": "1"} for i in range(3)]).demonstrations(1, 0)


def test_word_problems(make):
    (row,) = make("mawps", {"input": "How many?", "target": 43.0}).eval_rows
    assert row == {"prompt": user("How many?" + INSTRUCTION), "answer": "43"}
    svamp = {"Body": "87 oranges in 93 groups", "Question": "How big?", "Answer": 145.0}
    (row,) = make("svamp", svamp).eval_rows
    assert row == {"prompt": user("87 oranges in 93 groups. How big?" + INSTRUCTION), "answer": "145"}
    (row,) = make("svamp", {**svamp, "Body": "There are 87."}).eval_rows
    assert row["prompt"][0]["content"].startswith("There are 87. How big?\n")
    with pytest.raises(KvrlError, match="row 1: target is None; give the number that is right"):
        make("mawps", {"input": "a", "target": None}).rows("eval", 1, 0)
    with pytest.raises(KvrlError, match="rows.jsonl, row 1: target is {'v': 1}; give text, a finite number"):
        make("mawps", {"input": "a", "target": {"v": 1}}).rows("eval", 1, 0)
    with pytest.raises(KvrlError, match="task mawps has no demonstrations"):
        make("mawps", {"input": "a", "target": 1}).demonstrations(1, 0)


POST = {"prompt": "POST: a long story\n\nTL;DR:", "completion": " the cat sat down"}


def test_summaries(make):
    task = make("tldr", POST, {**POST, "prompt": "POST: b\n\nTL;DR:"})
    (row,) = task.eval_rows
    assert row["prompt"].endswith("\n\nTL;DR:") and row["summary"] == "the cat sat down"
    assert task.demonstrations(1, 0) == [(task.train_rows[0]["prompt"], " the cat sat down")]
    report = {"report": "Long.", "summary": "Short."}
    (row,) = make("govreport", report).eval_rows
    assert row["prompt"] == user("Long.\n\nSummarise the report above in about 500 words.")
    with pytest.raises(KvrlError, match="row 1: summary is ''"):
        make("govreport", {**report, "summary": ""}).rows("eval", 1, 0)


def test_summaries_are_scored_by_the_longest_common_subsequence(make):
    task = make("tldr", POST)
    rewards = task.reward(["the cat sat down", "the dog sat", "", "cat the"], summary=["the cat sat down"] * 4)
    # "the dog sat": 2 of 3 and 2 of 4 words in order; "cat the": 1 of 2 and 1 of 4
    assert rewards == pytest.approx([1.0, 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4), 0.0, 2 * 0.5 * 0.25 / 0.75])


CONTEXT = {"title": ["Oslo", "Rome"], "sentences": [["Oslo is cold.", " It rains."], ["Rome is warm."]]}
QUESTION = {"question": "Which is warm?", "answer": "Rome", "context": CONTEXT}


@pytest.mark.parametrize("context", [CONTEXT, [["Oslo", ["Oslo is cold.", " It rains."]], ["Rome", ["Rome is warm."]]]])
def test_hotpotqa_rows(make, context):
    task = make("hotpotqa", {**QUESTION, "context": context})
    (row,) = task.eval_rows
    assert row["answer"] == "Rome"
    assert row["prompt"] == user(
        "Oslo\nOslo is cold. It rains.\n\nRome\nRome is warm.\n\nQuestion: Which is warm?\n"
        'Work step by step, then write "Answer:" and the answer.'
    )


def test_hotpotqa_scores(make):
    given = [
        "It is Rome. Answer: the city of Rome",
        "Answer: Rome.",
        "Rome",
        "Answer: Oslo",
        "Answer: Rome Answer: Oslo",
    ]
    f1, exact = (make("hotpotqa", QUESTION, metric=metric) for metric in ("f1", "exact_match"))
    assert f1.reward(given, answer=["Rome"] * 5) == pytest.approx([0.5, 1, 0, 0, 0])  # 1 of 3 words, 1 of 1
    assert exact.reward(given, answer=["Rome"] * 5) == [0, 1, 0, 0, 0]
    (pair,) = make("hotpotqa", QUESTION, {**QUESTION, "question": "b"}).demonstrations(1, 0)
    assert pair[1] == "Answer: Rome" and f1.reward([pair[1]], answer=["Rome"]) == [1.0]


@pytest.mark.parametrize(("context", "message"), [
    ("Oslo", "context is a str; give title and sentences, each a list, or pairs of them"),
    ({"title": None, "sentences": [["a"]]}, "context is a dict; give title and sentences, each a list"),
    ({"title": ["Oslo", "Rome"], "sentences": [["a"]]}, "context has 2 titles and 1 lists of sentences; give as many"),
    ({"title": ["Oslo"], "sentences": [None]}, "context has 'Oslo' with None; give a title and a list of sentences"),
    ({"title": ["Oslo"], "sentences": [["a", None]]}, "context has 'Oslo' with ['a', None]; give a title"),
    ([["Oslo", ["a"]], [7, ["a"]]], "context has 7 with ['a']; give a title"),
    ([["Oslo", [["a"]]]], "context has 'Oslo' with [['a']]; give a title"),
])  # fmt: skip
def test_hotpotqa_refuses_other_contexts(make, context, message):
    with pytest.raises(KvrlError, match=f"rows.jsonl, row 1: {re.escape(message)}"):
        make("hotpotqa", {**QUESTION, "context": context}).rows("eval", 1, 0)


@pytest.mark.parametrize("name", ["gsm8k", "math", "mawps", "svamp", "tldr", "govreport", "hotpotqa", "jsonl"])
def test_the_registry_knows_each_by_its_name(name):
    assert name in TASKS
    params = {"path": "rows.jsonl"} if name in ("jsonl", "mawps") else {}
    assert get_task(name, **params).name == name
