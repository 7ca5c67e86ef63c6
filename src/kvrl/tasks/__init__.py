"""What is trained on: problems with a scorer, and worked solutions where the task has them.

One task is one file with a class of the shape of `Task`, whose parameters are pydantic fields, and one line
in `TASKS`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from jinja2 import TemplateError
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from kvrl.errors import KvrlError
from kvrl.sampler.types import Rollout
from kvrl.train.config_file import explain

Prompt = str | list[dict[str, str]]

# name -> module:class, imported when asked for: a task may need an extra that is not installed
TASKS = {
    "recurrence": "kvrl.tasks.recurrence:Recurrence",
    "countdown": "kvrl.tasks.countdown:Countdown",
    "star_graph": "kvrl.tasks.star_graph:StarGraph",
    "linsys": "kvrl.tasks.linsys:LinSys",
    "jsonl": "kvrl.tasks.jsonl:JsonLines",
    "reasoning_gym": "kvrl.tasks.reasoning_gym:ReasoningGym",
    "gsm8k": "kvrl.tasks.gsm8k:Gsm8k",
    "math": "kvrl.tasks.math:Math",
    "mawps": "kvrl.tasks.word_problems:Mawps",
    "svamp": "kvrl.tasks.word_problems:Svamp",
    "tldr": "kvrl.tasks.summaries:Tldr",
    "govreport": "kvrl.tasks.summaries:GovReport",
    "hotpotqa": "kvrl.tasks.hotpotqa:HotpotQA",
}


class Task(Protocol):
    """Problems, their scorer and their worked solutions."""

    @property
    def name(self) -> str:
        """Its name in the registry."""

    def rows(self, split: str, n: int, seed: int) -> list[dict[str, Any]]:
        """`n` problems of split `train` or `eval`, which never overlap: `prompt` and the reward's columns."""

    @property
    def reward(self) -> Callable[..., list[float | None]] | None:
        """A method `reward(completions, **columns)`: one for each completion, from the rows' columns as lists.

        It names the columns that it needs. None in the list drops the sample. None for the method: the rows hold
        nothing to score by, and the reward section's functions score held-out completions too.
        """

    def demonstrations(self, n: int, seed: int) -> list[tuple[Prompt, str]]:
        """`n` pairs of prompt and completion text (without EOS). Errors: KvrlError if the task has none."""


def get_task(name: str, **params: Any) -> Task:
    """The task of that name. Errors: KvrlError for an unknown name or parameter, or a refused value."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        remedy = f"did you mean {near[0]}?" if near else "choose one of them"
        raise KvrlError(f"task.name: {name} is not one of {', '.join(TASKS)}; {remedy}")
    kind = _class(name)
    known = inspect.signature(kind).parameters
    for param in params:
        if param not in known:
            raise KvrlError(f"task.params.{param}: task {name} has no such parameter; it has {', '.join(known)}")
    required = [key for key, value in known.items() if value.default is inspect.Parameter.empty]
    for param in required:
        if param not in params:
            raise KvrlError(f"task.params.{param}: is missing and task {name} needs it; set it")
    try:
        return kind(**params)
    except ValidationError as error:
        raise KvrlError(explain(error, kind, prefix="task.params.")) from None


def parameters_of(name: str) -> list[str]:
    """The parameters that the task of that name has."""
    return list(inspect.signature(_class(name)).parameters)


def _class(name: str) -> Any:
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: text as it is, chat messages through the tokenizer's template, reply opened.

    Errors: KvrlError for chat messages where the tokenizer has no template, or one that refuses them.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise KvrlError(
            f"prompt: a list of {len(prompt)} chat messages, and the model's tokenizer has no chat template; "
            "write the prompt as text, or give a model whose tokenizer has a template"
        )
    try:
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    except TemplateError as error:  # what a template raises itself, such as for a role that it does not know
        roles = ", ".join(message["role"] for message in prompt)
        raise KvrlError(
            f"prompt: chat messages ({roles}) are refused by the model's chat template "
            f"({' '.join(str(error).split())}); change them, or give a model with another template"
        ) from None


def completion_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """What a reward reads: the completion without the EOS that ended it; other special tokens stay in the text."""
    ended = rollout.finish_reason == "eos"
    return tokenizer.decode(rollout.completion_ids[:-1] if ended else rollout.completion_ids)
