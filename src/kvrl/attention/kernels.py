"""The arithmetic of attention, shared by sampler and replay: one function over visible entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of m queries over the visible ones of n entries.

    q [N, Hq, m, D], k and v [N, Hkv, n, D]; visible bool, broadcastable to [N, Hkv, m, n], or None for
    plain causal attention (m = n). s_aux [Hq] are learned sink logits. Returns [N, Hq, m, D].
    """
    n, hq, m, d = q.shape
    hkv = k.shape[1]
    group = hq // hkv
    if visible is None and softcap is None and s_aux is None:
        if group > 1:  # CPU kernels run grouped queries several times slower than repeated keys
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=m > 1, scale=scaling)
    if visible is None:
        visible = torch.ones(m, m, dtype=torch.bool, device=q.device).tril()
    # The query heads of a group become rows of one product, so that K and V are read once.
    q = q.reshape(n, hkv, group * m, d)
    if visible.ndim < 4:
        visible = visible.expand(1, 1, m, visible.shape[-1])
    if m > 1 and group > 1:
        visible = visible.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)  # [N, Hkv, group * m, n]
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling)
        return out.view(n, hq, m, d)
    logits = attention_logits(q, k, scaling=scaling, softcap=softcap)
    # Not -inf: a query that sees nothing (left padding, without a context) must not turn its mates into NaN
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    if s_aux is not None:  # a key that every query sees, with a value of zero and a learned logit
        sink = s_aux.float().view(1, hkv, group, 1).expand(n, -1, -1, m).reshape(n, hkv, group * m, 1)
        probs = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs = logits.softmax(dim=-1)
    return torch.matmul(probs.to(v.dtype), v).view(n, hq, m, d)


def attention_logits(q: Tensor, k: Tensor, *, scaling: float, softcap: float | None) -> Tensor:
    """Scaled, soft-capped q.k in fp32 (float64 stays): q [N, H, m, D], k [N, H, n, D] -> [N, H, m, n]."""
    logits = torch.matmul(q, k.transpose(-1, -2))
    logits = (logits if logits.dtype == torch.float64 else logits.float()) * scaling
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
