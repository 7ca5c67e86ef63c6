"""Contract 7 and 13: what cannot be replayed exactly is refused by name, before anything runs."""

from __future__ import annotations

from functools import partial

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import kvrl
from helpers import cache, gap, make_prompts, replay, sample
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


@pytest.mark.parametrize(
    "kind", ["Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"]
)
def test_dropout_modules_of_every_kind(kind):
    lm = build_family("llama")
    lm.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), getattr(nn, kind)(0.3))
    with pytest.raises(KvrlError, match=r"dropout: 0\.3 in model\.layers\.1\.mlp\.act_fn\.1 .*set it to 0"):
        prepare(lm)


ON = {"target_modules": ["q_proj", "v_proj"]}
OUTSIDE = {
    "prompt tuning": (
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "PROMPT_TUNING puts learned entries before the prompt",
    ),
    "prefix tuning": (
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        "PREFIX_TUNING puts learned entries before the prompt",
    ),
    "p-tuning": (
        peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=16),
        "P_TUNING puts learned entries before the prompt",
    ),
    "activated lora": (
        LoraConfig(task_type="CAUSAL_LM", r=2, alora_invocation_tokens=[11, 12], **ON),
        r"alora_invocation_tokens \[11, 12\].*use plain LoRA",
    ),
    "poly": (peft.PolyConfig(r=2, n_tasks=1, n_skills=2, **ON), "POLY acts in the wrapper's own forward"),
    "lokr": (peft.LoKrConfig(r=4, rank_dropout=0.5, **ON), r"rank_dropout 0\.5 adds noise.*set it to 0"),
    "loha": (peft.LoHaConfig(r=4, module_dropout=0.25, **ON), r"module_dropout 0\.25 adds noise.*set it to 0"),
    "boft": (peft.BOFTConfig(boft_block_size=4, boft_dropout=0.5, **ON), r"boft_dropout 0\.5 adds noise.*set it to 0"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_adapters_outside_the_models_layers_or_with_noise(name, monkeypatch):
    # BOFT would compile a CUDA kernel, and leave CXX=gcc in the environment where it cannot
    monkeypatch.setattr("peft.tuners.boft.layer.get_fbd_cuda", lambda: None)
    config, message = OUTSIDE[name]
    with pytest.raises(KvrlError, match="adapter default: " + message):
        prepare(get_peft_model(build_family("llama"), config))


INSIDE = {
    "lora on head and embeddings": LoraConfig(r=2, target_modules=["q_proj", "lm_head", "embed_tokens"]),
    "lora and saved modules": LoraConfig(r=2, modules_to_save=["lm_head", "embed_tokens"], **ON),
    "dora": LoraConfig(r=2, use_dora=True, **ON),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "layer norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 2, 3]),
    "loha": peft.LoHaConfig(r=2, **ON),  # draws numbers in training, for dropouts of 0
}


@pytest.mark.parametrize("name", INSIDE)
def test_adapters_of_the_models_layers_run(name):
    lm = get_peft_model(build_family("llama"), INSIDE[name])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in lm.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=generator))
    rollouts = sample(lm, new=12)
    assert rollouts[2].trace.num_events and gap(replay(lm, rollouts), kvrl.sampler_logprobs(rollouts)) < 1e-4


META = pytest.param(
    "meta",
    marks=pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.4"), reason="this transformers runs nothing without data"
    ),
)


def mixtures(prefix: str, **fields):
    """A model whose sliding window is in its mask, and not in its calls."""
    own = {"num_experts_per_tok": 2, "sliding_window": 8, **fields}
    config = getattr(transformers, f"{prefix}Config")(**{k: v for k, v in SMALL.items() if k != "head_dim"}, **own)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


IN_THE_MASK = {
    "phimoe": lambda: mixtures("Phimoe", num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "qwen2_moe": lambda: mixtures(
        "Qwen2Moe", use_sliding_window=True, max_window_layers=1, num_experts=4, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", META])
@pytest.mark.parametrize("kind", IN_THE_MASK)
def test_windows_in_the_mask_alone(kind, device):
    with torch.device(device):
        lm = prepare(IN_THE_MASK[kind]().to(torch.bfloat16))  # grouped products have no other type on meta
    with pytest.raises(
        KvrlError, match=f"{kind} masks attention in a way that its calls do not name .token [0-9]+ sees 8"
    ):
        probe(lm)


@pytest.mark.parametrize("device", ["cpu", META])
def test_the_same_families_without_their_windows_run(device):
    with torch.device(device):
        lm = mixtures(
            "Phimoe", sliding_window=None, num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0
        )
    assert probe(prepare(lm.to(torch.bfloat16))).windows == (None, None)


@pytest.mark.parametrize("hidden", [
    lambda q, k: k > q - 4000,  # a window of nearly what the model was made for
    lambda q, k: k // 1024 == q // 1024,  # chunks
    lambda q, k: k < q,  # a token does not see itself
    lambda q, k: k != 0,  # nor the first
    lambda q, k: k != 3001,
], ids=["window", "chunks", "itself", "first", "one"])  # fmt: skip
def test_what_a_mask_hides_without_saying_so(hidden, monkeypatch):
    """Any mask function, added to the model's own as transformers allows."""
    given = partial(create_causal_mask, and_mask_function=lambda b, h, q, k: hidden(q, k))
    monkeypatch.setattr(modeling_llama, "create_causal_mask", given)
    with pytest.raises(KvrlError, match="llama masks attention in a way that its calls do not name"):
        probe(prepare(build_family("llama")))


def test_what_a_mask_shows_without_saying_so(monkeypatch):
    """Prefix attention in both directions."""
    given = partial(create_causal_mask, or_mask_function=lambda b, h, q, k: (q < 10) & (k < 10))
    monkeypatch.setattr(modeling_llama, "create_causal_mask", given)
    with pytest.raises(KvrlError, match="llama masks attention .* .token 0 sees 10 tokens, not 1"):
        probe(prepare(build_family("llama")))


@pytest.mark.parametrize("window", [7, 9, None])
def test_a_call_that_names_another_window_than_its_mask(window):
    lm = build_family("gemma2")
    lm.model.layers[0].self_attn.sliding_window = window
    with pytest.raises(KvrlError, match="gemma2 masks attention in a way that its calls do not name"):
        probe(prepare(lm))


def test_a_mask_of_the_models_own_making(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **kwargs: torch.ones(1, 1, 2, 2).tril().bool())
    with pytest.raises(KvrlError, match="llama makes its attention masks itself"):
        probe(prepare(build_family("llama")))


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
    ({"params": {"kernal": 3}}, r"cache\.params\.kernal: is no parameter of rkv; did you mean kernel"),
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
