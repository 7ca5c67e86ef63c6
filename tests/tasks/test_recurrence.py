"""The recurrence task and the registry: worked values, the scorer, splits, and refusals."""

from __future__ import annotations

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import TASKS, encode_prompt, get_task
from kvrl.tasks.recurrence import Recurrence, values

WORKED = "#3 3 + 7 = 0 #4 7 + 0 = 7 #5 0 + 7 = 7 #6 7 + 7 = 4"


def test_values_by_hand():
    assert values((8, 2, 3, 7)) == [3, 7, 0, 7, 7, 4, 1, 5]
    assert values((12, 9, 9, 9)) == [9, 9, 8, 7, 5]  # x_9 = 9, so x_12 is three steps on


def test_demonstrations_without_mistakes_are_worked_traces_of_every_length_from_every_start():
    task = Recurrence(min_steps=3, max_steps=4, max_start=3, mistake_rate=0.0)
    worked = dict(task.demonstrations(3000, seed=0))
    lengths, starts = set(), set()
    for prompt, text in worked.items():
        _, last, start, first, second = prompt.split()
        last, start = int(last[1:]), int(start[1:])
        x = values((last, start, int(first), int(second)))
        tokens = text.split()
        steps = [tokens[i : i + 6] for i in range(0, len(tokens), 6)]
        assert steps == [
            [f"#{start + i + 1}", str(x[i]), "+", str(x[i + 1]), "=", str(x[i + 2])] for i in range(last - start)
        ]
        lengths.add(last - start)
        starts.add(start)
    assert lengths == {1, 2, 3, 4} and starts == {2, 3}


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
    columns = {"prompt": ["<bos> #6 #2 3 7"], "n": [6], "answer": [4]}
    assert Recurrence().reward([completion], **columns) == [reward]


def test_splits_are_disjoint_for_every_seed_and_cover_all_problems():
    task = Recurrence(min_steps=3, max_steps=4, max_start=3)  # 2 starts x 2 lengths x 100 pairs
    with pytest.raises(KvrlError) as error:
        task.rows("eval", 401, seed=0)
    held = int(str(error.value).split("above the ")[1].split()[0])
    assert 20 < held < 60  # a tenth of 400
    held_out = {row["prompt"] for row in task.rows("eval", held, seed=1)}
    assert len(held_out) == held and held_out == {row["prompt"] for row in task.rows("eval", held, seed=2)}
    train = [row["prompt"] for row in task.rows("train", 2 * (400 - held), seed=5)]
    first, second = train[: 400 - held], train[400 - held :]
    assert len(set(first)) == 400 - held and sorted(first) == sorted(second) and first != second
    assert not held_out & set(train)
    assert not held_out & {prompt for prompt, _ in task.demonstrations(3000, seed=7)}


def test_rows_and_demonstrations_depend_on_the_seed_alone():
    task = Recurrence()
    assert task.rows("train", 9, seed=1) == task.rows("train", 300, seed=1)[:9]
    assert task.rows("train", 9, seed=1) != task.rows("train", 9, seed=2)
    assert task.demonstrations(9, seed=1) == task.demonstrations(9, seed=1)
    assert task.demonstrations(9, seed=1) != task.demonstrations(9, seed=2)


def test_answers_are_the_last_values():
    for row in Recurrence().rows("train", 50, seed=0):
        _, n, start, first, second = row["prompt"].split()
        assert n == f"#{row['n']}" and 16 <= row["n"] - int(start[1:]) <= 20
        assert row["answer"] == values((row["n"], int(start[1:]), int(first), int(second)))[-1]


def test_an_unknown_split_is_refused():
    with pytest.raises(KvrlError, match="split: test is neither train nor eval"):
        Recurrence().rows("test", 1, seed=0)


def test_the_vocabulary_covers_every_text():
    task = Recurrence()
    texts = [f"{prompt} {text}" for prompt, text in task.demonstrations(3000, seed=0)]
    assert {symbol for text in texts for symbol in text.split()} == {*task.vocab, "<bos>"}


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("recurence", {}, "task.name: recurence is not one of .*; did you mean recurrence?"),
        ("recurrence", {"lag": 3}, "task.params.lag: task recurrence has no such parameter; it has min_steps"),
        ("recurrence", {"min_steps": 0}, "task.params.min_steps: 0 is below the minimum 1; raise it to at least 1"),
        ("recurrence", {"max_steps": "x"}, "task.params.max_steps: x is refused: "),
        ("recurrence", {"min_steps": 30}, r"task.params.min_steps: 30 is above max_steps \(20\)"),
        ("recurrence", {"mistake_rate": 1.0}, "task.params.mistake_rate: 1.0 is not below 1; "),
        ("jsonl", {}, "task.params.path: is missing and task jsonl needs it; set it"),
    ],
)
def test_the_registry_refuses(name, params, message):
    with pytest.raises(KvrlError, match=message):
        get_task(name, **params)


def test_the_registry_finds_each_task_by_its_own_name():
    assert TASKS["recurrence"].endswith(":Recurrence")
    assert get_task("recurrence", max_steps=19) == Recurrence(max_steps=19)
    assert get_task("recurrence").name == "recurrence"


def test_jsonl_splits_and_scores(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "p{i}", "answer": {i}}}\n' for i in range(10)))
    task = get_task("jsonl", path=str(file), eval_share=0.2)
    held_out = {row["answer"] for row in task.rows("eval", 2, seed=0)}
    assert {row["answer"] for row in task.rows("train", 8, seed=0)} == set(range(10)) - held_out
    assert task.reward([" 3\n", "4"], prompt=["p3", "p3"], answer=[3, 3]) == [1.0, 0.0]
    with pytest.raises(KvrlError, match="warm_start: task jsonl has no demonstrations"):
        task.demonstrations(1, seed=0)
    file.write_text('{"question": "p", "answer": 1}\n')
    with pytest.raises(KvrlError, match=r"rows.jsonl has no column prompt \(it has question, answer\)"):
        get_task("jsonl", path=str(file)).rows("train", 1, seed=0)


def test_prompts_are_text_or_messages():
    class Template:
        chat_template = "{{ messages }}"

        def __call__(self, text):
            return {"input_ids": [len(text)]}

        def apply_chat_template(self, messages, add_generation_prompt, return_dict):
            assert add_generation_prompt and return_dict
            return {"input_ids": [len(messages), 7]}

    assert encode_prompt(Template(), "abc") == [3]
    assert encode_prompt(Template(), [{"role": "user", "content": "abc"}]) == [1, 7]
