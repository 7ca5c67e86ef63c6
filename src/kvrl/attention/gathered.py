"""Attention over gathered keys and values, which are gathered again in the backward pass instead of kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvrl.attention.kernels import attend
from kvrl.native.gathered_attention import attend_gathered_native, known

GATHERED_BYTES = 32 << 20
"""What the gathered keys (and as much again the values) of one part may take."""


def attend_gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    visible: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    start: int = 0,
    native: bool = True,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of C blocks of m queries in each row of a batch, each over n entries of its own for each KV head.

    q [B, Hq, Tq, D]; k and v [B, H, T, D]; index int32 [B, C, H, n], tokens of k and v; visible bool
    [1 or B, 1 or C, 1 or H, m, n]; s_aux [Hq]; start: the first block's first query, block c's is start + c * m. Blocks
    may reach over the ends of q and together cover all of it. native: by a compiled kernel, where there is one.
    Returns [B, Hq, Tq, D]. Gradients of entries that several blocks read are summed in fp32. Nothing gathered is kept
    for the backward pass.

    counts int64 [B, C], where the kernel `takes` the call: a block has only the last so many of its n entries, and a
    query that sees none of them gets 0.
    """
    q, k, v = _cast(q, k, v)
    size = visible.shape[3]
    assert start <= 0 and start + index.shape[1] * size >= q.shape[2]
    if native and takes(q, k, v, size, softcap=softcap, s_aux=s_aux):
        if counts is None:
            counts = torch.full(index.shape[:2], index.shape[3])
        return attend_gathered_native(q, k, v, index, counts, visible, start, scaling)
    assert counts is None
    return _by_copies(q, k, v, index, visible, start, scaling=scaling, softcap=softcap, s_aux=s_aux)


def takes(
    q: Tensor, k: Tensor, v: Tensor, size: int, *, softcap: float | None, s_aux: Tensor | None
) -> bool:  # fmt: skip
    """Whether the compiled kernel does attention of queries [B, Hq, Tq, D], `size` a block, over [B, H, T, D]."""
    one_q, one_k, one_v = _cast(*(x[:1, :, :1] for x in (q, k, v)))
    return softcap is None and s_aux is None and known(one_q, one_k, one_v, size)


def _by_copies(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, visible: Tensor, start: int, *, scaling: float,
    softcap: float | None, s_aux: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attend_gathered` by PyTorch: blocks of queries as segments of their own, over rows of k and v."""
    batch, hq, length, d = q.shape
    count, size = index.shape[1], visible.shape[3]
    fill = start + count * size - length
    blocks = F.pad(q, (0, 0, -start, fill)).view(batch, hq, count, size, d).transpose(1, 2).flatten(0, 1)
    heads, tokens = k.shape[1:3]
    first = tokens * torch.arange(batch * heads, device=q.device, dtype=torch.int32).view(batch, 1, heads, 1)
    rows = (first + index).flatten(0, 1)  # [B * C, H, n], of k seen as [B * H * T, D]
    if visible.shape[0] > 1 or visible.shape[1] > 1:
        visible = visible.expand(batch, count, -1, -1, -1)
    seen = visible.flatten(0, 1)  # [1 or B * C, 1 or H, m, n]
    out = _Gathered.apply(blocks, k, v, s_aux, rows, seen, scaling, softcap)  # [B * C, Hq, m, D]
    out = out.view(batch, count, hq, size, d).transpose(1, 2).reshape(batch, hq, count * size, d)
    return out[:, :, -start : count * size - fill]


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """To autocast's dtype, as attention's products would be (float64 stays): the backward pass has no autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(kind)) for x in tensors)


class _Gathered(torch.autograd.Function):
    """q [N, Hq, m, D], k and v [B, H, T, D], index [N, H, n] into rows of k, visible [1 or N, 1 or H, m, n]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, s_aux: Tensor | None, index: Tensor, visible: Tensor,
        scaling: float, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q, k, v, s_aux, index, visible)
        ctx.kernel = {"scaling": scaling, "softcap": softcap}
        keys, values = _rows(k), _rows(v)
        out = torch.empty_like(q)
        for part in _parts(q, index):
            seen = _of(visible, part)
            out[part] = attend(
                q[part], _take(keys, index[part]), _take(values, index[part]), seen, s_aux=s_aux, **ctx.kernel
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, s_aux, index, visible = ctx.saved_tensors
        keys, values = _rows(k), _rows(v)
        wide = torch.promote_types(k.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grad_k, grad_v = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (keys, values))
        grad_s = None if s_aux is None else torch.zeros_like(s_aux)
        for part in _parts(q, index):
            given = (q[part], _take(keys, index[part]), _take(values, index[part]))
            own_q, own_k, own_v = (x.detach().requires_grad_() for x in given)
            sinks = None if s_aux is None else s_aux.detach().requires_grad_()
            with torch.enable_grad():
                out = attend(own_q, own_k, own_v, _of(visible, part), s_aux=sinks, **ctx.kernel)
            leaves = [own_q, own_k, own_v] + ([] if sinks is None else [sinks])
            found = torch.autograd.grad(out, leaves, grad[part])
            grad_q[part] = found[0]
            at = index[part].flatten().long()[:, None].expand(-1, q.shape[-1])
            for total, one in ((grad_k, found[1]), (grad_v, found[2])):
                total.scatter_add_(0, at, one.reshape(-1, q.shape[-1]).to(wide))
            if grad_s is not None:
                grad_s += found[3]
        return (grad_q, grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype), grad_s,
                None, None, None, None)  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B * H * T, D]."""
    return x.reshape(-1, x.shape[-1])


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [R, D] at index [N, H, n] -> [N, H, n, D]."""
    return rows.index_select(0, index.flatten()).view(*index.shape, -1)


def _of(visible: Tensor, part: slice) -> Tensor:
    """The mask of some of the segments, where it is not the same for all."""
    return visible if len(visible) == 1 else visible[part]


def _parts(q: Tensor, index: Tensor) -> list[slice]:
    """Slices of the segments whose gathered keys stay within GATHERED_BYTES."""
    each = max(1, GATHERED_BYTES // (index[0].numel() * q.shape[-1] * q.element_size()))
    return [slice(start, start + each) for start in range(0, len(q), each)]
