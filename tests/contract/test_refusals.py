"""Contract 7 and 13: what cannot be replayed exactly is refused by name, before anything runs."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from helpers import cache, make_prompts, sample
from kvrl.attention.probe import prepare, probe
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.models.tiny_families import build_family

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "DeepseekV3": (
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
        },
        "deepseek_v3.*MLA",
    ),
    "Qwen3Next": (
        {
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "num_experts": 4,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "qwen3_next.*linear_attention",
    ),
    "FalconH1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8},
        "falcon_h1",
    ),
    "Mamba": ({"state_size": 4, "num_attention_heads": None, "num_key_value_heads": None}, "mamba"),
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "num_experts": 2},
        "jamba",
    ),
}


@pytest.mark.parametrize("prefix", sorted(MODELS))
def test_models_with_other_state(prefix):
    fields, message = MODELS[prefix]
    config = getattr(transformers, f"{prefix}Config")(**{k: v for k, v in {**SMALL, **fields}.items() if v is not None})
    lm = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with pytest.raises(KvrlError, match=message):
        probe(prepare(lm))


def test_encoder_decoder():
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    with pytest.raises(KvrlError, match="t5.*encoder-decoder"):
        prepare(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize("name, field, value", [
    ("llama", "attention_dropout", 0.1),
    ("phi3", "resid_pdrop", 0.05),
    ("phi3", "embd_pdrop", 0.05),
    ("qwen3_moe", "router_jitter_noise", 0.01),
])  # fmt: skip
def test_train_mode_noise(name, field, value):
    with pytest.raises(KvrlError, match=rf"{field}.*{value}.*set it to 0"):
        sample(build_family(name, **{field: value}))


def test_lora_dropout():
    lm = get_peft_model(build_family("llama"), LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    with pytest.raises(KvrlError, match=r"dropout: 0\.1 in .*lora_dropout"):
        prepare(lm)


def test_bidirectional_attention():
    with pytest.raises(KvrlError, match="gemma3_text attends in both directions"):
        prepare(build_family("gemma3_text", use_bidirectional_attention=True))


def test_an_unknown_keyword_of_attention_is_refused(monkeypatch):
    lm = build_family("llama")
    attention = lm.model.layers[0].self_attn
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: original(*a, **k, position_bias=torch.zeros(1)))
    with pytest.raises(KvrlError, match="LlamaAttention.*'position_bias'"):
        sample(lm)


@pytest.mark.parametrize("fields, message", [
    ({"policy": "rvk"}, "'rvk' is not one of .*did you mean 'rkv'"),
    ({"budget": 11, "window": 8}, r"cache\.budget: 11 is below the 12 .*4 sinks \+ 8 newest.*at least 12"),
    ({"params": {"kernal": 3}}, r"cache\.params\.kernal.*kernel, mix, threshold"),
    ({"params": {"kernel": 4}}, r"cache\.params\.kernel: 4 is even"),
    ({"params": {"mix": 1.5}}, r"cache\.params\.mix: 1\.5"),
    ({"params": {"window": 3}}, r"cache\.params\.window: set it as cache\.window"),
])  # fmt: skip
def test_cache_sections(fields, message):
    with pytest.raises(KvrlError, match=message):
        make_policy(cache(**{"policy": "rkv", **fields}))


def test_the_smallest_budget_runs():
    make_policy(cache(budget=12, window=8))
    assert (
        sample(prompts=make_prompts([20]), config=cache(budget=12, window=8, buffer=1), new=5)[0].trace.num_events == 12
    )


def test_a_model_that_runs_is_not_refused():
    spec = probe(prepare(build_family("gemma2")))
    assert spec.windows == (8, None, 8) and spec.softcap == 5.0 and spec.scaling == 24**-0.5
    assert (spec.query_heads, spec.kv_heads, spec.head_dim, spec.num_layers) == (4, 2, 16, 3)


def test_experts_without_a_router_that_can_be_watched_are_refused():
    lm = build_family("llama")
    lm.config.num_experts_per_tok = 2
    with pytest.raises(KvrlError, match="llama has experts, but no module named ...Router"):
        prepare(lm)
