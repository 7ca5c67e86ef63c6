"""KVTrace: the lifetime of every KV entry of one sequence.

    visible(layer, kv_head, q, k)  =  k <= q < evicted_at[layer, kv_head, k]

An entry stores the index of the eviction that removed it; the evictions' positions are stored once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from os import PathLike

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvrl.errors import KvrlError

NEVER = torch.iinfo(torch.int32).max
"""`evicted_at` of an entry that stays."""


def event_dtype(num_events: int) -> torch.dtype:
    """int16, or int32 where a sequence has more evictions than int16 counts (buffer 1, long sequences)."""
    return torch.int16 if num_events <= torch.iinfo(torch.int16).max else torch.int32


def num_events(tokens: int, budget: int, buffer: int) -> int:
    """Evictions that `tokens` forwarded tokens cause: at budget + buffer, then every `buffer` (contract 1)."""
    over = tokens - (budget + buffer)
    return 0 if over < 0 else over // buffer + 1


def occupancy(tokens: int, budget: int, buffer: int) -> int:
    """Entries that a sequence holds after `tokens` forwarded tokens and the compaction that may follow."""
    over = tokens - (budget + buffer)
    return tokens if over < 0 else budget + over % buffer


@dataclass(frozen=True, eq=False)
class KVTrace:
    """Which KV entries one sequence lost, and when.

    events:     int16 [layers, kv_heads, tokens], the eviction that removed the entry, -1 if it stays
                (int32 beyond 32,767 evictions).
    evicted_at_event: int32 [num_events], the first query position that no longer sees what the eviction took.
    budget, buffer: the schedule that the sampler ran, 0 and 0 for a full cache.
    windows:    int32 [layers], every layer's sliding window, 0 for full attention; None: not recorded.
    """

    events: Tensor
    evicted_at_event: Tensor
    budget: int = 0
    buffer: int = 0
    windows: Tensor | None = None

    @classmethod
    def dense(cls, layers: int, kv_heads: int, tokens: int) -> KVTrace:
        """The trace of a full cache: nothing is ever evicted."""
        return cls(torch.full((layers, kv_heads, tokens), -1, dtype=torch.int16), torch.empty(0, dtype=torch.int32))

    @property
    def num_tokens(self) -> int:
        return self.events.shape[-1]

    @property
    def num_events(self) -> int:
        return len(self.evicted_at_event)

    @property
    def capacity(self) -> int:
        """Entries that a slot of the sampler held at most."""
        return self.budget + self.buffer

    @property
    def nbytes(self) -> int:
        return self.events.nbytes + self.evicted_at_event.nbytes

    @property
    def managed(self) -> Tensor:
        """bool [layers]: whether the policy evicted from the layer; a window that fits into a slot is a ring."""
        if self.windows is None:
            return (self.events >= 0).any(dim=-1).any(dim=-1)
        return (self.windows == 0) | (self.windows > self.capacity)

    def evicted_at(self) -> Tensor:
        """int32 [layers, kv_heads, tokens]: the first query that does not see the entry, NEVER if it stays."""
        table = torch.cat([self.evicted_at_event, self.evicted_at_event.new_tensor([NEVER])])  # -1 reads the last
        return table[self.events.long()]

    def validate(self) -> KVTrace:
        """Raise KvrlError unless every entry is evicted after it exists, by an eviction that keeps to the schedule."""
        return self._validated

    @functools.cached_property
    def _validated(self) -> KVTrace:
        if self.events.ndim != 3:
            raise KvrlError(
                f"trace.events: {self.events.ndim} dimensions, but [layers, kv_heads, tokens] has 3; "
                "record one trace for each sequence"
            )
        for name, kinds in (("events", (torch.int16, torch.int32)), ("evicted_at_event", (torch.int32,))):
            if (kind := getattr(self, name).dtype) not in kinds:
                raise KvrlError(f"trace.{name}: is {kind}, not {' or '.join(map(str, kinds))}; keep what was recorded")
        if self.events.numel() and (self.events.min() < -1 or self.events.max() >= self.num_events):
            raise KvrlError(
                f"trace.events: values from {int(self.events.min())} to {int(self.events.max())}, but the trace "
                f"has {self.num_events} evictions (-1 is never); it was cut or mixed with another sequence's"
            )
        if self.num_events > 1 and not bool((self.evicted_at_event.diff() > 0).all()):
            raise KvrlError("trace.evicted_at_event: positions must grow; it was cut or mixed with another sequence's")
        if self.windows is not None and (
            self.windows.shape != self.events.shape[:1] or self.windows.is_floating_point() or self.windows.min() < 0
        ):
            raise KvrlError(f"trace.windows: {self.windows.tolist()} is not one window, or 0, for each layer")
        if bool((self.evicted_at() <= torch.arange(self.num_tokens, device=self.events.device)).any()):
            raise KvrlError("trace.events: an entry is evicted before its own query; the trace belongs to other tokens")
        if (self.budget, self.buffer) != (0, 0):
            self._check_schedule()
        return self

    def _check_schedule(self) -> None:
        """KvrlError unless evictions are those of budget and buffer, each with `buffer` entries of every head."""
        budget, buffer = self.budget, self.buffer
        if budget < 0 or buffer < 1:
            raise KvrlError(f"trace.budget: {budget}, with buffer {buffer}, is no schedule; keep what was recorded")
        if num_events(self.num_tokens - 1, budget, buffer) != self.num_events:
            raise KvrlError(
                f"trace: {self.num_events} evictions in {self.num_tokens} tokens, but budget {budget}, buffer {buffer} "
                f"make {num_events(self.num_tokens - 1, budget, buffer)}; it was cut or belongs to other tokens"
            )
        expected = budget + buffer + buffer * torch.arange(self.num_events, dtype=torch.int32)
        if not torch.equal(self.evicted_at_event.cpu(), expected):
            raise KvrlError(
                f"trace.evicted_at_event: evictions are not every {buffer} tokens after {budget + buffer}; "
                "it was changed after it was recorded"
            )
        layers, heads, _ = self.events.shape
        taken = torch.zeros(layers, heads, self.num_events + 1, dtype=torch.int32, device=self.events.device)
        taken.scatter_add_(2, self.events.long() + 1, torch.ones_like(self.events, dtype=torch.int32))
        due = torch.where(self.managed, buffer, 0)[:, None, None].to(taken.device)
        if wrong := (taken[..., 1:] != due).nonzero().tolist():
            layer, head, event = wrong[0]
            raise KvrlError(
                f"trace.events: eviction {event} takes {int(taken[layer, head, event + 1])} entries of layer {layer}, "
                f"head {head}, and not {int(due[layer])}; it is corrupt"
            )

    def save(self, path: str | PathLike) -> None:
        """Write the trace to one safetensors file."""
        tensors = {"events": self.events, "evicted_at_event": self.evicted_at_event, "windows": self.windows}
        save_file(
            {name: t.contiguous() for name, t in tensors.items() if t is not None},
            path,
            metadata={"format": "kvrl.trace.v1", "budget": str(self.budget), "buffer": str(self.buffer)},
        )

    @classmethod
    def load(cls, path: str | PathLike) -> KVTrace:
        """Read a trace from a safetensors file; KvrlError if the file is not one of `save`."""
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != "kvrl.trace.v1":
                    raise KvrlError(f"trace file {path}: format is {meta.get('format')!r}, expected 'kvrl.trace.v1'")
                trace = cls(
                    file.get_tensor("events"),
                    file.get_tensor("evicted_at_event"),
                    int(meta["budget"]),
                    int(meta["buffer"]),
                    file.get_tensor("windows") if "windows" in file.keys() else None,  # noqa: SIM118
                )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise KvrlError(f"trace file {path}: cannot be read ({error}); it is missing, cut or corrupt") from None
        return trace.validate()
