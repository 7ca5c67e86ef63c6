"""What a model's attention really does, measured by one short forward, and which models are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from kvrl.attention import seam
from kvrl.attention.seam import AttentionCall, DeferredMask
from kvrl.errors import KvrlError
from kvrl.models.meta import meta_forward

# PEFT's kinds with a forward of their own around the model's (AdaLoRA's only adds to a loss that kvrl does not ask for)
_OUTSIDE = frozenset({"POLY", "SHADOW", "XLORA"})


@dataclass(frozen=True)
class ModelSpec:
    """The facts that slots and replay need, as every layer's call showed them."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    softcap: float | None
    windows: tuple[int | None, ...]
    max_length: int | None
    """Longest sequence that RoPE rotates independently of its length; None: no limit."""


class _Recorder:
    """A context that records each layer's call; nothing that the probe asks depends on what attention returns."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])


def causal_lm(model: Any) -> Any:
    """The transformers causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_config(model: Any) -> Any:
    """The config of the text decoder."""
    return model.config.get_text_config()


def prepare(model: nn.Module) -> nn.Module:
    """Route the model's attention through the seam; without a context it still attends as `sdpa` does.

    Idempotent. Raises KvrlError for a model that cannot be replayed exactly, with the reason.
    """
    config = text_config(model)
    _refuse(model, config)
    seam.register()  # each time: a model that was pickled with its name set comes into a new process
    if config._attn_implementation != seam.NAME:
        causal_lm(model).set_attn_implementation(seam.NAME)
    return model


