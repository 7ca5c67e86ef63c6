"""The one seam with transformers: a registered attention function that hands every call to a context.

`model(input_ids, position_ids=..., use_cache=False, kv=context)` reaches `kvrl_attention` in every layer,
in training and under gradient checkpointing too, since the context travels as an argument (contract 7).
Without a context the model attends by transformers' own `sdpa`, but for what that ignores: soft-caps and sinks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvrl.attention.kernels import attention_logits
from kvrl.errors import KvrlError

NAME = "kvrl"
# Keywords of other calls that do not change what is attended to.
_IGNORED = frozenset(
    {"is_causal", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
     "output_router_logits", "return_dict", "logits_to_keep"}
)  # fmt: skip


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: post-RoPE q [B, Hq, T, D], k and v [B, Hkv, T, D] of the new tokens."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    s_aux: Tensor | None
    mask: DeferredMask | Tensor | None = None
    """What transformers would have masked. A context masks by itself; the probe sees that it is the same."""

    def to(self, dtype: torch.dtype) -> AttentionCall:
        """The same call in one type: under autocast q, k and v may come in several."""
        if self.q.dtype == self.k.dtype == self.v.dtype == dtype:
            return self
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def kernel(self) -> dict[str, Any]:
        """The keywords of `attend` that belong to the layer."""
        return {"scaling": self.scaling, "softcap": self.softcap, "s_aux": self.s_aux}


class KVContext(Protocol):
    """What a forward attends to: the sampler's slots, or a replayed trace."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output, [B, Hq, T, D]."""
        ...


class DeferredMask:
    """The arguments of a mask that is only built if a layer attends without a context."""

    ndim = 4  # as of the mask that it stands for: transformers takes a 2-D one for padding

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    @functools.cached_property
    def built(self) -> Tensor | None:
        """The mask that `sdpa` would have got: bool [B, 1, T, S], or None for plain causal attention."""
        return sdpa_mask(**self.kwargs)

    def row(self, position: int, length: int) -> Tensor:
        """Which of the keys 0 to length - 1 the query at `position` sees, padding aside: bool [length]."""
        given = {
            **self.kwargs, "kv_length": length, "kv_offset": 0, "attention_mask": None, "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }  # fmt: skip
        if (before := given.get("cache_position")) is not None:  # transformers up to 5.3
            given["cache_position"] = torch.tensor([position], device=_readable(before.device))
        else:
            given |= {"q_length": 1, "q_offset": position, "device": _readable(given["device"])}
        return sdpa_mask(**given)[0, 0, 0]


def _readable(device: torch.device | str) -> torch.device:
    """The device itself, or the CPU for a model without data."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "meta" else device


def defer_mask(**kwargs: Any) -> DeferredMask | Tensor | None:
    """Mask function registered with transformers: a mask is deferred wherever a context may make it superfluous.

    No context comes with transformers' cache, which shows in its sizes: such a mask is built at once, as its users
    (a static cache, a compiled forward) expect it.
    """
    made = kwargs.get("attention_mask")
    if isinstance(made, DeferredMask):
        return made  # `generate` makes masks in advance and hands them to the model, which asks again
    position = kwargs.get("cache_position")
    new = kwargs["q_length"] if position is None else len(position)
    mask = DeferredMask(**kwargs)
    return mask if new == kwargs["kv_length"] else mask.built


def kvrl_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: DeferredMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv: KVContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function registered with transformers; returns [B, T, Hq, D] as its interface asks.

    With a context, raises KvrlError for a keyword that it does not know (ignoring one would be silently wrong),
    for dropout and for attention in both directions.
    """
    if kv is None:
        mask = attention_mask.built if isinstance(attention_mask, DeferredMask) else attention_mask
        if softcap is None and s_aux is None:
            return sdpa_attention_forward(
                module, query, key, value, mask, dropout=dropout, scaling=scaling, sliding_window=sliding_window,
                **kwargs,
            )  # fmt: skip
    else:
        _refuse(module, query, attention_mask, dropout, kwargs)
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        q=query,
        k=key,
        v=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
        mask=attention_mask,
    )
    out = attend_masked(call, mask, dropout) if kv is None else kv.attend(call)
    return out.transpose(1, 2).contiguous(), None  # as `sdpa`: some models take a view of it


def _refuse(module: nn.Module, query: Tensor, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse a call that a context would not follow exactly."""
    kind = type(module).__name__
    for name, given in kwargs.items():
        if name not in _IGNORED and given is not None and given is not False:
            raise KvrlError(
                f"model: {kind} calls attention with '{name}', which the replay does not implement; "
                "use a model of a supported family (docs/models.md)"
            )
    if dropout:
        raise KvrlError(
            f"attention_dropout: {dropout} in {kind} would make the learner differ from the sampler; "
            "set it to 0 in the model's config"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and query.shape[2] > 1 and not causal:
        raise KvrlError(f"model: {kind} attends in both directions; kvrl trains causal language models")


def attend_masked(call: AttentionCall, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Attention with soft-caps and sinks under a mask of transformers: q [B, Hq, T, D] -> [B, Hq, T, D].

    mask: bool (True is seen), additive, or None as `sdpa` means it: causal over the first T keys, or all for T = 1.
    """
    group, new = call.q.shape[1] // call.k.shape[1], call.q.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (call.k, call.v))
    if mask is None and new > 1:
        mask = torch.ones(new, k.shape[2], dtype=torch.bool, device=k.device).tril()
    logits = attention_logits(call.q, k, scaling=call.scaling, softcap=call.softcap)  # [B, Hq, T, S]
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a query that sees nothing (left padding) must not turn its mates into NaN
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    elif mask is not None:
        if not mask.is_floating_point():
            raise KvrlError(f"attention_mask: {mask.dtype} is not bool (True is seen) and not additive; convert it")
        logits = logits + mask
    if call.s_aux is not None:
        sink = call.s_aux.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        probs = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs = logits.softmax(dim=-1)
    return torch.matmul(F.dropout(probs.to(v.dtype), dropout), v)


def register() -> None:
    """Register the attention and the mask function with transformers (by name, as often as asked)."""
    AttentionInterface.register(NAME, kvrl_attention)
    AttentionMaskInterface.register(NAME, defer_mask)
