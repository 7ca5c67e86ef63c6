"""Counter-based random streams: a number depends on its key alone, never on batch, worker or restart.

SplitMix64's finaliser (Steele et al. 2014, "Fast splittable pseudorandom number generators") as the hash.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GAMMA, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return x ^ _shift(x, 31)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """The key of a sub-stream: int64 key and int64 data, broadcast together."""
    data = torch.as_tensor(data, dtype=torch.int64, device=key.device)
    return _finalise(key + (data + 1) * _signed(_GAMMA))


def stream_key(*parts: int) -> int:
    """The key of the stream named by integers, such as (seed, request)."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = fold(key, _signed(part & _MASK64))
    return int(key)


def uniform(key: Tensor) -> Tensor:
    """f64 in [0, 1) with 52 bits, one for each int64 key: times a sum it stays below the sum."""
    return _shift(_finalise(key), 12).to(torch.float64) * 2.0**-52
