"""Attention over gathered keys and values, which are gathered again in the backward pass instead of kept."""

from __future__ import annotations

from typing import Any

import torch
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
    native: bool = True,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of N segments of m queries, each over n entries of its own for each KV head.

    q [N, Hq, m, D]; k and v [B, H, T, D]; index int32 [N, H, n], rows of k seen as [B * H * T, D], none of two heads;
    visible bool [1 or N, 1 or H, m, n]; s_aux [Hq]; native: by a compiled kernel, where there is one. Returns
    [N, Hq, m, D]. Gradients of entries that several segments read are summed in fp32. Nothing gathered is kept for
    the backward pass.

    counts int64 [N], where the kernel `takes` the call: a segment has only the last so many of its n entries, and a
    query that sees none of them gets 0.
    """
    q, k, v = _cast(q, k, v)
    if native and takes(q, k, softcap=softcap, s_aux=s_aux):
        if counts is None:
            counts = torch.full((len(q),), index.shape[2])
        return attend_gathered_native(q, k, v, index, counts, visible, scaling)
    assert counts is None
    return _Gathered.apply(q, k, v, s_aux, index, visible, scaling, softcap)


def takes(q: Tensor, k: Tensor, *, softcap: float | None, s_aux: Tensor | None) -> bool:
    """Whether the compiled kernel does attention of queries [N, Hq, m, D] over keys [B, H, T, D]."""
    return softcap is None and s_aux is None and known(*_cast(q[:1], k[:1]))


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """To autocast's dtype, as attention's products would be: the backward pass has no autocast."""
    kind = tensors[0].device.type
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors) if torch.is_autocast_enabled(kind) else tensors


class _Gathered(torch.autograd.Function):
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
