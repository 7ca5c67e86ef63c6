"""What the engine keeps of a completion while it is being sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvrl.beacons.plan import Beacons
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
    beacons: Beacons | None = None
    fed_beacons: int = 0
    """Beacons that were forwarded."""
    held: int = 0
    """KV entries under beacons: of the prompt, of beacons, of the open window."""
    most_held: int = 0
    seen: int = 0
    """KV entries that the decode steps attended to, summed up over `steps` of them."""
    steps: int = 0

    @property
    def raw(self) -> int:
        """Tokens of the completion that were forwarded."""
        return self.forwarded - len(self.prompt_ids) - self.fed_beacons

    @property
    def beacon_is_due(self) -> bool:
        """Whether a window has closed whose beacon was not fed yet: it goes before the token sampled last."""
        return self.beacons is not None and self.beacons.closed(self.raw) > self.fed_beacons

    def next_fed(self) -> tuple[int, int]:
        """Token id and position of what the next decode step forwards."""
        if self.beacons is None:
            return self.completion_ids[-1], self.forwarded
        due, shared = self.beacon_is_due, self.beacons.positions == "shared"
        position = self.forwarded - (self.fed_beacons + due if shared else 0)
        return self.beacons.token_id if due else self.completion_ids[-1], position

    def count(self, entries: int) -> None:
        """Note a decode step that attended to so many entries."""
        self.seen += entries
        self.steps += 1
        self.most_held = max(self.most_held, entries)


@dataclass
class Prompt:
    """A prompt and the members of its group that wait for a slot."""

    ids: list[int]
    index: int
    waiting: deque[Request]
