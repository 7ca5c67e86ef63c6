"""The shapes of well-known models, and any model as shapes alone: what it weighs is known without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from kvrl.errors import KvrlError
from kvrl.models.fetch import MODELS, resolve_model

if TYPE_CHECKING:
    from kvrl.train.config import Config


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": True, **fields,
    }  # fmt: skip


# hub id without -Instruct or -Base -> model type, and the fields that decide sizes
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M": ("llama", _llama(576, 1536, 30, 9, 3, 49_152)),
    "Qwen/Qwen2.5-0.5B": ("qwen2", _llama(896, 4864, 24, 14, 2, 151_936)),
    "Qwen/Qwen2.5-1.5B": ("qwen2", _llama(1536, 8960, 28, 12, 2, 151_936)),
    "Qwen/Qwen2.5-3B": ("qwen2", _llama(2048, 11_008, 36, 16, 2, 151_936)),
    "Qwen/Qwen2.5-7B": ("qwen2", _llama(3584, 18_944, 28, 28, 4, 152_064, tie_word_embeddings=False)),
    "Qwen/Qwen3-0.6B": ("qwen3", _llama(1024, 3072, 28, 16, 8, 151_936, head_dim=128)),
    "Qwen/Qwen3-1.7B": ("qwen3", _llama(2048, 6144, 28, 16, 8, 151_936, head_dim=128)),
    "Qwen/Qwen3-4B": ("qwen3", _llama(2560, 9728, 36, 32, 8, 151_936, head_dim=128)),
    "meta-llama/Llama-3.2-1B": ("llama", _llama(2048, 8192, 16, 32, 8, 128_256, head_dim=64)),
    "meta-llama/Llama-3.2-3B": ("llama", _llama(3072, 8192, 28, 24, 8, 128_256, head_dim=128)),
}


def model_config(path: str) -> Any:
    """The transformers config of a model folder, a known name or a hub id.

    Known names are answered from `SHAPES` (their sizes are exact, RoPE and context length are not filled in), other
    hub ids by the hub. Raises KvrlError if there is none.
    """
    known = MODELS[path].hub_id if path in MODELS else path
    name = known.removesuffix("-Instruct").removesuffix("-Base")
    if name in SHAPES and not Path(path).is_dir():
        kind, fields = SHAPES[name]
        return AutoConfig.for_model(kind, **fields)
    folder = resolve_model(path)
    if (Path(folder) / "adapter_config.json").is_file():
        from kvrl.train.setup import base_of_adapters

        return model_config(base_of_adapters(folder))
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise KvrlError(
            f"model.path: the shape of {path} cannot be read ({str(error).splitlines()[0]}); give a model folder, or "
            f"one of {', '.join(SHAPES)}"
        ) from None


def meta_policy(config: Config) -> nn.Module:
    """The model that a configuration trains, adapters attached, on the meta device.

    Raises KvrlError as loading it would, as far as shapes can tell.
    """
    from kvrl.models.tiny import build_tiny_model
    from kvrl.tasks import get_task
    from kvrl.train.setup import DTYPES, add_lora, tiny_tokenizer

    with torch.device("meta"):
        if config.model.path == "tiny":
            tokenizer = tiny_tokenizer(get_task(config.task.name, **config.task.params))
            model: nn.Module = build_tiny_model(tokenizer, config.seed)
            model.to(DTYPES[config.model.dtype])
        else:
            shape = model_config(config.model.path)
            model = AutoModelForCausalLM.from_config(shape, dtype=DTYPES[config.model.dtype])
        return model if config.lora is None else add_lora(model, config, None)
