"""Attention over gathered entries on a CPU in bfloat16, by a compiled kernel that reads them where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvrl.native.build import load
from kvrl.native.gemm import COLUMNS, multiplies

SMALLEST = 32
"""Rows of a product, queries times heads of a group, below which the kernel's panels would be mostly padding."""
PARTS_BYTES = 64 << 20
"""What the gradients of the gathered keys and values of one part may take."""


_TENSORS = ("q", "k", "v", "index", "counts", "visible", "out", "lse", "grad", "grad_q", "grad_k", "grad_v")
_SIZES = ("blocks", "heads", "rows", "n", "dim", "visible_block", "visible_head", "threads")


class _Call(ctypes.Structure):
    """`Call` of gathered_attention.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scaling", ctypes.c_float),
    ]


def known(q: Tensor, k: Tensor) -> bool:
    """Whether the kernel takes such queries [N, Hq, m, D] over keys [B, H, T, D]; compiles it if so."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu" or q.shape[3] % COLUMNS:
        return False
    enough = q.shape[1] // k.shape[1] * q.shape[2] >= SMALLEST
    return enough and multiplies(q.dtype) and load("gathered_attention") is not None


def attend_gathered_native(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, visible: Tensor, scaling: float
) -> Tensor:
    """`attend_gathered` of what is `known`, without soft-cap and sinks."""
    return _Gathered.apply(q, k, v, index, counts, visible, scaling)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, visible: Tensor, scaling: float
    ) -> Tensor:
        q, k, v, index = (x.contiguous() for x in (q, k, v, index))
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        seen = visible.repeat(1, 1, q.shape[1] // k.shape[1], 1)  # [1 or N, 1 or H, M, n]
        _run("kvrl_gathered_forward", q, k, v, index, counts, seen, out, lse, scaling=scaling)
        ctx.save_for_backward(q, k, v, index, counts, visible, out, lse)
        ctx.scaling = scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, counts, visible, out, lse = ctx.saved_tensors
        grad, grad_q = grad.contiguous(), torch.empty_like(q)
        seen = visible.repeat(1, 1, q.shape[1] // k.shape[1], 1).mT.contiguous()  # [1 or N, 1 or H, n, M]
        totals = [torch.zeros(x.shape) for x in (k, v)]  # f32
        each = max(1, PARTS_BYTES // (2 * 4 * index[0].numel() * q.shape[3]))
        own = [torch.empty(min(each, len(q)), *index.shape[1:], q.shape[3]) for _ in totals]  # [part, H, n, D]
        library = load("gathered_attention")
        assert library is not None
        for start in range(0, len(q), each):
            part = slice(start, start + each)
            mask = seen if len(seen) == 1 else seen[part]
            _run(
                "kvrl_gathered_backward", q[part], k, v, index[part], counts[part], mask, out[part], lse[part],
                grad[part], grad_q[part], *own, scaling=ctx.scaling,
            )  # fmt: skip
            for total, one in zip(totals, own, strict=True):
                library.kvrl_gathered_add(
                    *(ctypes.c_void_p(x.data_ptr()) for x in (one, index[part], counts[part], total)),
                    *(ctypes.c_int64(size) for size in (*index[part].shape, q.shape[3], torch.get_num_threads())),
                )
        return grad_q, totals[0].to(k.dtype), totals[1].to(v.dtype), None, None, None, None


def _run(name: str, *given: Tensor, scaling: float) -> None:
    """Call a kernel on contiguous tensors in the order of its structure, those it has no use for left out."""
    library, (q, _, _, index, _, seen, *_) = load("gathered_attention"), given
    assert library is not None and all(x.is_contiguous() for x in given)
    heads, n = index.shape[1:]
    rows = q.shape[1] // heads * q.shape[2]
    strides = [0 if size == 1 else stride for size, stride in zip(seen.shape[:2], seen.stride()[:2], strict=True)]
    pointers = [x.data_ptr() for x in given] + [None] * (len(_TENSORS) - len(given))
    call = _Call(*pointers, len(q), heads, rows, n, q.shape[3], *strides, torch.get_num_threads(), scaling)
    getattr(library, name)(ctypes.byref(call))
