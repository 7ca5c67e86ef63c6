"""Decode attention on a CPU by a compiled kernel: reads K and V once, and only the entries that are held."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvrl.native.build import load

WIDTH = 16
"""Head widths are a multiple of it: of the numbers in any machine's vector register."""

_POINTERS = ("q", "new_k", "new_v", "k", "v", "out", "at", "count", "position", "oldest", "sinks")
_SIZES = (
    "rows", "query_heads", "kv_heads", "capacity", "dim", "q_row", "q_head", "new_k_row", "new_k_head", "new_v_row",
    "new_v_head", "row_stride", "head_stride", "position_row", "position_head", "threads",
)  # fmt: skip


class _Call(ctypes.Structure):
    """`Call` of decode_attention.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


def supported(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    """Whether the kernel exists for such slots; compiles it if it does."""
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and head_dim % WIDTH == 0
    return fits and load("decode_attention") is not None


def decode_attention(
    q: Tensor,
    new_k: Tensor,
    new_v: Tensor,
    k: Tensor,
    v: Tensor,
    at: Tensor,
    count: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    position: Tensor | None = None,
    oldest: Tensor | None = None,
) -> Tensor:
    """Write one new entry a row and attend to the row's entries: q [S, Hq, D] -> [S, Hq, D].

    new_k, new_v [S, Hkv, D] go to entry at[s] of k, v [S, Hkv, capacity, D], in place; then row s sees its first
    count[s] entries (both int64), and of these only the ones with position > oldest[s] where position, int32
    [S, Hkv, capacity], and oldest, int64 [S], are given. sinks f32 [Hq]: learned sink logits.
    """
    library = load("decode_attention")
    assert library is not None and q.dtype == k.dtype and k.stride() == v.stride() and k.stride(2) == k.shape[3]
    assert all(x.stride(-1) == 1 for x in (q, new_k, new_v, k)) and (position is None or position.stride(-1) == 1)
    out = torch.empty(q.shape, dtype=q.dtype)
    tensors = (q, new_k, new_v, k, v, out, at, count, position, oldest, sinks)
    call = _Call(
        *(None if x is None else x.data_ptr() for x in tensors),
        *q.shape[:2], *k.shape[1:],
        *q.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *k.stride()[:2],
        *((0, 0) if position is None else position.stride()[:2]),
        torch.get_num_threads(), scaling, softcap or 0.0,
    )  # fmt: skip
    library.kvrl_decode_attention(ctypes.byref(call), q.dtype == torch.bfloat16)
    return out
