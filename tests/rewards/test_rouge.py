from __future__ import annotations

import pytest
import torch

from kvrl.rewards import get_reward


def rouge_l(texts: list[str], references: list, **params: object) -> list[float]:
    reward = get_reward("rouge_l", **params)
    reward.prepare(torch.device("cpu"))
    return reward(texts, **{reward.columns[0]: references})


def test_f_measure_of_the_longest_common_subsequence() -> None:
    # "the x cat y sat" has "the cat sat" in order: precision 3/5, recall 3/4 of "the cat sat down"
    assert rouge_l(["the x cat y sat"], ["the cat sat down"]) == [pytest.approx(2 * 0.6 * 0.75 / (0.6 + 0.75))]
    assert rouge_l(["sat cat the"], ["the cat sat"]) == [pytest.approx(1 / 3)]
    assert rouge_l(["", "no"], ["the cat", "yes"]) == [0.0, 0.0]


def test_stemmer_references_and_column() -> None:
    assert rouge_l(["dogs running"], ["dog runs"]) == [1.0]
    assert rouge_l(["dogs running"], ["dog runs"], stemmer=False) == [0.0]
    assert rouge_l(["the dog"], [["a cat", "the dog", "the dog barked"]], column="answer") == [1.0]
