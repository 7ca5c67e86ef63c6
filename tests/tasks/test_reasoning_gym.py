"""The reasoning-gym task: splits, prompts, extraction, the library's scorer, worked traces."""

from __future__ import annotations

import random
import sys

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import reasoning_gym as task_module
from kvrl.tasks.reasoning_gym import (
    TRACES,
    ReasoningGym,
    extract_answer,
    format_answer,
    trace_chain_sum,
)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(KvrlError, match=r"needs the package reasoning-gym; .* pip install -e '\.\[tasks\]'"):
        task_module.library()


@pytest.mark.parametrize(
    ("text", "marker", "tags", "last_line"),
    [
        ("3 + 4 = 7\nAnswer: 7", "7", None, "Answer: 7"),
        ("Answer: 3\nno, ANSWER:  4 \n", "4", None, "no, ANSWER:  4"),
        ("so <answer> 7\n8 </answer> and", None, "7\n8", "so <answer> 7\n8 </answer> and".splitlines()[-1]),
        ("<answer>1</answer><answer>2</answer>\nend", None, "2", "end"),
        ("Answer: 12<|im_end|>", "12", None, "Answer: 12"),
        ("Answer:", None, None, "Answer:"),
        ("", None, None, None),
        (" \n<|im_end|>", None, None, None),
    ],
)
def test_extract_answer(text, marker, tags, last_line):
    assert extract_answer(text, "marker") == marker
    assert extract_answer(text, "tags") == tags
    assert extract_answer(text, "last_line") == last_line


@pytest.mark.parametrize("answer_format", ["marker", "tags", "last_line"])
def test_a_written_answer_is_read_back(answer_format):
    assert extract_answer("steps\n" + format_answer("-12", answer_format), answer_format) == "-12"


def test_trace_of_a_chain_sum():
    entry = {"metadata": {"expression": "5 + 8 - -3 - 20"}}
    assert trace_chain_sum(entry, 0.0, random.Random(0)) == ("= 13 - -3 - 20\n= 16 - 20\n= -4", "-4")


def test_wrong_steps_of_a_trace_go_on():
    entry = {"metadata": {"expression": " + ".join(["5"] * 40)}}
    worked, answer = trace_chain_sum(entry, 0.25, random.Random(0))
    totals = [5, *(int(line.split(" ")[1]) for line in worked.splitlines())]
    slips = [after - before - 5 for before, after in zip(totals, totals[1:], strict=False)]
    wrong = [slip for slip in slips if slip]
    assert 3 <= len(wrong) <= 17  # 39 steps at 25%
    assert set(wrong) <= {-10, -1, 1, 10}
    assert answer == str(totals[-1]) == str(200 + sum(slips))


def chain_sum(**params) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(dataset="chain_sum", **params)


def questions(task: ReasoningGym, split: str, n: int, seed: int) -> list[str]:
    return [row["entry"]["question"] for row in task.rows(split, n, seed)]


