from __future__ import annotations

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import BadReward, get_reward
from kvrl.rewards.match import F1, ExactMatch, extract, normalize, word_f1

CPU = torch.device("cpu")
NAMES = ["exact_match", "f1", "fuzzy_match"]


def rewards(name: str, texts: list[str], golds: list, **params: object) -> list:
    reward = get_reward(name, **params)
    reward.prepare(CPU)
    return reward(texts, answer=golds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat, a dog!", "cat dog"),
        ("an-apple", "anapple"),  # punctuation goes before articles do, as in the script
        ("theatre Anna", "theatre anna"),
        ("  ", ""),
        ("U.S.A.", "usa"),
    ],
)
def test_normalize_as_squad_does(text: str, expected: str) -> None:
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("x y z", "x y", 0.8),  # precision 2/3, recall 1
        ("x x y", "x z", 0.4),  # x is shared once: precision 1/3, recall 1/2
        ("x", "y", 0.0),
        ("", "", 1.0),
        ("", "x", 0.0),
    ],
)
def test_word_f1(answer: str, gold: str, expected: float) -> None:
    assert word_f1(answer.split(), gold.split()) == pytest.approx(expected)


def test_f1_takes_the_best_of_several_gold_answers() -> None:
    assert F1()(["the red house"] * 2, answer=[["blue", "a red car", "red house!"], "red"]) == [
        1.0,
        pytest.approx(2 / 3),
    ]


def test_exact_match() -> None:
    texts = ["The Paris.", " Paris ", "paris", "7", "Rome"]
    golds = ["paris", "Paris", "Paris", 7, ["Oslo", "Rome"]]
    assert ExactMatch()(texts, answer=golds) == [1.0] * 5
    assert ExactMatch(normalize=False)(texts, answer=golds) == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert ExactMatch()(["", "the"], answer=["", "x"]) == [1.0, 0.0]
    assert ExactMatch(column="gold")(["a b", "b"], gold=["b", "c"]) == [1.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_gold_answer_of_which_normalisation_leaves_nothing_is_compared_as_it_is(name: str) -> None:
    assert rewards(name, ["a ", " THE", ".", "A."], ["A", "the", ".", "A"]) == [1.0] * 4
    assert rewards(name, ["", "", "", "b"], ["A", "the", ".", "A"]) == [0.0] * 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_gold_number_is_compared_as_a_number(name: str, normalize: bool) -> None:
    right = [("3", 3.0), (" 3.00 ", 3), ("1,234,567.", 1234567), ("-5", -5), ("1e-3", 0.001), ("7", [1, 7]), ("$7", 7)]
    right += [(str(10**400), 10**400), ("9007199254740993", 9007199254740993)]
    wrong = [("30", 3.0), ("5", -5), ("1,5", 15), ("3 apples", 3), ("", 0), ("9007199254740992", 9007199254740993)]
    wrong += [("3.0", "3.1"), ("1", True)] if name == "exact_match" else []  # which are texts
    texts, golds = zip(*right, *wrong, strict=True)
    assert rewards(name, list(texts), list(golds), normalize=normalize) == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("name", [*NAMES, "rouge_l"])
@pytest.mark.parametrize("gold", [None, [], ["none", None], float("nan")])
def test_no_gold_answer_is_an_error_of_the_sample(name: str, gold: object) -> None:
    params = {"column": "answer"}
    bad, good = rewards(name, ["None", "none"], [gold, "none"], **params)
    assert isinstance(bad, BadReward) and str(bad) == f"cannot read the gold answer {gold!r}" and good == 1.0


def test_pattern_takes_the_last_match_and_no_match_is_no_answer() -> None:
    texts = ["Answer: x. Answer: Rome", "Rome", "Answer: Oslo"]
    assert ExactMatch(pattern=r"Answer: (\w+)")(texts, answer=["Rome"] * 3) == [1.0, 0.0, 0.0]
    assert extract("a1 b22", r"\d+") == "22"
    assert ExactMatch(pattern=r"\d+")(["none here"], answer=[""]) == [0.0]


def test_fuzzy_match_is_rapidfuzz_on_normalised_text() -> None:
    reward = get_reward("fuzzy_match")
    reward.prepare(CPU)
    # "abcd" and "abxd": one deletion and one insertion in 8 characters
    assert reward(["The ABCD!", "abcd", "q"], answer=["abcd", "abxd", ["z", "q"]]) == pytest.approx([1.0, 0.75, 1.0])
    strict = get_reward("fuzzy_match", threshold=0.76)
    strict.prepare(CPU)
    assert strict(["abcd", "abcd"], answer=["abxd", "abcd"]) == [0.0, 1.0]
    exact = get_reward("fuzzy_match", threshold=0.75)
    exact.prepare(CPU)
    assert exact(["abcd"], answer=["abxd"]) == [1.0]
    sorted_words = get_reward("fuzzy_match", measure="token_sort_ratio")
    sorted_words.prepare(CPU)
    assert sorted_words(["b c x"], answer=["x c b"]) == [1.0]


def test_a_bad_pattern_is_one_line() -> None:
    with pytest.raises(KvrlError, match=r"reward\.funcs\.f1\.params\.pattern: \( is no regular expression"):
        get_reward("f1", pattern="(")
