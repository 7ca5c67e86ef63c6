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


class _Strided(ctypes.Structure):
    """`Strided` of gathered_attention.cpp: a tensor [B, H, T, D] of whatever order in memory, D innermost."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token"))]

    @classmethod
    def of(cls, x: Tensor) -> _Strided:
        assert x.stride(3) == 1
        return cls(x.data_ptr(), *x.stride()[:3])


_LAID = ("q", "k", "v", "out", "grad", "grad_q")
_POINTERS = ("index", "counts", "visible", "lse", "grad_k", "grad_v")
_SIZES = ("first", "blocks", "per_row", "heads", "group", "size", "start", "length", "n", "dim")
_MASK = ("visible_row", "visible_block", "visible_head")


class _Call(ctypes.Structure):
    """`Call` of gathered_attention.cpp, field by field."""

    _fields_ = [
        *((name, _Strided) for name in _LAID),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_MASK, "threads")),
        ("scaling", ctypes.c_float),
    ]


def known(q: Tensor, k: Tensor, v: Tensor, size: int) -> bool:
    """Whether the kernel takes queries [B, Hq, Tq, D] in blocks of `size` over [B, H, T, D]; compiles it if so."""
    if any(x.dtype != torch.bfloat16 or x.device.type != "cpu" for x in (q, k, v)):
        return False
    if q.shape[3] % COLUMNS or v.shape != k.shape:
        return False
    enough = q.shape[1] // k.shape[1] * size >= SMALLEST
    return enough and multiplies(q.dtype) and load("gathered_attention") is not None


def attend_gathered_native(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, visible: Tensor, start: int, scaling: float
) -> Tensor:
    """`attend_gathered` of what is `known`, without soft-cap and sinks; the result lies in the order of tokens."""
    return _Gathered.apply(q, k, v, index, counts, visible, start, scaling)


class _Gathered(torch.autograd.Function):
    """Reads and writes tensors [B, H, T, D] as they lie, mostly in the order of tokens: nothing is copied or padded."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, visible: Tensor, start: int,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        q, k, v = (_rows(x) for x in (q, k, v))
        group, size = q.shape[1] // k.shape[1], visible.shape[3]
        out, lse = _by_tokens(q), torch.empty(*index.shape[:3], group * size)
        seen = visible.repeat(1, 1, 1, group, 1)  # [1 or B, 1 or C, 1 or H, M, n]
        call = _call(start, scaling, q=q, k=k, v=v, out=out, index=index, counts=counts, visible=seen, lse=lse)
        _library().kvrl_gathered_forward(ctypes.byref(call))
        ctx.save_for_backward(q, k, v, index, counts, visible, out, lse)
        ctx.start, ctx.scaling = start, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, counts, visible, out, lse = ctx.saved_tensors
        grad, grad_q = _rows(grad), _by_tokens(q)
        batch, heads, length, dim = k.shape
        seen = visible.repeat(1, 1, 1, q.shape[1] // heads, 1).mT.contiguous()  # [1 or B, 1 or C, 1 or H, n, M]
        totals = [torch.zeros(batch, length, heads, dim) for _ in (k, v)]  # f32
        blocks = index.shape[0] * index.shape[1]
        each = min(blocks, max(1, PARTS_BYTES // (2 * 4 * index[0, 0].numel() * dim)))
        own = [torch.empty(each, *index.shape[2:], dim) for _ in totals]  # [blocks, H, n, D]
        call = _call(
            ctx.start, ctx.scaling, q=q, k=k, v=v, out=out, grad=grad, grad_q=grad_q, index=index, counts=counts,
            visible=seen, lse=lse, grad_k=own[0], grad_v=own[1],
        )  # fmt: skip
        library = _library()
        for call.first in range(0, blocks, each):
            call.blocks = min(each, blocks - call.first)
            library.kvrl_gathered_backward(ctypes.byref(call))
            for total, one in zip(totals, own, strict=True):
                library.kvrl_gathered_add(
                    ctypes.byref(call), ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(total.data_ptr()),
                    ctypes.c_int64(length),
                )  # fmt: skip
        grad_k, grad_v = (total.to(k.dtype).transpose(1, 2) for total in totals)
        return grad_q, grad_k, grad_v, None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """The tensor itself, unless the numbers of a token are apart."""
    return x if x.stride(3) == 1 else x.contiguous()


def _by_tokens(x: Tensor) -> Tensor:
    """Room for a tensor [B, H, T, D] that lies as [B, T, H, D], which is what the projections around attention use."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _library() -> ctypes.CDLL:
    library = load("gathered_attention")
    assert library is not None
    return library


def _call(start: int, scaling: float, **tensors: Tensor) -> _Call:
    """All blocks of a call; what is missing among the tensors stays null."""
    q, seen = tensors["q"], tensors["visible"]
    batch, per_row, heads, n = tensors["index"].shape
    group = q.shape[1] // heads
    given = {name: _Strided.of(x) if name in _LAID else _pointer(x) for name, x in tensors.items()}
    mask = [0 if size == 1 else step for size, step in zip(seen.shape[:3], seen.stride()[:3], strict=True)]
    return _Call(
        **given, first=0, blocks=batch * per_row, per_row=per_row, heads=heads, group=group,
        size=tensors["lse"].shape[3] // group, start=start, length=q.shape[2], n=n, dim=q.shape[3],
        **dict(zip(_MASK, mask, strict=True)), threads=torch.get_num_threads(), scaling=scaling,
    )  # fmt: skip


def _pointer(x: Tensor) -> int:
    assert x.is_contiguous()
    return x.data_ptr()