def test_splits_share_no_question_whatever_the_seeds():
    # 200 expressions in all: without care nearly every eval question would occur in training.
    task = chain_sum(config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    train = {question for seed in range(3) for question in questions(task, "train", 400, seed)}
    held_out = [questions(task, "eval", 30, seed) for seed in range(3)]
    assert len(train) > 100
    for asked in held_out:
        assert len(set(asked)) == 30
        assert not train & set(asked)


def test_demonstrations_are_train_problems():
    task = chain_sum(config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    shown = {prompt[-1]["content"].splitlines()[0] for prompt, _ in task.demonstrations(300, 5)}
    assert not shown & set(questions(task, "eval", 40, 0))


def test_rows_depend_on_seed_and_offset_only():
    task = chain_sum()
    assert task.rows("train", 8, 3) == task.rows("train", 8, 3)
    assert questions(task, "train", 4, 3) == questions(task, "train", 8, 3)[:4]
    assert questions(chain_sum(seed_offset=2), "train", 8, 1) == questions(task, "train", 8, 3)
    # The library seeds item i with seed + i, so neighbouring seeds must not be passed through as they are.
    assert len(set(questions(task, "train", 50, 3)) & set(questions(task, "train", 50, 4))) <= 2


def test_more_eval_rows_than_questions_is_refused():
    task = chain_sum(config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    with pytest.raises(KvrlError, match=r"eval.n: 500 is above the \d\d eval problems"):
        task.rows("eval", 500, 0)
    with pytest.raises(KvrlError, match="split: test is neither train nor eval"):
        task.rows("test", 1, 0)


def test_prompt_has_system_question_and_instruction():
    row = chain_sum(system="Be brief.", instruction="Show steps.").rows("train", 1, 0)[0]
    question = row["entry"]["question"]
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"{question}\nShow steps."},
    ]
    default = chain_sum(answer_format="tags").rows("train", 1, 0)[0]["prompt"]
    assert default[0]["role"] == "user" and default[0]["content"].endswith("<answer> and </answer>.")
    assert chain_sum(instruction="").rows("train", 1, 0)[0]["prompt"][0]["content"] == question


def test_reward_is_the_library_s_score():
    task = chain_sum()
    row = task.rows("train", 1, 0)[0]
    right = row["answer"]
    texts = [
        f"Answer: {right}",
        f"Answer: {right}.0<|im_end|>",
        f"Answer: {int(right) + 1}",
        f"It is {right}",
    ]
    columns = {key: [value] * 4 for key, value in row.items()}
    assert task.reward(texts, **columns) == [1.0, 1.0, 0.0, 0.0]  # ".0" is right for this library's scorer


@pytest.mark.parametrize(("dataset", "answer"), [
    ("prime_factorization", "no idea"),
    ("boxnet", "3"),
    ("coin_flip", "1e999"),
    ("game_of_life", "{}"),
])  # fmt: skip
def test_an_answer_that_the_scorer_cannot_parse_scores_0(dataset, answer):
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym(dataset=dataset)
    row = task.rows("train", 1, 0)[0]
    assert task.reward([f"Answer: {answer}"], entry=[row["entry"]]) == [0.0]
    if row["answer"] is not None:
        assert task.reward([f"Answer: {row['answer']}"], entry=[row["entry"]]) == [1.0]


def test_whatever_a_scorer_raises_the_answer_is_wrong():
    def scorer(answer, entry):
        raise KeyError(answer)

    task = ReasoningGym.model_construct()
    task.__dict__["_scorer"] = scorer  # in the place of the library's
    assert task.reward(["Answer: 3"], entry=[{}]) == [0.0]


@pytest.mark.parametrize("dataset", TRACES)
@pytest.mark.parametrize("answer_format", ["marker", "tags", "last_line"])
def test_demonstrations_score_1(dataset, answer_format):
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym(dataset=dataset, answer_format=answer_format)
    shown = task.demonstrations(20, 0)
    train = task.rows("train", 20, 0)
    assert [prompt for prompt, _ in shown] == [row["prompt"] for row in train]
    assert task.reward([text for _, text in shown], entry=[row["entry"] for row in train]) == [1.0] * 20


def test_mistakes_in_demonstrations():
    config = {"min_terms": 6, "max_terms": 6}
    wrong = chain_sum(config=config, mistake_rate=0.2)
    entries = [row["entry"] for row in wrong.rows("train", 200, 0)]
    scores = wrong.reward([text for _, text in wrong.demonstrations(200, 0)], entry=entries)
    assert 0.2 < sum(scores) / 200 < 0.5  # 0.8 ** 5 = 0.33 have no slip; few slips cancel
    assert wrong.demonstrations(5, 0) == wrong.demonstrations(5, 0)


def test_data_set_without_traces():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(KvrlError, match="warm_start: data set gcd has no worked traces .*leave warm_start out"):
        ReasoningGym(dataset="gcd").demonstrations(1, 0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dataset": "chain_sums"}, "task.params.dataset: chain_sums .*did you mean chain_sum?"),
        ({"dataset": "sum"}, r"task.params.dataset: sum is none .*did you mean .*chain_sum.*\?"),
        ({"config": {"terms": 3}}, "task.params.config.terms: chain_sum has no such field; use .*min_terms"),
        ({"config": {"seed": 3}}, "task.params.config.seed: chain_sum has no such field"),
        ({"config": {"min_terms": 0}}, "task.params.config: .*min_terms must be positive"),
        ({"mistake_rate": 1.0}, "less than 1"),
    ],
)
def test_wrong_parameters(params, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**params)


@pytest.mark.parametrize(("dataset", "config", "answer_format"), [
    ("gsm_symbolic", {}, "marker"),
    ("needle_haystack", {"min_num_statements": 30, "max_num_statements": 40}, "last_line"),
])  # fmt: skip
def test_long_context_stand_ins(dataset, config, answer_format):
    """Problems that need no hub: word problems, and one name to be found in a long text."""
    pytest.importorskip("reasoning_gym")
    task = ReasoningGym(dataset=dataset, config=config, answer_format=answer_format)
    parts = [task.rows(split, 12, seed) for split, seed in (("train", 0), ("train", 0), ("train", 1), ("eval", 0))]
    assert parts[0] == parts[1] != parts[2]
    train, held_out = ({row["prompt"][-1]["content"] for row in part} for part in (parts[0] + parts[2], parts[3]))
    assert len(held_out) == 12 and not train & held_out
    rows = parts[3]
    right = ["Let me see.\n" + format_answer(row["answer"], answer_format) for row in rows]
    wrong = ["Let me see.\n" + format_answer(row["answer"] + "1", answer_format) for row in rows]
    columns = {"entry": [row["entry"] for row in rows], "answer": [row["answer"] for row in rows]}
    assert task.reward(right, **columns) == [1.0] * 12
    assert max(task.reward(wrong, **columns)) < 1 and max(task.reward([""] * 12, **columns)) < 1
    if dataset == "needle_haystack":
        texts = [row["prompt"][-1]["content"] for row in rows]
        assert all(row["answer"] in text and text.count(". ") >= 30 for row, text in zip(rows, texts, strict=True))
