"""What the engine keeps of a completion while it is being sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvrl.sampler.types import FinishReason

Continue = Callable[["Request"], Sequence[int] | None]
"""Called when a completion ends by EOS or stop string: ids to insert (a tool's answer, a user's turn), or None.

Ids that leave no room for another sampled token end the completion with finish_reason `length`."""


class Progress(NamedTuple):
    """Where a run stands after a decode step."""

    steps: int
    active: int
    """Completions that took part in it."""
    waiting: int
    """Completions that wait for a slot."""
    done: int
    """Completions that have ended."""
    total: int
    """Completions of the run."""
    tokens: int
    """Tokens drawn by all decode steps so far; the first one of a completion comes from its prompt."""


@dataclass
class Request:
    """One completion being sampled. `forwarded` counts the tokens whose K and V exist."""

    prompt_ids: list[int]
    prompt_index: int
    sample_index: int
    stream: int
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    support: list[Tensor] = field(default_factory=list)
    routing: list[Tensor] = field(default_factory=list)
    forwarded: int = 0
    finish_reason: FinishReason | None = None


@dataclass
class Prompt:
    """A prompt and the members of its group that wait for a slot."""

    ids: list[int]
    index: int
    waiting: deque[Request]
