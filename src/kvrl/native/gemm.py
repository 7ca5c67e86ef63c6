"""Packed weights: the order in which the compiled products (gemm.h) read them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvrl.native.build import load

COLUMNS = 64  # of a panel, as in gemm.h


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this machine has products of that type, of which bfloat16 needs instructions; compiles the kernel."""
    library = load("gemm")
    return library is not None and bool(library.kvrl_multiplies(int(dtype == torch.bfloat16)))


def lanes() -> int:
    """Numbers in a vector register of this machine, as the kernels use them."""
    library = load("gemm")
    assert library is not None
    return library.kvrl_lanes()


def pack(weight: Tensor, rows: Tensor | None = None) -> Tensor:
    """A weight [n, k] in panels; rows: int64 [n], which row stands in which column. A copy."""
    library = load("gemm")
    assert library is not None
    weight = weight.detach().contiguous()
    n, k = weight.shape
    packed = torch.empty(-(-n // COLUMNS) * COLUMNS * k, dtype=weight.dtype)
    library.kvrl_pack(
        ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(packed.data_ptr()), ctypes.c_int64(n), ctypes.c_int64(k),
        None if rows is None else ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(torch.get_num_threads()),
        int(weight.dtype == torch.bfloat16),
    )  # fmt: skip
    return packed
