"""The learner's side of the seam: one full-sequence forward in which every layer and head sees by lifetime.

Exact because a token's key and value are computed once, under the token's own visible set, and never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from kvrl.attention import flex, segments
from kvrl.attention.blocks import Block, attend_blocks, make_blocks
from kvrl.attention.kernels import attend
from kvrl.attention.seam import AttentionCall
from kvrl.cache.trace import NEVER, KVTrace
from kvrl.errors import KvrlError

Backend = Literal["mask", "segments", "flex"]


class ReplayContext:
    """Traces of a right-padded batch, ready for attention. Immutable: every layer and recomputation reads it alike.

    traces: one for each row of the batch, or None for the dense view (nothing is evicted; the layers' own
    sliding windows stay). length: padded length T of the batch. positions: int64 [B, T], by which sliding windows
    count; None: 0 to T - 1. native: `segments` by compiled CPU kernels, where they are.
    """

    def __init__(
        self,
        traces: Sequence[KVTrace] | None,
        length: int,
        *,
        backend: Backend = "segments",
        device: torch.device | str = "cpu",
        positions: Tensor | None = None,
        native: bool = True,
    ) -> None:
        if backend not in get_args(Backend):
            raise KvrlError(f"replay.backend: {backend!r} is not one of {', '.join(get_args(Backend))}")
        if backend == "flex" and torch.device(device).type != "cuda":
            raise KvrlError("replay.backend: flex has no backward on CPU; use 'segments' (or 'mask', the reference)")
        self.backend, self.length, self.native = backend, length, native
        self.evicted_at: Tensor | None = None
        self.plan: segments.Plan | None = None
        self.blocks: list[Block] | None = None
        self.windows: list[int] | None = None
        self.managed: list[bool] | None = None
        self.positions = positions
        if traces is None:
            return  # the dense view
        for trace in traces:
            trace.validate()
        self.windows = one_of_all("windows", [t.windows.tolist() for t in traces if t.windows is not None])
        evicting = [trace for trace in traces if trace.num_events]
        if not evicting:
            return  # nothing went: the dense view
        self.managed = one_of_all("managed layers", [trace.managed.tolist() for trace in evicting])
        self.capacity = max(trace.capacity for trace in evicting)
        if backend == "segments" and all(trace.capacity == 0 for trace in evicting):  # no schedule: beacons
            self.blocks = make_blocks(traces, length, device)
        elif backend == "segments":
            self.plan = segments.Plan.from_traces(traces, length, device)
        else:
            self.evicted_at = stack_lifetimes(traces, length).to(device)  # [L, B, H, T]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the whole batch under the traces: q [B, Hq, T, D] -> [B, Hq, T, D].

        Raises KvrlError for traces of a model with other sliding windows.
        """
        self._check_window(call)
        if self.blocks is not None:
            return attend_blocks(call, self.blocks, self.positions, native=self.native)
        if self.backend == "segments":
            return segments.attend_segments(call, self.plan, native=self.native)
        lifetimes = None if self.evicted_at is None else self.evicted_at[call.layer]  # [B, H, T]
        if self.backend == "flex":
            return flex.attend_flex(call, lifetimes, self.positions)
        return attend_mask(call, lifetimes, self.positions)

    def _check_window(self, call: AttentionCall) -> None:
        """A layer must be to the traces what it was to the sampler: a ring, or the policy's."""
        if self.windows is not None and (was := self.windows[call.layer]) != (call.window or 0):
            raise KvrlError(
                f"trace.windows: layer {call.layer} was sampled with a window of {was or 'no'} tokens and has one of "
                f"{call.window or 'no'} here; replay it on the model that it was sampled from"
            )
        if self.managed is not None and self.capacity:
            managed = call.window is None or call.window > self.capacity
            if managed != self.managed[call.layer]:
                raise KvrlError(
                    f"trace: the policy {'did not evict' if managed else 'evicted'} from layer {call.layer}, whose "
                    f"window here is {call.window}; the trace belongs to another model or was changed"
                )


def one_of_all(what: str, values: list[list]) -> list | None:
    """The value that all traces of a batch share, None without any. KvrlError if they differ."""
    if any(value != values[0] for value in values):
        raise KvrlError(f"trace: {what} differ within a batch; score rollouts of different models apart")
    return values[0] if values else None


def stack_lifetimes(traces: Sequence[KVTrace], length: int) -> Tensor:
    """`evicted_at` of a batch, padding never evicted: int32 [layers, B, kv_heads, T]."""
    first = traces[0].events
    out = torch.full((first.shape[0], len(traces), first.shape[1], length), NEVER, dtype=torch.int32)
    for b, trace in enumerate(traces):
        out[:, b, :, : trace.num_tokens] = trace.evicted_at()
    return out


def attend_mask(call: AttentionCall, evicted_at: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """The reference: a dense boolean mask, visible = k <= q < evicted_at[k] and within the layer's window.

    evicted_at int32 [B, H, T]; positions int64 [B, T], by which the window counts (None: 0 to T - 1).
    """
    q = torch.arange(call.q.shape[2], device=call.q.device)[:, None]
    k = torch.arange(call.k.shape[2], device=call.q.device)
    visible = (k <= q)[None, None]  # [1, 1, T, T]
    if call.window is not None:
        at = k[None] if positions is None else positions
        visible = visible & (at[:, None, None] > at[:, None, :, None] - call.window)  # [B, 1, T, T]
    if evicted_at is not None:
        visible = visible & (q < evicted_at[:, :, None, :])  # [B, H, T, T]
    return attend(call.q, call.k, call.v, visible, **call.kernel())