def _refuse(model: nn.Module, config) -> None:
    """Refuse by name what the replay does not implement (contract 7 and 13)."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise KvrlError(f"model: {kind} is an encoder-decoder; kvrl trains decoder-only language models")
    if getattr(config, "kv_lora_rank", None):
        raise KvrlError(f"model: {kind} uses latent attention (MLA), whose cached entries are not keys and values")
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if kinds:
        raise KvrlError(
            f"model: {kind} has layers of type {', '.join(sorted(kinds))}, whose state is not a list of KV entries; "
            "use a model with full and sliding attention only"
        )
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise KvrlError(f"model: {kind} attends in both directions; kvrl trains causal language models")
    for name, value in config.to_dict().items():
        noisy = name.endswith(("dropout", "drop", "pdrop", "dropout_prob")) or "jitter" in name
        if noisy and isinstance(value, int | float) and value:
            raise KvrlError(
                f"model.config.{name}: {value} adds noise in training that the sampler did not have; set it to 0"
            )
    find_routers(model)
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            raise KvrlError(
                f"dropout: {module.p} in {name} adds noise in training that the sampler did not have; set it to 0"
            )
    for name, adapter in getattr(model, "peft_config", {}).items():
        _refuse_adapter(name, adapter)


def _refuse_adapter(name: str, config: Any) -> None:
    """Refuse what PEFT does outside the layers of the model that kvrl runs, and its train-mode noise."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise KvrlError(
            f"adapter {name}: {kind} puts learned entries before the prompt, outside the model that kvrl runs; use an "
            "adapter of its layers, such as LoRA"
        )
    if kind in _OUTSIDE:
        raise KvrlError(
            f"adapter {name}: {kind} acts in the wrapper's own forward, outside the model that kvrl runs; use an "
            "adapter of its layers, such as LoRA"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise KvrlError(
            f"adapter {name}: alora_invocation_tokens {config.alora_invocation_tokens} switch it on within a sequence, "
            "outside the model that kvrl runs; use plain LoRA"
        )
    for field, value in vars(config).items():
        if "dropout" in field and isinstance(value, int | float) and value > 0:
            raise KvrlError(
                f"adapter {name}: {field} {value} adds noise in training that the sampler did not have; set it to 0"
            )


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a mixture of experts, in order. KvrlError for experts without a router that kvrl can watch."""
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    config = text_config(model)
    if not routers and getattr(config, "num_experts_per_tok", None):
        raise KvrlError(
            f"model: {config.model_type} has experts, but no module named ...Router: a token's bits would depend on "
            "its batch mates unseen; use one of the families in docs/models.md"
        )
    return routers


@torch.no_grad()
def probe(model: nn.Module) -> ModelSpec:
    """Run two tokens through the prepared model and read off what each layer's attention was asked to do."""
    recorder = _Recorder()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    # The mask is never built; without one transformers reads the positions' values, and a meta model has none
    with meta_forward():
        model(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(2, device=device)[None],
            use_cache=False, kv=recorder,
        )  # fmt: skip
    config = text_config(model)
    layers, calls = config.num_hidden_layers, recorder.calls
    if [call.layer for call in calls] != list(range(layers)):
        raise KvrlError(
            f"model: {config.model_type} sent the attention of layers {[c.layer for c in calls]} through transformers' "
            f"attention interface, not of layers 0 to {layers - 1} once each; layers outside it cannot be replayed"
        )
    shapes = {(c.q.shape[1], c.k.shape[1], c.q.shape[3], c.k.shape[3], c.v.shape[3]) for c in calls}
    if len(shapes) > 1 or len({shape[2:] for shape in shapes}.pop()) != 3 or len(set(next(iter(shapes))[2:])) > 1:
        raise KvrlError(f"model: {config.model_type} has layers or values of different widths {sorted(shapes)}")
    _check_masks(config, calls)
    scales = {(c.scaling, c.softcap) for c in calls}
    if len(scales) > 1:
        raise KvrlError(f"model: {config.model_type} scales attention differently from layer to layer: {scales}")
    query_heads, kv_heads, head_dim = next(iter(shapes))[:3]
    scaling, softcap = scales.pop()
    return ModelSpec(
        num_layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scaling=scaling,
        softcap=softcap,
        windows=tuple(c.window for c in calls),
        max_length=rope_limit(config),
    )


def _check_masks(config, calls: list[AttentionCall]) -> None:
    """Raise KvrlError unless each layer masks what its call says: k <= q, within the window passed by keyword.

    Rows of the mask itself are read at the start, around the window's edge and as far as the model was made for,
    where no narrower window, chunk or block can hide.
    """
    for mask, window in {(call.mask, call.window): None for call in calls}:
        if mask is None:
            continue  # no mask at all is causal attention
        if not isinstance(mask, DeferredMask):
            raise KvrlError(
                f"model: {config.model_type} makes its attention masks itself, where kvrl cannot see what they hide; "
                "use a model of a supported family (docs/models.md)"
            )
        longest = getattr(config, "max_position_embeddings", None) or 0
        longest = min(max(longest, 4 * (window or 0), 4096), 1 << 20)
        edge = [] if window is None else [window - 1, window, window + 1]
        for q in (0, 1, *edge, longest // 2, longest - 1):
            k = torch.arange(q + 64)
            expected = (k <= q) if window is None else (k <= q) & (k > q - window)
            sees = mask.row(q, len(k)).cpu()
            if not torch.equal(sees, expected):
                raise KvrlError(
                    f"model: {config.model_type} masks attention in a way that its calls do not name (token {q} sees "
                    f"{int(sees.sum())} tokens, not {int(expected.sum())}): a window, chunks or both directions that "
                    "exist in the mask alone; switch them off in the config or use another family (docs/models.md)"
                )


def rope_limit(config) -> int | None:
    """Tokens beyond which RoPE's factors depend on the longest position seen (contract 3); None: never.

    `longrope` and `dynamic` switch their factors at the original limit, for the whole batch at once.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = parameters if "rope_type" not in parameters else {"all": parameters}
    limits = []
    for entry in by_type.values():
        if isinstance(entry, dict) and entry.get("rope_type") in ("longrope", "dynamic"):
            original = entry.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limits.append(original or config.max_position_embeddings)
    return min(limits) if limits else None


def check_length(limit: int | None, tokens: int, what: str, beacons: int = 0) -> None:
    """Raise KvrlError if a sequence of `tokens` would change RoPE's factors on the way.

    beacons: how many of them are beacons that take positions of their own.
    """
    if limit is not None and tokens > limit:
        kept = "prompt, completion and beacons" if beacons else "prompt and completion"
        raise KvrlError(
            f"{what}: {counted(tokens, beacons)} are over {limit}, where this model's RoPE changes its factors for "
            f"tokens already cached; keep {kept} within {limit}"
        )


def counted(tokens: int, beacons: int) -> str:
    """The length of a sequence in words, with those of its tokens that are beacons."""
    return f"{tokens} tokens ({beacons} of them beacons)" if beacons else f"{tokens} tokens"
