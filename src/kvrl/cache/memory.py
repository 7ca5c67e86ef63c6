"""The memory of a rollout engine. On the meta device the same tensors have sizes alone: `kvrl plan` reads them."""

from __future__ import annotations

from typing import Any

import torch

from kvrl.attention.probe import ModelSpec
from kvrl.cache.compaction import Compactor
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.cache.slots import KVSlots
from kvrl.errors import KvrlError

SCRATCH_BYTES, CPU_SCRATCH_BYTES = 512 << 20, 16 << 20
"""What the policy's scoring may hold at once, unless an engine is told otherwise: on a CPU what its caches hold."""


def slot_width(num_slots: int) -> int:
    """Slots that an engine really has: above 4 a multiple of 4.

    CPU products share out rows among threads by fours; in a ragged share a row's bits depend on its place.
    """
    return num_slots if num_slots <= 4 else -(-num_slots // 4) * 4


def slots_within(kv_memory: int, spec: ModelSpec, cache: CacheConfig, **given: Any) -> int:
    """The most slots whose K and V, the staging row's included, fit into kv_memory bytes.

    given: max_tokens, dtype and beacon_slots, as `make_memory` takes them. KvrlError if not even one slot fits.
    """
    row = slot_bytes(spec, cache, **given)
    most = fitting_slots(row, kv_memory)
    if most < 1:
        evicts = not (cache.is_dense or cache.is_beacon)
        smaller = "cache.budget or cache.buffer" if evicts else "sampling.max_completion_length"
        raise KvrlError(
            f"rollout.kv_memory: {kv_memory} bytes are below the {2 * row} that one sequence and the staging row take; "
            f"raise it to at least {2 * row}, or lower {smaller}"
        )
    return most


def slot_bytes(spec: ModelSpec, cache: CacheConfig, **given: Any) -> int:
    """Bytes of K and V of one slot; given as in `slots_within`."""
    slots, _ = make_memory(spec, cache, num_slots=1, device=torch.device("meta"), **given)
    return slots.kv_bytes // 2  # the staging row is as large as a slot


def fitting_slots(row: int, kv_memory: int) -> int:
    """Slots of `row` bytes that fit beside the staging row, as many as an engine does not round up; 0 if none does."""
    most = kv_memory // row - 1
    return max(0, most) if most < 4 else most // 4 * 4


def make_memory(
    spec: ModelSpec,
    cache: CacheConfig,
    *,
    num_slots: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    scratch_bytes: int | None = None,
    native: bool = False,
    beacon_slots: int | None = None,
) -> tuple[KVSlots, Compactor | None]:
    """Slots for sequences of at most max_tokens, and what compacts them (None for the full cache and for beacons).

    native: compact by the compiled CPU kernels. beacon_slots: entries of a slot under policy `beacon`.
    """
    policy = make_policy(cache)
    # The full cache is a slot of max_tokens entries that never fills: the last token has no forward (contract 2).
    full = max_tokens if beacon_slots is None else beacon_slots
    budget, buffer = (full - 1, 1) if policy is None else (cache.budget, cache.buffer)
    slots = KVSlots(
        spec, slot_width(num_slots), budget=budget, buffer=buffer, max_tokens=max_tokens, policy=policy, dtype=dtype,
        device=device, rings=beacon_slots is None,
    )  # fmt: skip
    if policy is None:
        return slots, None
    if scratch_bytes is None:
        scratch_bytes = CPU_SCRATCH_BYTES if device.type == "cpu" else SCRATCH_BYTES
    return slots, Compactor(slots, protect_prompt=cache.protect_prompt, scratch_bytes=scratch_bytes, native=native)
