"""The memory of a rollout engine. On the meta device the same tensors have sizes alone: `kvrl plan` reads them."""

from __future__ import annotations

import torch

from kvrl.attention.probe import ModelSpec
from kvrl.cache.compaction import Compactor
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.cache.slots import KVSlots

SCRATCH_BYTES, CPU_SCRATCH_BYTES = 512 << 20, 16 << 20
"""What the policy's scoring may hold at once, unless an engine is told otherwise: on a CPU what its caches hold."""


def slot_width(num_slots: int) -> int:
    """Slots that an engine really has: above 4 a multiple of 4.

    CPU products share out rows among threads by fours; in a ragged share a row's bits depend on its place.
    """
    return num_slots if num_slots <= 4 else -(-num_slots // 4) * 4


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
