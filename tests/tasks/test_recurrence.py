"""The recurrence task and the registry: worked values, the scorer, splits, and refusals."""

from __future__ import annotations

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import TASKS, encode_prompt, get_task
from kvrl.tasks.recurrence import Recurrence, values

WORKED = "#3 3 + 7 = 0 #4 7 + 0 = 7 #5 0 + 7 = 7 #6 7 + 7 = 4"


def key(row: dict) -> tuple[int, str]:
    return row["n"], row["prompt"]


def test_values_by_hand():
    assert values((8, 3, 7)) == [3, 7, 0, 7, 7, 4, 1, 5]


def test_a_demonstration_without_mistakes_is_the_worked_trace():
    task = Recurrence(min_n=6, max_n=6, mistake_rate=0.0)
    worked = dict(task.demonstrations(2000, seed=0))
    # a train problem; the held-out ones never occur
    held_out = {row["prompt"] for row in task.rows("eval", 51, seed=0)}
    assert len(held_out) == 51 and not held_out & set(worked)
    assert worked.get("<bos> #6 3 7", WORKED) == WORKED
    for prompt, text in worked.items():
        _, last, first, second = prompt.split()
        steps = [text.split()[i : i + 6] for i in range(0, 24, 6)]
        x = values((6, int(first), int(second)))
        assert last == "#6"
        assert steps == [
            [f"#{t}", str(x[t - 3]), "+", str(x[t - 2]), "=", str(x[t - 1])] for t in range(3, 7)
        ]


def test_mistakes_have_their_rate_and_go_on_into_later_steps():
    wrong = digits = 0
    for _, text in Recurrence(mistake_rate=0.1).demonstrations(400, seed=3):
        tokens = text.split()
        for i in range(0, len(tokens), 6):
            a, b, c = int(tokens[i + 1]), int(tokens[i + 3]), int(tokens[i + 5])
            wrong += c != (a + b) % 10
            digits += 1
            if i + 6 < len(tokens):
                assert (int(tokens[i + 7]), int(tokens[i + 9])) == (b, c)
    assert 0.08 < wrong / digits < 0.12


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (WORKED, 1.0),
        (WORKED + " <eos>", 1.0),
        (WORKED.replace("= 0", "= 9"), 1.0),  # only the last value counts
        (WORKED[:-1] + "5", 0.0),
        (WORKED + " #7", 0.0),  # goes on after the last step
        (WORKED.removesuffix(" #6 7 + 7 = 4"), 0.0),  # not finished
        (WORKED.replace("#6", "#5"), 0.0),
        ("= 4", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion, reward):
    columns = {"prompt": ["<bos> #6 3 7"], "n": [6], "answer": [4]}
    assert Recurrence().reward([completion], **columns) == [reward]


def test_splits_are_disjoint_for_every_seed_and_cover_all_problems():
    task = Recurrence()
    held_out = {key(row) for row in task.rows("eval", 256, seed=1)}
    assert held_out == {key(row) for row in task.rows("eval", 256, seed=2)}
    train = [key(row) for row in task.rows("train", 488, seed=5)]
    assert len(held_out) == 256 and len(set(train[:244])) == 244
    assert not held_out & set(train)
    assert len(held_out | set(train)) == 500
    assert sorted(train[:244]) == sorted(train[244:]) and train[:244] != train[244:]
    assert not held_out & {(int(p.split()[1][1:]), p) for p, _ in task.demonstrations(1000, seed=7)}


def test_rows_and_demonstrations_depend_on_the_seed_alone():
    task = Recurrence()
    assert task.rows("train", 9, seed=1) == task.rows("train", 300, seed=1)[:9]
    assert task.rows("train", 9, seed=1) != task.rows("train", 9, seed=2)
    assert task.demonstrations(9, seed=1) == task.demonstrations(9, seed=1)
    assert task.demonstrations(9, seed=1) != task.demonstrations(9, seed=2)


def test_answers_are_the_last_values():
    for row in Recurrence().rows("train", 50, seed=0):
        _, n, first, second = row["prompt"].split()
        assert n == f"#{row['n']}"
        assert row["answer"] == values((row["n"], int(first), int(second)))[-1]


def test_too_many_held_out_rows_and_an_unknown_split_are_refused():
    with pytest.raises(KvrlError, match="eval.n: 257 is above the 256 held-out problems; lower it"):
        Recurrence().rows("eval", 257, seed=0)
    with pytest.raises(KvrlError, match="split: test is neither train nor eval"):
        Recurrence().rows("test", 1, seed=0)


def test_the_vocabulary_covers_every_text():
    task = Recurrence()
    texts = [f"{prompt} {text}" for prompt, text in task.demonstrations(300, seed=0)]
    assert {symbol for text in texts for symbol in text.split()} == {*task.vocab, "<bos>"}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("recurence", {}, "task.name: recurence is not one of .*; did you mean recurrence?"),
        ("recurrence", {"lag": 3}, "task.params.lag: task recurrence has no such parameter; it has min_n"),
        ("recurrence", {"min_n": 2}, "task.params.min_n: 2 is below the minimum 3; raise it to at least 3"),
        ("recurrence", {"max_n": "x"}, "task.params.max_n: x is refused: "),
        ("recurrence", {"min_n": 30}, r"task.params.min_n: 30 is above max_n \(22\)"),
        ("recurrence", {"mistake_rate": 1.0}, "task.params.mistake_rate: 1.0 is not below 1; "),
        ("jsonl", {}, "task.params.path: is missing and task jsonl needs it; set it"),
    ],
)
def test_the_registry_refuses(name, params, message):
    with pytest.raises(KvrlError, match=message):
        get_task(name, **params)


def test_the_registry_finds_each_task_by_its_own_name():
    assert TASKS["recurrence"].endswith(":Recurrence")
    assert get_task("recurrence", max_n=19) == Recurrence(max_n=19)
    assert get_task("recurrence").name == "recurrence"


def test_jsonl_splits_and_scores(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "p{i}", "answer": {i}}}\n' for i in range(10)))
    task = get_task("jsonl", path=str(file), eval_share=0.2)
    assert sorted(row["prompt"] for row in task.rows("eval", 2, seed=0)) == ["p8", "p9"]
    assert sorted(row["answer"] for row in task.rows("train", 8, seed=0)) == list(range(8))
    assert task.reward([" 3\n", "4"], prompt=["p3", "p3"], answer=[3, 3]) == [1.0, 0.0]
    with pytest.raises(KvrlError, match="warm_start: task jsonl has no demonstrations"):
        task.demonstrations(1, seed=0)
    file.write_text('{"question": "p", "answer": 1}\n')
    with pytest.raises(KvrlError, match=r"rows.jsonl has no column prompt \(it has question, answer\)"):
        get_task("jsonl", path=str(file)).rows("train", 1, seed=0)


def test_prompts_are_text_or_messages():
    class Template:
        def __call__(self, text):
            return {"input_ids": [len(text)]}

        def apply_chat_template(self, messages, add_generation_prompt, return_dict):
            assert add_generation_prompt and return_dict
            return {"input_ids": [len(messages), 7]}

    assert encode_prompt(Template(), "abc") == [3]
    assert encode_prompt(Template(), [{"role": "user", "content": "abc"}]) == [1, 7]
