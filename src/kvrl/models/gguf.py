"""Reading a GGUF file of the Llama family as an ordinary model and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvrl.errors import KvrlError

HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[LlamaForCausalLM, Tokenizer]:
    """A Llama-family GGUF file as a bfloat16 model and a byte-level BPE tokenizer.

    Reads with `gguf` itself: transformers' GGUF loading differs between its versions (5.24 keeps the weights
    packed and cannot save them; 5.2 makes a CodeLlama tokenizer). Raises KvrlError for another architecture.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    if field("general.architecture") != "llama" or field("tokenizer.ggml.model") != "gpt2":
        raise KvrlError(f"model: {path.name} is no Llama model with a byte-level BPE tokenizer; use another file")
    config = LlamaConfig(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),  # stored as fp32
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        dtype="bfloat16",
    )
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # [out, in], fp32
        kind = tensor.name.split(".", 2)[-1]
        if kind in heads:
            weight = _unpermute(weight, heads[kind])
        weights[_hf_name(tensor.name)] = weight.to(torch.bfloat16)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # .to() would round the rotary table
    model.load_state_dict(weights)
    types = zip(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in types if kind == 3]
    tokenizer = byte_level_bpe(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges"), control)
    return model, tokenizer


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, module, suffix = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{HF_NAMES[module]}.{suffix}"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a rotary projection, per head, from GGUF's order (interleaved) to transformers' (halves)."""
    rows, columns = weight.shape  # [H * D, hidden]
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def byte_level_bpe(tokens: list[str], merges: list[str], special: list[str]) -> Tokenizer:
    """SmolLM's tokenizer: digits alone, then GPT-2's split, bytes and BPE; nothing added at either end."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer
