"""Linear systems: some solved by hand, an evaluator of worked texts that shares nothing with the writer, splits."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks import get_task
from kvrl.tasks.linsys import LinSys, solve

HARD = {"min_unknowns": 2, "max_unknowns": 4, "max_coefficient": 3, "max_factor": 2, "max_solution": 9,
        "max_number": 60}  # fmt: skip


def equations(prompt: str) -> list[list[int]]:
    bos, *symbols = prompt.split()
    assert bos == "<bos>"
    rows = []
    for equation in " ".join(symbols).split(" ; "):
        left, right = equation.split(" = ")
        rows.append([*map(int, left.split()), int(right)])
    assert all(len(row) == len(rows) + 1 for row in rows)
    return rows


def gauss(rows: list[list[int]]) -> list[Fraction]:
    """The solution by Gauss-Jordan in fractions, with exchanges."""
    m = [[Fraction(entry) for entry in row] for row in rows]
    for k in range(len(m)):
        pivot = next(i for i in range(k, len(m)) if m[i][k])
        m[k], m[pivot] = m[pivot], m[k]
        m[k] = [entry / m[k][k] for entry in m[k]]
        for i in range(len(m)):
            if i != k:
                m[i] = [a - m[i][k] * b for a, b in zip(m[i], m[k], strict=True)]
    return [row[-1] for row in m]


def steps(text: str) -> list[tuple[list[int], int]]:
    """The steps of a worked text: the numbers in it, the result last, and what the left side comes to."""
    found = re.findall(r"(-?\d+) ([-+]) (\d+) \* (-?\d+) = (-?\d+)|(-?\d+) / (-?\d+) = (-?\d+)", text)
    return [
        ([int(a), int(sign + factor), int(b), int(result)], int(a) + int(sign + factor) * int(b))
        if sign
        else ([int(top), int(bottom), int(quotient)], int(top) // int(bottom))
        for a, sign, factor, b, result, top, bottom, quotient in found
    ]


def test_a_system_of_three_by_hand():
    # x + 2y - z = 3, 2x + 5y = 7, -x - y + 4z = 2. Out of the lower rows: y + 2z = 1 and y + 3z = 5, then z = 4.
    text = (
        "#2 - 2 * #1 : 5 - 2 * 2 = 1 0 - 2 * -1 = 2 7 - 2 * 3 = 1 "
        "#3 + 1 * #1 : -1 + 1 * 2 = 1 4 + 1 * -1 = 3 2 + 1 * 3 = 5 "
        "#3 - 1 * #2 : 3 - 1 * 2 = 1 5 - 1 * 1 = 4 "
        "#3 : 4 / 1 = 4 #2 : 1 - 2 * 4 = -7 -7 / 1 = -7 "
        "#1 : 3 + 1 * 4 = 7 7 - 2 * -7 = 21 21 / 1 = 21 > 21 -7 4"
    )
    assert solve([[1, 2, -1, 3], [2, 5, 0, 7], [-1, -1, 4, 2]]) == text
    assert gauss([[1, 2, -1, 3], [2, 5, 0, 7], [-1, -1, 4, 2]]) == [21, -7, 4]


def test_coefficients_of_zero_and_divisors():
    zero = "#2 - 1 * #1 : 1 - 1 * 0 = 1 5 - 1 * 2 = 3 #2 : 3 / 1 = 3 #1 : 2 - 0 * 3 = 2 2 / 1 = 2 > 2 3"
    assert solve([[1, 0, 2], [1, 1, 5]]) == zero
    assert solve([[2, 3, 1], [-4, -9, 7]]).endswith("#2 : 9 / -3 = -3 #1 : 1 - 3 * -3 = 10 10 / 2 = 5 > 5 -3")


@pytest.mark.parametrize("params", [{}, {"max_unknowns": 4}, HARD])
def test_worked_texts_are_right_in_every_step(params):
    task = LinSys(**params)
    sizes = set()
    for prompt, text in task.demonstrations(400, seed=1):
        rows = equations(prompt)
        for numbers, value in steps(text):
            assert numbers[-1] == value
            if len(numbers) == 3:
                assert numbers[0] == numbers[1] * numbers[2]  # no remainder
        answer = [int(value) for value in text.split(" > ")[1].split()]
        assert answer == gauss(rows)
        sizes.add(len(rows))
        assert len(steps(text)) == {2: 2 + 1 + 2, 3: 8 + 3 + 3, 4: 20 + 6 + 4}[len(rows)]
        assert task.reward([text], answer=[answer]) == [1.0]
    assert sizes == set(range(task.min_unknowns, task.max_unknowns + 1))


def test_problems_have_the_solution_that_the_row_names_and_numbers_within_the_limits():
    task = LinSys(**HARD)
    largest = 0
    for row in task.rows("train", 400, seed=0):
        rows = equations(row["prompt"])
        assert gauss(rows) == row["answer"]
        assert max(map(abs, row["answer"])) <= 9
        largest = max(largest, *(abs(entry) for equation in rows for entry in equation))
    assert 50 < largest <= 60


def test_every_number_of_a_demonstration_has_its_symbol():
    for params in ({}, HARD, {"max_number": 5}, {"max_number": 9, "mistake_rate": 0.5}):
        task = LinSys(**params)
        texts = [f"{prompt} {text}" for prompt, text in task.demonstrations(2000, seed=0)]
        assert {symbol for text in texts for symbol in text.split()} <= {*task.vocab, "<bos>"}
    assert len(set(LinSys(**HARD).vocab)) == len(LinSys(**HARD).vocab) == 121 + 4 + 8


def test_mistakes_are_in_sums_of_right_sides_and_go_on():
    task = LinSys(min_unknowns=2, max_unknowns=2, mistake_rate=0.2)
    wrong = sums = failed = 0
    for prompt, text in task.demonstrations(500, seed=3):
        rows = equations(prompt)
        entry, right_side, last, substituted, first = steps(text)
        assert entry[0][-1] == entry[1]
        for numbers, value in (right_side, substituted):
            assert abs(numbers[-1] - value) <= 1
            wrong += numbers[-1] != value
            sums += 1
        assert last[0][:2] == [right_side[0][-1], entry[0][-1]]
        assert substituted[0][2] == last[0][-1] == last[1]
        assert first[0] == [substituted[0][-1], rows[0][0], first[1]]
        assert text.endswith(f"> {first[1]} {last[1]}")
        failed += [first[1], last[1]] != gauss(rows)
    assert 0.16 < wrong / sums < 0.24
    assert 0.3 < failed / 500 < 0.42  # 1 - 0.8 ** 2 = 0.36


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("#2 : 2 / 2 = 1 > 2 -1", 1.0),
        ("> 2 -1 <eos>", 1.0),
        ("> 5 5 > 2 -1", 1.0),  # the last answer counts
        ("> -1 2", 0.0),
        ("> 2 -1 0", 0.0),
        ("> 2", 0.0),
        ("> 2 1", 0.0),
        ("2 -1", 0.0),  # no mark
        ("> 2 -1 >", 0.0),
        ("", 0.0),
    ],
)
def test_reward(completion, reward):
    assert LinSys().reward([completion], answer=[[2, -1]], prompt=[""]) == [reward]


def test_splits_share_no_system_in_any_order_of_its_equations():
    # Small enough that, without care, nearly every held-out system would occur in training.
    task = LinSys(min_unknowns=2, max_unknowns=2, max_solution=1)

    def keys(prompts):
        return {tuple(sorted(map(tuple, equations(prompt)))) for prompt in prompts}

    train = keys(row["prompt"] for seed in range(3) for row in task.rows("train", 1000, seed))
    train |= keys(prompt for prompt, _ in task.demonstrations(1000, seed=7))
    held_out = [row["prompt"] for row in task.rows("eval", 10, seed=0)]
    assert len(train) > 100 and len(keys(held_out)) == 10
    assert not train & keys(held_out)
    with pytest.raises(KvrlError, match=r"eval.n: 500 is above the \d\d eval problems that 21000 draws gave; lower it"):
        task.rows("eval", 500, seed=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_unknowns": 5}, "task.params.max_unknowns: 5 is above the maximum 4; lower it to at most 4"),
        ({"min_unknowns": 1}, "task.params.min_unknowns: 1 is below the minimum 2; raise it to at least 2"),
        ({"min_unknowns": 4}, r"task.params.min_unknowns: 4 is above max_unknowns \(3\); lower it or raise"),
        ({"max_solution": 90, "max_coefficient": 9}, "task.params.max_number: 20 is below a number of each of 200"),
        ({"max_factor": 30}, "task.params.max_number: 20 is below"),
        ({"mistake_rate": 1.0}, "task.params.mistake_rate: 1.0 is not below 1; "),
    ],
)
def test_bad_dials_are_refused(params, message):
    with pytest.raises(KvrlError, match=message) as error:
        get_task("linsys", **params)
    assert "\n" not in str(error.value)


def test_an_unknown_split_is_refused():
    with pytest.raises(KvrlError, match="split: test is neither train nor eval"):
        LinSys().rows("test", 1, seed=0)
