"""Fixed slots: the KV memory of a rollout engine, allocated once (contract 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrl.attention.kernels import attend
from kvrl.attention.probe import ModelSpec
from kvrl.attention.seam import AttentionCall
from kvrl.cache.policies import Observation, Policy
from kvrl.cache.trace import event_dtype, num_events


class Ring:
    """K and V of a sliding-window layer: the newest `window` entries of each row, at position mod window."""

    def __init__(self, rows: int, spec: ModelSpec, window: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (rows, spec.kv_heads, window, spec.head_dim)
        self.window = window
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, rows: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one entry a row: rows and position [S], k and v [S, H, D]."""
        self.k[rows, :, position % self.window] = k
        self.v[rows, :, position % self.window] = v

    def held(self, position: Tensor) -> Tensor:
        """Which ring slots hold an entry once the token at `position` [S] is in: bool [S, 1, 1, window]."""
        return (torch.arange(self.window, device=position.device) <= position[:, None])[:, None, None, :]

    def prefill(self, call: AttentionCall, row: int, start: int) -> Tensor:
        """Attend a chunk of one row to the window before it and to itself, then keep its newest entries."""
        m, device = call.q.shape[2], call.q.device
        past = torch.arange(max(0, start - self.window + 1), start, device=device)
        k = torch.cat([self.k[row][:, past % self.window], call.k[0]], dim=1)  # [H, past + m, D]
        v = torch.cat([self.v[row][:, past % self.window], call.v[0]], dim=1)
        key = torch.cat([past, torch.arange(start, start + m, device=device)])
        query = torch.arange(start, start + m, device=device)[:, None]
        visible = (key <= query) & (key > query - self.window)  # [m, past + m]
        out = attend(call.q, k[None], v[None], visible[None, None], **call.kernel())
        newest = min(m, self.window)
        at = torch.arange(start + m - newest, start + m, device=device) % self.window
        self.k[row][:, at] = call.k[0, :, -newest:]
        self.v[row][:, at] = call.v[0, :, -newest:]
        return out


class KVSlots:
    """K and V of every slot, with the positions, the policy's state and the trace being recorded.

    Row S (the last) is the staging row: a prompt is prefilled there once and copied to its group's slots.
    Layers whose sliding window fits into a slot keep a ring of their own and know no policy; the other
    layers are `managed` and share one storage, [managed layers, rows, kv_heads, capacity, head_dim].
    rings: False manages all layers alike, as beacons need it (a ring forgets by position what they evict by window).
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_slots: int,
        *,
        budget: int,
        buffer: int,
        max_tokens: int,
        policy: Policy | None,
        dtype: torch.dtype,
        device: torch.device,
        rings: bool = True,
    ) -> None:
        self.spec, self.num_slots, self.policy = spec, num_slots, policy
        self.budget, self.buffer, self.capacity = budget, buffer, budget + buffer
        rows = num_slots + 1
        self.rings = {
            layer: Ring(rows, spec, window, dtype, device)
            for layer, window in enumerate(spec.windows)
            if rings and window is not None and window <= self.capacity
        }
        self.managed = [layer for layer in range(spec.num_layers) if layer not in self.rings]
        self.index = {layer: i for i, layer in enumerate(self.managed)}
        heads, layers = spec.kv_heads, len(self.managed)
        # Zeros, not empty memory: an unused entry has weight 0, and 0 times a stray NaN would be NaN.
        self.k = torch.zeros(layers, rows, heads, self.capacity, spec.head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.position = torch.zeros(layers, rows, heads, self.capacity, dtype=torch.int32, device=device)
        w = policy.num_queries if policy else 0
        self.queries = torch.zeros(layers, rows, spec.query_heads, w, spec.head_dim, dtype=dtype, device=device)
        n = self.capacity if policy and policy.gathers_state else 0
        self.state = torch.zeros(layers, rows, heads, n, dtype=torch.float32, device=device)
        most = num_events(max_tokens, budget, buffer) if policy else 0
        self.events = torch.full(
            (layers, rows, heads, max_tokens if most else 0), -1, dtype=event_dtype(most), device=device
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V as allocated: every slot, its buffer and the staging row."""
        return self.k.nbytes + self.v.nbytes + sum(ring.k.nbytes + ring.v.nbytes for ring in self.rings.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of positions, kept queries and the policy's state."""
        return sum(t.nbytes for t in (self.position, self.queries, self.state))

    def reset(self, row: int) -> None:
        """Forget what the row's last request left in trace and state; K and V are masked by occupancy."""
        self.events[:, row] = -1
        self.state[:, row] = 0

    def copy_row(self, source: int, target: int) -> None:
        """Give the target row everything that the source row holds."""
        for ring in self.rings.values():
            ring.k[target], ring.v[target] = ring.k[source], ring.v[source]
        for t in (self.k, self.v, self.position, self.queries, self.state, self.events):
            t[:, target] = t[:, source]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Move one entry of each row, with its position, to another place in all layers and heads: all [n]."""
        for t in (self.k, self.v, self.position):
            t[:, rows, :, target] = t[:, rows, :, source]

    def append_positions(self, rows: Tensor, at: Tensor, tokens: Tensor) -> None:
        """Record the logical position of the entry that each row appends: all [S]."""
        self.position[:, rows, :, at] = tokens.to(torch.int32)[:, None, None]

    def keep_queries(self, i: int, call: AttentionCall, rows: Tensor, tokens: Tensor) -> None:
        """Keep one new query a slot for the policy's scores: managed layer i, q [S, Hq, 1, D]."""
        self.queries[i][rows, :, tokens % self.queries.shape[3]] = call.q[:, :, 0]

    def observe_decode(self, i: int, call: AttentionCall, visible: Tensor) -> None:
        """Hand one new query a slot to a policy with state: managed layer i, q [S, Hq, 1, D]."""
        assert self.policy is not None
        seen = Observation(call.q, self.k[i, :-1], visible, call.scaling, call.softcap)
        self.policy.observe(self.state[i, :-1], seen)

    def observe_prefill(self, i: int, call: AttentionCall, row: int, position: Tensor, visible: Tensor) -> None:
        """Hand a chunk's queries to the policy: managed layer i, q [1, Hq, m, D], position [m]."""
        if w := self.queries.shape[3]:
            newest = min(w, call.q.shape[2])
            self.queries[i, row][:, position[-newest:] % w] = call.q[0, :, -newest:]
        if self.state.shape[3]:
            assert self.policy is not None
            n = visible.shape[-1]
            seen = Observation(call.q, self.k[i, row : row + 1, :, :n], visible, call.scaling, call.softcap)
            self.policy.observe(self.state[i, row : row + 1, :, :n], seen)
