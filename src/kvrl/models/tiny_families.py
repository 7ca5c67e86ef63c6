"""Tiny random models of every supported family, hard on sampler and replay: tests and `kvrl parity`.

Weights are large (a wrong mask shows), soft-caps are low, windows short, and token BOS is an attention sink
by construction: without one, evicting the first tokens is invisible on a random model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvrl.errors import KvrlError

VOCAB, HIDDEN, HEAD_DIM, QUERY_HEADS, KV_HEADS = 97, 64, 16, 4, 2
BOS, EOS = 1, 2
# Hidden channels that no layer writes to: every token carries the first, BOS alone (much) the second.
_CHANNEL_ALL, _CHANNEL_BOS = 0, 1

_FULL, _SLIDING = "full_attention", "sliding_attention"

# class prefix, layers, config fields; "window" stands for the sliding window asked for
_FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("Llama", 2, {}),
    "mistral": ("Mistral", 2, {"sliding_window": "window"}),
    "qwen2": ("Qwen2", 3, {"use_sliding_window": True, "sliding_window": "window", "max_window_layers": 1}),
    "qwen3": ("Qwen3", 2, {"head_dim": HEAD_DIM}),
    "qwen3_moe": (
        "Qwen3Moe", 2,
        {"head_dim": HEAD_DIM, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
         "norm_topk_prob": True},
    ),
    "phi3": (
        "Phi3", 2,
        {"sliding_window": None, "pad_token_id": 0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "gemma2": (
        "Gemma2", 3,
        {"head_dim": HEAD_DIM, "sliding_window": "window", "query_pre_attn_scalar": 24,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0,
         "layer_types": [_SLIDING, _FULL, _SLIDING]},
    ),
    "gemma3_text": (
        "Gemma3", 3,
        {"head_dim": HEAD_DIM, "sliding_window": "window", "query_pre_attn_scalar": 24,
         "layer_types": [_FULL, _SLIDING, _FULL]},
    ),
    "olmo2": ("Olmo2", 2, {}),
    "granite": (
        "Granite", 2,
        {"embedding_multiplier": 1.5, "logits_scaling": 1.7, "residual_multiplier": 0.8,
         "attention_multiplier": 0.2},
    ),
    "smollm3": ("SmolLM3", 3, {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "tie_word_embeddings": False}),
    "glm4": ("Glm4", 2, {"head_dim": HEAD_DIM, "pad_token_id": 0}),
    "gpt_oss": (
        "GptOss", 3,
        {"head_dim": HEAD_DIM, "sliding_window": "window", "num_local_experts": 4, "num_experts_per_tok": 2,
         "layer_types": [_SLIDING, _FULL, _SLIDING],
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "cohere2": (
        "Cohere2", 3,
        {"sliding_window": "window", "logit_scale": 2.0, "layer_types": [_SLIDING, _FULL, _SLIDING]},
    ),
}  # fmt: skip
_CONFIG_NAMES = {"gemma3_text": "Gemma3TextConfig"}

FAMILIES = tuple(_FAMILIES)
WINDOWED = tuple(name for name, (_, _, fields) in _FAMILIES.items() if "window" in fields.values())
"""Families with sliding-window layers."""


def build_family(
    name: str, *, window: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny model in training mode, with weights that depend on name, seed and shapes alone.

    window: sliding window of the family's sliding layers. overrides: config fields.
    Raises KvrlError for an unknown family.
    """
    if name not in _FAMILIES:
        raise KvrlError(f"family: '{name}' is not one of {', '.join(FAMILIES)}")
    prefix, layers, fields = _FAMILIES[name]
    given = {key: window if value == "window" else value for key, value in fields.items()}
    config_class = getattr(transformers, _CONFIG_NAMES.get(name, f"{prefix}Config"))
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": 4096,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            **given,
            **overrides,
        }
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    buffers = dict(model.named_buffers())
    model.to(dtype)
    for path, buffer in buffers.items():  # RoPE's frequencies stay in fp32, as from_pretrained leaves them
        owner, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer)
    _fill(model, seed)
    return model.train()


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Weights of standard deviation 0.2, norms around 1, random biases and sinks; then the planted sink."""
    generator = torch.Generator().manual_seed(seed)
    centred = model.config.model_type in ("gemma2", "gemma3_text")  # norm weights are 1 + w
    for parameter_name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
        if "norm" in parameter_name:
            noise = 0.2 * noise + (0.0 if centred else 1.0)
        elif not parameter_name.endswith("sinks"):
            noise = noise * 0.2
        p.copy_(noise)
    if model.config.model_type == "gemma3_text":
        model.model.norm.weight -= 0.5  # flatter: a near-certain token would hide a mismatch
    _plant_sink(model)


def _plant_sink(model: PreTrainedModel) -> None:
    """Let every query favour BOS, in a dimension that RoPE hardly turns and from two reserved channels."""
    spread = 1.0 / math.sqrt(HIDDEN) if model.config.model_type.startswith("gemma") else 1.0  # gemma multiplies it back
    embedding = model.get_input_embeddings().weight
    if not model.config.tie_word_embeddings:
        embedding.mul_(5.0 * spread)
    embedding[:, _CHANNEL_ALL] = 6.0 * spread
    embedding[:, _CHANNEL_BOS] = 0.0
    embedding[BOS, _CHANNEL_BOS] = 20.0 * spread
    reserved = [_CHANNEL_ALL, _CHANNEL_BOS]
    # Normalised queries and keys need more, as the norm shares it among the dimensions
    strength = 4.0 if any("q_norm" in name for name, _ in model.named_parameters()) else 1.3
    width = QUERY_HEADS * HEAD_DIM
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias")):
            p[reserved] = 0.0
        elif name.endswith("q_proj.weight"):
            p[HEAD_DIM - 1 :: HEAD_DIM, _CHANNEL_ALL] = strength
        elif name.endswith("k_proj.weight"):
            p[HEAD_DIM - 1 :: HEAD_DIM, _CHANNEL_BOS] = strength
        elif name.endswith("qkv_proj.weight"):
            p[HEAD_DIM - 1 : width : HEAD_DIM, _CHANNEL_ALL] = strength
            p[width + HEAD_DIM - 1 : width + KV_HEADS * HEAD_DIM : HEAD_DIM, _CHANNEL_BOS] = strength
