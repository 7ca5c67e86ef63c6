"""Preferences as rewards: by hand, with a judge that likes long texts."""

from __future__ import annotations

import pytest

from kvrl.rewards.pairs import Preferences


class Longer:
    """Prefers the longer text; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def prefer(self, prompts, firsts, seconds, /, **columns):
        self.asked = list(zip(prompts, firsts, seconds, columns["hint"], strict=True))
        return [0.5 if len(a) == len(b) else float(len(a) > len(b)) for a, b in zip(firsts, seconds, strict=True)]


def test_each_is_compared_with_the_others_of_its_prompt():
    judge = Longer()
    scores = Preferences(judge, 3)(
        ["a", "aaa", "aa", "b", "b", "bb"], {"prompt": ["p"] * 3 + ["q"] * 3, "hint": [1, 2, 3, 4, 5, 6]}
    )
    assert scores.rewards.tolist() == pytest.approx([0, 1, 0.5, 0.25, 0.25, 1])
    assert judge.asked == [("p", "a", "aaa", 1), ("p", "a", "aa", 1), ("p", "aaa", "aa", 2),
                           ("q", "b", "b", 4), ("q", "b", "bb", 4), ("q", "b", "bb", 5)]  # fmt: skip
    assert scores.metrics() == pytest.approx({"reward": 0.5, "rewards/judge/mean": 0.5, "reward_errors": 0.0})


def test_two_completions_have_the_verdict_itself():
    columns = {"prompt": ["p", "p"], "hint": [0, 0], "seconds": [1, 2]}  # a column may have any name
    assert Preferences(Longer(), 2)(["a", "aa"], columns).rewards.tolist() == [0, 1]
