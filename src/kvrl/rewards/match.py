"""Short answers against gold ones, as in question answering: exact, fuzzy and by shared words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr, field_validator

from kvrl.errors import KvrlError
from kvrl.rewards.base import Reward, require
from kvrl.rewards.call import BadReward

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class _Match(Reward):
    """A comparison of the completion's answer with one or several gold answers, of which the best counts.

    A gold text is compared in normal form; one of which nothing is left there (`A`, `the`) keeps its articles, and one
    of punctuation alone that too. A gold number is compared as one: 1 if the answer, without a dollar sign, thousands
    commas and a last full stop, is equal, else 0. A null, or an empty list, is an error.
    """

    column: str = "answer"
    """Column of the gold answer: a text or number, or a list of them."""
    pattern: str | None = None
    """Regular expression whose last match in the completion, or its first group, is the answer. None: all of it."""
    normalize: bool = True
    """Compare without case, punctuation and articles, as SQuAD's evaluation does. False: only stripped."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise KvrlError(f"reward.funcs.{cls.name}.params.pattern: {value} is no regular expression ({error}); "
                            "correct it") from None  # fmt: skip
        return value

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def compare(self, answer: str, gold: str) -> float:
        """From 0 to 1, for two texts in their final form."""
        raise NotImplementedError

    def __call__(self, completions: list[str], **columns: list) -> list:
        rewards: list[float | BadReward] = []
        for text, gold in zip(completions, columns[self.column], strict=True):
            golds, answer = golds_of(gold), extract(text, self.pattern)
            if not golds:
                rewards.append(unreadable(gold))
            else:
                rewards.append(0.0 if answer is None else max(self._against(answer, one) for one in golds))
        return rewards

    def _against(self, answer: str, gold: Any) -> float:
        if isinstance(gold, int | float) and not isinstance(gold, bool):
            return float(number(answer) == gold)
        gold = str(gold)
        forms = FORMS if self.normalize else [str.strip]
        form = next((form for form in forms if form(gold)), str.strip)
        return self.compare(form(answer), form(gold))


class ExactMatch(_Match):
    """1 if the answer is a gold answer, else 0."""

    name: ClassVar[str] = "exact_match"

    def compare(self, answer: str, gold: str) -> float:
        return float(answer == gold)


class F1(_Match):
    """F1 of the words that the answer shares with the gold answer (SQuAD, Rajpurkar et al., 2016, section 6.1)."""

    name: ClassVar[str] = "f1"

    def compare(self, answer: str, gold: str) -> float:
        return word_f1(answer.split(), gold.split())


class FuzzyMatch(_Match):
    """Similarity of the answer to the gold answer, from 0 to 1 (rapidfuzz)."""

    name: ClassVar[str] = "fuzzy_match"

    measure: Literal["ratio", "partial_ratio", "token_sort_ratio", "token_set_ratio", "WRatio"] = "ratio"
    """Function of rapidfuzz.fuzz; `ratio` is 1 - insertions and deletions / length of both."""
    threshold: float | None = Field(None, gt=0, le=1)
    """Similarity from which on the reward is 1, and 0 below. None: the similarity itself."""

    _ratio: Any = PrivateAttr(None)

    def prepare(self, device: torch.device) -> None:
        self._ratio = getattr(require("rapidfuzz.fuzz", "rewards", self.name), self.measure)

    def compare(self, answer: str, gold: str) -> float:
        similarity = self._ratio(answer, gold) / 100
        return similarity if self.threshold is None else float(similarity >= self.threshold)


def golds_of(gold: Any) -> list:
    """The gold answers of a sample; none if it is null, or if there is a null among several."""
    golds = gold if isinstance(gold, list) else [gold]
    return [] if any(one is None or one != one for one in golds) else golds  # NaN is pandas' null


def unreadable(gold: Any) -> BadReward:
    """The error for a sample without a gold answer."""
    return BadReward(f"cannot read the gold answer {gold!r}")


def extract(text: str, pattern: str | None) -> str | None:
    """The last match of the pattern in the text, its first group if it has one; None if there is no match."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces (SQuAD's evaluation script)."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def with_articles(text: str) -> str:
    """Lower case, no punctuation, single spaces."""
    return " ".join(text.lower().translate(PUNCTUATION).split())


FORMS: tuple[Callable[[str], str], ...] = (normalize, with_articles, str.strip)  # the first that leaves anything


def number(text: str) -> float | None:
    """The number that a text is, without a dollar sign, thousands commas and a last full stop; None if it is none."""
    text = THOUSANDS.sub("", text.strip().removesuffix(".").removeprefix("$"))
    for kind in (int, float):  # an int in full: a float of it rounds
        with suppress(ValueError):
            return kind(text)
    return None


def word_f1(answer: list[str], gold: list[str]) -> float:
    """Harmonic mean of precision and recall of the words, counted with repetition; two empty lists are equal."""
    if not answer or not gold:
        return float(answer == gold)
    same = sum((Counter(answer) & Counter(gold)).values())
    return 2 * same / (len(answer) + len(gold))
