"""HotpotQA (arXiv 1809.09600): questions over several paragraphs, distractors among them, scored by word F1.

question, answer   texts
context            the paragraphs: {title: [...], sentences: [[...], ...]}, or pairs [title, [sentence, ...]]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from kvrl.errors import KvrlError
from kvrl.rewards.match import F1, ExactMatch
from kvrl.tasks import Prompt
from kvrl.tasks.answers import INSTRUCTIONS, extract_answer, format_answer
from kvrl.tasks.files import Hub, TemplatedTask, draw, require_text

SCORERS = {"f1": F1(), "exact_match": ExactMatch()}


class HotpotQA(TemplatedTask):
    """The task. The answer is what follows the last "Answer:" of a completion."""

    name: ClassVar[str] = "hotpotqa"
    hub: ClassVar[Hub | None] = Hub("hotpotqa/hotpot_qa", "distractor", "train", "validation")
    needs: ClassVar[tuple[str, ...]] = ("question", "answer", "context")
    placeholders: ClassVar[tuple[str, ...]] = ("context", "question")

    template: str = "{context}\n\nQuestion: {question}\n" + INSTRUCTIONS["marker"]
    """The user's message; {context} stands for the paragraphs, {question} for the question."""
    metric: Literal["f1", "exact_match"] = "f1"
    """The reward: overlap of words with the right answer, or equality, both after the usual normalisation."""

    def row(self, record: dict[str, Any], where: str) -> dict[str, Any]:
        """prompt and answer."""
        question, answer = require_text(record, ("question", "answer"), where)
        paragraphs = [f"{title}\n{''.join(sentences).strip()}" for title, sentences in _pairs(record["context"], where)]
        return {"prompt": self.prompt(context="\n\n".join(paragraphs), question=question), "answer": answer}

    def reward(self, completions: list[str], answer: list[str], **_: list) -> list[float | None]:
        """The metric of each completion's answer, 0 to 1; 0 where there is none."""
        given = [extract_answer(text, "marker") or "" for text in completions]
        return [*SCORERS[self.metric](given, answer=answer)]

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` train questions with the right answer alone: the data has no worked steps."""
        return [(row["prompt"], format_answer(row["answer"], "marker")) for row in draw(self.train_rows, n, seed)]


def _pairs(context: Any, where: str) -> list[tuple[str, list[str]]]:
    """(title, sentences) of each paragraph: the hub keeps two lists, the original files a list of pairs."""
    if isinstance(context, Mapping) and all(isinstance(context.get(part), list) for part in ("title", "sentences")):
        titles, sentences = context["title"], context["sentences"]
        if len(titles) != len(sentences):
            raise KvrlError(
                f"{where}: context has {len(titles)} titles and {len(sentences)} lists of sentences; give as many"
            )
        pairs = list(zip(titles, sentences, strict=True))
    elif isinstance(context, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in context):
        pairs = [(title, sentences) for title, sentences in context]
    else:
        raise KvrlError(
            f"{where}: context is a {type(context).__name__}; give title and sentences, each a list, or pairs of them"
        )
    for title, sentences in pairs:
        if not (isinstance(title, str) and isinstance(sentences, list) and all(isinstance(s, str) for s in sentences)):
            raise KvrlError(f"{where}: context has {title!r} with {sentences!r}; give a title and a list of sentences")
    return pairs
