"""Compaction on a CPU by compiled kernels: entries move in place, and R-KV needs no matrix of similarities."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvrl.native.build import load


def keep(entries: Tensor, rows: Tensor, kept: Tensor) -> None:
    """Move the kept entries of some rows to the front of their slots, in place.

    entries [layers, all rows, H, capacity, D], contiguous; rows int64 [g], each once or repeated with equal `kept`;
    kept int64 [layers, g, H, budget], ascending.
    """
    library = load("compaction")
    assert library is not None and entries.is_contiguous()
    rows, index = rows.unique(), [int((rows == row).nonzero()[0]) for row in rows.unique()]
    kept = kept[:, index].contiguous()
    layers, g, heads, budget = kept.shape
    layer_stride, row_stride, head_stride, width, _ = (x * entries.element_size() for x in entries.stride())
    offset = (
        layer_stride * torch.arange(layers)[:, None, None]
        + row_stride * rows[None, :, None]
        + head_stride * torch.arange(heads)
    ).contiguous()  # [layers, g, H], bytes
    library.kvrl_keep(
        *_pointers(entries, offset, kept), *_sizes(offset.numel(), budget, width, torch.get_num_threads())
    )


def newest_similar(unit: Tensor, candidate: Tensor, threshold: float) -> Tensor:
    """For each key the sum of its products with the rows whose newest similar key it is: f32 [N, H, n].

    unit f32 [N, H, n, D]; candidate bool [N, H, n]: only pairs of these are looked at. A row's
    newest similar key is the last one, itself left out, whose product with it is above the threshold.
    """
    library = load("compaction")
    assert library is not None
    unit, candidate = unit.contiguous(), candidate.contiguous()
    out = torch.empty(candidate.shape)
    n, dim = unit.shape[-2:]
    library.kvrl_newest_similar(
        *_pointers(unit, candidate), ctypes.c_float(threshold), *_pointers(out),
        *_sizes(candidate.numel() // n, n, dim, torch.get_num_threads()),
    )  # fmt: skip
    return out


def _pointers(*tensors: Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(t.data_ptr()) for t in tensors)


def _sizes(*numbers: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(n) for n in numbers)
