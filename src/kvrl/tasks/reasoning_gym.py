"""Problems of the reasoning-gym library in its own wording, scored by its own scorer.

prompt       chat messages: the system message if one is set, then the question and the instruction
completion   free text that ends with the answer in the asked form
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError
from kvrl.tasks import Prompt
from kvrl.tasks.answers import INSTRUCTIONS, AnswerFormat, extract_answer, format_answer
from kvrl.tasks.splits import stream, take

HELD_OUT_SHARE = 1 / 4  # of all questions, by a hash of their text
DRAWS_PER_ROW = 16


class ReasoningGym(BaseModel):
    """The task.

    Splits: each is drawn from its own random stream, and a question belongs to one of them by a hash of its
    text, so that none occurs in both, whatever the seeds. Eval questions are distinct; train questions come
    as the library draws them. (A few of its data sets order sets of strings: for these, set PYTHONHASHSEED.)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str] = "reasoning_gym"

    dataset: str = "chain_sum"
    """The library's name of the data set."""
    config: dict[str, Any] = {}
    """Fields of the data set's own configuration, `seed` and `size` aside."""
    seed_offset: int = 0
    """Added to every seed: other problems under the same seeds."""
    system: str | None = None
    """The system message. None: none is given, and the model's chat template may add its own."""
    instruction: str | None = None
    """The line after the question. None: the one that asks for `answer_format`; empty: no line."""
    answer_format: AnswerFormat = "marker"
    """Where the answer is: after the last "Answer:", between the last <answer> tags, or the last line."""
    mistake_rate: float = Field(0.0, ge=0, lt=1)
    """Share of wrong steps in the demonstrations. A wrong result goes on into the steps after it."""

    @model_validator(mode="after")
    def _known_dataset(self) -> ReasoningGym:
        kinds = library().factory.DATASETS
        if self.dataset not in kinds:
            near = _nearest(self.dataset, kinds)
            remedy = f"did you mean {' or '.join(near)}?" if near else "see reasoning_gym.factory.DATASETS"
            raise KvrlError(f"task.params.dataset: {self.dataset} is none of the library's; {remedy}")
        fields = {field.name for field in dataclasses.fields(kinds[self.dataset][1])} - {"seed", "size"}
        for key in self.config:
            if key not in fields:
                known = ", ".join(sorted(fields))
                raise KvrlError(f"task.params.config.{key}: {self.dataset} has no such field; use {known}")
        try:
            self._create(seed=0, size=1)
        except (AssertionError, TypeError, ValueError) as error:  # how the library's own checks end
            raise KvrlError(f"task.params.config: {self.config} is refused ({error}); change it") from error
        return self

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` rows: prompt (chat messages), answer, and entry, the library's record that its scorer reads."""
        return [
            {"prompt": self._prompt(entry), "answer": entry["answer"], "entry": entry}
            for entry in self._entries(split, n, seed)
        ]

    def reward(self, completions: list[str], entry: list[dict], **_: list) -> list[float | None]:
        """The library's score, 0 to 1, of each completion's extracted answer (None where there is none)."""
        return [self._score(text, record) for text, record in zip(completions, entry, strict=True)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` train problems with worked traces. Errors: KvrlError where the data set has none."""
        if self.dataset not in TRACES:
            raise KvrlError(
                f"warm_start: data set {self.dataset} has no worked traces ({', '.join(TRACES)} have); "
                "leave warm_start out"
            )
        rng = random.Random(f"{seed}-demonstrations")
        pairs: list[tuple[Prompt, str]] = []
        for entry in self._entries("train", n, seed):
            worked, answer = TRACES[self.dataset](entry, self.mistake_rate, rng)
            pairs.append((self._prompt(entry), f"{worked}\n{format_answer(answer, self.answer_format)}"))
        return pairs

    def _create(self, seed: int, size: int) -> Any:
        return library().create_dataset(self.dataset, seed=seed, size=size, **self.config)

    @cached_property
    def _scorer(self) -> Callable[[str | None, dict], float]:
        return self._create(seed=0, size=1).score_answer

    def _score(self, completion: str, entry: dict[str, Any]) -> float:
        try:
            return float(self._scorer(extract_answer(completion, self.answer_format), entry))
        except Exception:  # foreign code: some scorers raise anything on text that they do not expect a model to write
            return 0.0

    def _prompt(self, entry: dict[str, Any]) -> Prompt:
        asked = INSTRUCTIONS[self.answer_format] if self.instruction is None else self.instruction
        user = f"{entry['question']}\n{asked}" if asked else entry["question"]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": user}]

    def _entries(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        # The library seeds item i with seed + i: neighbouring seeds would give almost the same items.
        limit = DRAWS_PER_ROW * n + 64
        dataset = self._create(stream(split, seed + self.seed_offset), limit)
        draws = (dataset[index] for index in range(limit))
        return take(
            split, n, draws, itemgetter("question"), limit=limit, share=HELD_OUT_SHARE,
            remedy="lower it or widen task.params.config",
        )  # fmt: skip


def trace_chain_sum(entry: dict[str, Any], mistake_rate: float, rng: random.Random) -> tuple[str, str]:
    """`5 + 8 - 3 + 2` worked as lines `= 13 - 3 + 2`, `= 10 + 2`, `= 12`; and the result.

    Each line repeats what is left, so a step needs the line before it alone. A wrong step is off by 1 or 10.
    """
    first, *rest = entry["metadata"]["expression"].split(" ")
    total, lines = int(first), []
    while rest:
        operator, term, *rest = rest
        total += int(term) if operator == "+" else -int(term)
        if rng.random() < mistake_rate:
            total += rng.choice([-10, -1, 1, 10])
        lines.append(" ".join(["=", str(total), *rest]))
    return "\n".join(lines), str(total)


# data set -> (entry, mistake rate, random stream) -> (worked steps, the answer they come to)
TRACES: dict[str, Callable[[dict[str, Any], float, random.Random], tuple[str, str]]] = {
    "chain_sum": trace_chain_sum,
}


def _nearest(name: str, known: Iterable[str], n: int = 3) -> list[str]:
    """At most `n` names that are spelled alike or share a word: `sudoko` and `arithmetic` both have some."""
    known = sorted(known)
    words = set(name.lower().replace("-", "_").split("_"))
    sharing = [other for other in known if words & set(other.split("_"))]
    return list(dict.fromkeys([*difflib.get_close_matches(name, known, n=n), *sharing]))[:n]


def library(task: str = ReasoningGym.name) -> Any:
    """The module `reasoning_gym`, for a task of that name. Errors: KvrlError where it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise KvrlError(
            f"task.name: {task} needs the package reasoning-gym; run pip install -e '.[tasks]' in kvrl's folder"
        ) from error
    return reasoning_gym
