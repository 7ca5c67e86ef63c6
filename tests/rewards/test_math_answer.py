from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import BadReward, get_reward, score
from kvrl.rewards.math_answer import MathVerify, boxed

HALF = r"\frac{1}{2}"
ENDLESS = r"\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def math_verify() -> Iterator[MathVerify]:
    reward = MathVerify(seconds=1.0)
    reward.prepare(torch.device("cpu"))
    yield reward
    assert reward._worker is not None
    reward._worker.process.kill()


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        (r"so it is \boxed{0.5}", HALF, True),
        (r"so it is $\frac{2}{4}$.", f"${HALF}$", True),
        ("it is 1/2", r"\boxed{\frac{1}{2}}", True),
        (r"\boxed{3}, from 1/2 and 5/2", HALF, False),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        (r"\boxed{(1, 2)}", "(2, 1)", False),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", True),
        (r"\boxed{\text{(B)}}", r"\text{(B)}", True),
        ("2 + 2 is 4", 4, True),
        ("2 + 2 is 4", 4.0, True),
        ("no answer", "4", False),
        ("", "4", False),
    ],
)
def test_answers_are_compared_by_value(math_verify: MathVerify, text: str, gold: object, right: bool) -> None:
    assert math_verify([text], answer=[gold]) == [float(right)]


def test_several_gold_answers_and_the_order_of_samples(math_verify: MathVerify) -> None:
    assert math_verify([r"\boxed{2}"] * 3, answer=[["1", "2"], "1", "2"]) == [1.0, 0.0, 1.0]


def test_the_box_counts_before_what_is_said_after_it(math_verify: MathVerify) -> None:
    text = r"So \boxed{8}. The final answer is $7$. It took 9 steps."
    assert math_verify([text] * 3, answer=["7", "8", "9"]) == [0.0, 1.0, 0.0]


def test_an_answer_without_end_is_wrong_and_costs_only_itself(math_verify: MathVerify) -> None:
    texts = [r"\boxed{1}", ENDLESS, r"\boxed{1}", r"\boxed{2}"]
    assert math_verify(texts, answer=["1"] * 4) == [1.0, 0.0, 1.0, 0.0]


def test_the_time_that_an_answer_may_take_is_a_parameter() -> None:
    hasty = MathVerify(seconds=1e-6)
    hasty.prepare(torch.device("cpu"))
    assert hasty([r"\boxed{x^2 + 2x + 1}"], answer=["(x+1)^2"]) == [0.0]


def test_it_works_outside_the_main_thread(math_verify: MathVerify) -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(math_verify([r"\boxed{1}", ENDLESS], answer=["1", "1"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]
    assert score([math_verify], None, ["1"], {"answer": ["1"]}, timeout=60).rewards.tolist() == [1.0]


def test_batches_at_the_same_time_do_not_mix(math_verify: MathVerify) -> None:
    found: dict[str, list] = {}

    def ask(answer: str) -> None:
        found[answer] = math_verify(["1"] * 100, answer=[answer] * 100)

    threads = [threading.Thread(target=ask, args=(answer,)) for answer in ("1", "2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"1": [1.0] * 100, "2": [0.0] * 100}


@pytest.mark.parametrize("gold", ["", None, [], ["1", None]])
def test_an_unreadable_gold_answer_is_an_error_not_a_zero(math_verify: MathVerify, gold: object) -> None:
    bad, right = math_verify(["None", "1"], answer=[gold, "1"])
    assert isinstance(bad, BadReward) and f"cannot read the gold answer {gold!r}" in str(bad) and right == 1.0
    with pytest.raises(KvrlError, match=r"MathVerify: cannot read the gold answer '' for sample 1"):
        score([math_verify], None, ["1", "1"], {"answer": ["1", ""]})


def test_a_lost_process_is_an_error_and_is_replaced(math_verify: MathVerify) -> None:
    assert math_verify._worker is not None
    math_verify._worker.process.kill()
    lost, right = math_verify(["1", "1"], answer=["1", "1"])
    assert isinstance(lost, BadReward) and "exit code -9" in str(lost) and right == 1.0


def test_bare_latex_is_put_in_a_box() -> None:
    assert boxed(r"\sqrt{2}") == r"\boxed{\sqrt{2}}"
    assert boxed(r"so \boxed{2}") == r"so \boxed{2}"


def test_the_column_is_a_parameter() -> None:
    assert get_reward("math_verify", column="solution").columns == ("solution",)
