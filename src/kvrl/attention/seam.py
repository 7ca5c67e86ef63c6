"""The one seam with transformers: a registered attention function that hands every call to a context.

`model(input_ids, position_ids=..., use_cache=False, kv=context)` reaches `kvrl_attention` in every layer,
in training and under gradient checkpointing too, since the context travels as an argument (contract 7).
Without a context the model attends as with `sdpa`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvrl.attention.kernels import attend
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

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def build(self) -> Tensor | None:
        """The mask that `sdpa` would have got: bool [B, 1, T, S], or None for plain causal attention."""
        return sdpa_mask(**self.kwargs)


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

    Raises KvrlError for a keyword that it does not know: ignoring one would be silently wrong.
    """
    for name, given in kwargs.items():
        if name not in _IGNORED and given is not None and given is not False:
            raise KvrlError(
                f"model: {type(module).__name__} calls attention with '{name}', which the replay does not implement; "
                "use a model of a supported family (docs/models.md)"
            )
    if dropout:
        raise KvrlError(
            f"attention_dropout: {dropout} in {type(module).__name__} would make the learner differ from the sampler; "
            "set it to 0 in the model's config"
        )
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        q=query,
        k=key,
        v=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        s_aux=s_aux,
    )
    if kv is not None:
        return kv.attend(call).transpose(1, 2), None
    mask = attention_mask.build() if isinstance(attention_mask, DeferredMask) else attention_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask >= 0  # an additive mask of a caller
    if mask is None and query.shape[2] not in (1, key.shape[2]):
        raise KvrlError("attention_mask: missing for a query block shorter than its keys; pass one or use `sdpa`")
    if mask is None and query.shape[2] != key.shape[2]:
        mask = query.new_ones(1, 1, 1, key.shape[2], dtype=torch.bool)
    return attend(query, key, value, mask, **call.kernel()).transpose(1, 2), None


def register() -> None:
    """Register the attention and the mask function with transformers (once, by name)."""
    AttentionInterface.register(NAME, kvrl_attention)
    AttentionMaskInterface.register(NAME, lambda **kwargs: DeferredMask(**kwargs))
