"""A language model as the judge, behind an OpenAI-compatible endpoint: marks, or the better of two completions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from kvrl.errors import KvrlError
from kvrl.rewards.background import start_async
from kvrl.rewards.base import Reward, require
from kvrl.rewards.call import BadReward
from kvrl.rewards.judge_client import Client, Server, excerpt

SCALAR = """Mark the reply to a request.

[Request]
{prompt}

[Reply]
{completion}

Consider whether the reply does what the request asks, and whether what it says is right. Answer with one number from
{low} (useless) to {high} (perfect), and nothing else."""

PAIRWISE = """Compare two replies to a request.

[Request]
{prompt}

[Reply A]
{first}

[Reply B]
{second}

Which reply does better what the request asks, and is right in what it says? Answer with A, B or tie, and nothing
else."""

FIELDS = {"scalar": ("completion",), "pairwise": ("first", "second")}
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
VERDICT = re.compile(r"\b(?:A|B|[Tt]ie|TIE)\b")
PREFERENCE = {"a": 1.0, "b": 0.0, "tie": 0.5}


class Judge(Reward):
    """Marks completions (`scalar`, the mark on the scale from 0 to 1), or says which of two is better (`pairwise`).

    Replies are kept on disk by model, messages and sampling, so that nothing is asked twice, by this run or another.
    An error of the server, after the client's own retries, stops the run with a KvrlError whatever on_error says.
    """

    name: ClassVar[str] = "judge"

    base_url: str
    """The endpoint, up to and with /v1."""
    model: str
    """The model's name there."""
    api_key_env: str | None = None
    """Environment variable that holds the key. None: the server wants none."""
    mode: Literal["scalar", "pairwise"] = "scalar"
    """`pairwise` gives preferences, not rewards: it is for algorithm online_dpo."""
    template: str | None = None
    """What is asked, with {completion}, or {first} and {second}; {prompt} and any column. None: a plain question."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best mark of the scalar mode, {low} and {high} in the template."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 512}
    """Further fields of the request."""
    on_unreadable: Literal["stop", "tie"] = "stop"
    """A verdict of the pairwise mode that cannot be read: it stops the run, or is a tie. (A mark: reward.on_error.)"""
    concurrency: int = Field(8, ge=1)
    """Requests under way at once."""
    max_retries: int = Field(4, ge=0)
    """Times that the client asks again, waiting longer each time, when the server fails or is busy."""
    request_timeout: float = Field(120.0, gt=0)
    """Seconds that one request may take."""
    cache: str | None = None
    """File that keeps the replies. None: judge.sqlite in the user's cache folder of kvrl."""

    @model_validator(mode="after")
    def _template_and_scale(self) -> Judge:
        params = "reward.funcs.judge.params"
        for field in FIELDS[self.mode]:
            if field not in FIELD.findall(self.question):
                raise KvrlError(f"{params}.template: has no {{{field}}}, which mode {self.mode} asks about; add it")
        if self.scale[0] >= self.scale[1]:
            raise KvrlError(
                f"{params}.scale: {self.scale[0]:g} is not below {self.scale[1]:g}; give worst and best mark"
            )
        return self

    @property
    def question(self) -> str:
        """The template in use."""
        return self.template or (SCALAR if self.mode == "scalar" else PAIRWISE)

    @property
    def columns(self) -> tuple[str, ...]:
        own = {*FIELDS[self.mode], "low", "high"}
        named = [field for field in FIELD.findall(self.question) if field not in own]
        return tuple("prompts" if field == "prompt" else field for field in named)

    @cached_property
    def client(self) -> Client:
        """The server and what it has said so far."""
        cache = Path(self.cache).expanduser() if self.cache else default_cache()
        key = os.environ.get(self.api_key_env) if self.api_key_env else "none"
        if key is None:
            raise KvrlError(f"reward.funcs.judge.params.api_key_env: {self.api_key_env} is not set in the environment; "
                            "export it")  # fmt: skip
        if not re.fullmatch(r"[!-~]+", key):  # what a header can carry
            raise KvrlError(f"reward.funcs.judge.params.api_key_env: {self.api_key_env} is empty, or has spaces, line "
                            "breaks or other than ASCII characters; export the key alone")  # fmt: skip
        server = Server(self.base_url, key, self.concurrency, self.max_retries, self.request_timeout)
        return Client(server, self.model, self.sampling, cache)

    def prepare(self, device: torch.device) -> None:
        require("openai", "judge", self.name)
        start_async(self.client.ping(), None).result()

    async def __call__(self, completions: list[str], **columns: list) -> list[float | BadReward]:
        low, high = self.scale
        columns = {"prompt" if name == "prompts" else name: values for name, values in columns.items()}
        questions = [
            fill(self.question, {name: values[i] for name, values in columns.items()}
                 | {"completion": text, "low": f"{low:g}", "high": f"{high:g}"})
            for i, text in enumerate(completions)
        ]  # fmt: skip
        replies = await self.client.ask(questions)
        return [reply if isinstance(reply, BadReward) else read_mark(reply, low, high) for reply in replies]

    def prefer(
        self, prompts: Sequence, firsts: Sequence[str], seconds: Sequence[str], /, **columns: Sequence
    ) -> list[float]:
        """For each pair 1 if the first is better, 0 if the second is, 0.5 for a tie. columns: what the template names.

        Each pair is asked in both orders, which cancels the judge's liking for a place: two verdicts that disagree
        are a tie. Errors: KvrlError for a server that fails, and for a verdict that cannot be read.
        """
        questions = []
        for i, (prompt, first, second) in enumerate(zip(prompts, firsts, seconds, strict=True)):
            row = {name: values[i] for name, values in columns.items()} | {"prompt": prompt}
            for a, b in ((first, second), (second, first)):
                questions.append(fill(self.question, row | {"first": a, "second": b}))
        replies = start_async(self.client.ask(questions), None).result()
        verdicts = [self._verdict(reply) for reply in replies]
        return [settle(verdicts[i], verdicts[i + 1]) for i in range(0, len(verdicts), 2)]

    def _verdict(self, reply: str | BadReward) -> float:
        verdict = None if isinstance(reply, BadReward) else read_verdict(reply)
        if verdict is None and self.on_unreadable == "stop":
            if isinstance(reply, BadReward):
                raise KvrlError(f"reward.funcs.judge: {reply}, or set params.on_unreadable to tie")
            raise KvrlError(
                f"reward.funcs.judge: replied {excerpt(reply)}, which is not A, B or tie; write a template that asks "
                "for one of them, or set params.on_unreadable to tie"
            )
        return 0.5 if verdict is None else verdict


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with each {name} replaced once; chat messages become lines of `role: content`."""
    return FIELD.sub(lambda match: _as_text(values[match[1]]) if match[1] in values else match[0], template)


def read_mark(reply: str, low: float, high: float) -> float | BadReward:
    """The first number of the reply's answer, on the scale from 0 to 1."""
    number = NUMBER.search(answer_part(reply))
    if number is None or not low <= float(number[0]) <= high:
        return BadReward(f"replied {excerpt(reply)}, in which the mark is no number from {low:g} to {high:g},")
    return (float(number[0]) - low) / (high - low)


def read_verdict(reply: str) -> float | None:
    """1 for A, 0 for B, 0.5 for tie; None if the reply's answer names none of them, or several."""
    named = {PREFERENCE[word.lower()] for word in VERDICT.findall(answer_part(reply))}
    return named.pop() if len(named) == 1 else None


def settle(forward: float, backward: float) -> float:
    """The preference for the first, from the verdicts in both orders (each for its own A); disagreement is a tie."""
    return forward if forward == 1 - backward else 0.5


def answer_part(reply: str) -> str:
    """What follows a reasoning model's thoughts; nothing if they did not end."""
    answer = reply.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def default_cache() -> Path:
    """judge.sqlite in `$XDG_CACHE_HOME/kvrl` (`~/.cache/kvrl`)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrl" / "judge.sqlite"


def _as_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return str(value)
