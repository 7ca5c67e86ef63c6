"""Replay by FlexAttention (CUDA): the lifetime is the mask, no T x T tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvrl.attention.seam import AttentionCall
from kvrl.errors import KvrlError


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def attend_flex(call: AttentionCall, evicted_at: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """Attention by lifetime: q [B, Hq, T, D], evicted_at int32 [B, Hkv, T] or None -> [B, Hq, T, D].

    positions: int64 [B, T], by which the layer's window counts (None: 0 to T - 1).
    Raises KvrlError for learned sink logits, which need a key that is not in the sequence.
    """
    if call.s_aux is not None:
        raise KvrlError("replay.backend: flex does not implement learned sink logits (gpt-oss); use 'segments'")
    batch, heads, length, _ = call.q.shape
    group = heads // call.k.shape[1]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        keep = k <= q
        if call.window is not None:
            if positions is None:
                keep = keep & (k > q - call.window)
            else:
                keep = keep & (positions[b, k] > positions[b, q] - call.window)
        if evicted_at is not None:
            keep = keep & (q < evicted_at[b, h // group, k])
        return keep

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert call.softcap is not None
        return torch.tanh(score / call.softcap) * call.softcap

    attend, make_mask = _compiled()
    mask = make_mask(visible, batch, heads, length, length, device=call.q.device)
    return attend(
        call.q, call.k, call.v,
        score_mod=None if call.softcap is None else capped,
        block_mask=mask, scale=call.scaling, enable_gqa=group > 1,
    )  # fmt: skip
