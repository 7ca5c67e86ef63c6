"""The chunked head equals `model(...).logits` for every family, and refuses what it does not know."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PveraConfig, get_peft_model
from torch import nn

from helpers import gap, make_prompts, model
from kvrl.errors import KvrlError
from kvrl.head import Head, check_head, decoder
from kvrl.models.tiny_families import FAMILIES, build_family


def both(lm, ids):
    with torch.no_grad():
        logits = lm(input_ids=ids, use_cache=False).logits
        hidden = decoder(lm)(input_ids=ids, use_cache=False).last_hidden_state
        return logits, hidden


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_models_logits(name):
    lm = model(name)
    check_head(lm)
    logits, hidden = both(lm, torch.tensor(make_prompts([20])))
    with torch.no_grad():
        whole = Head(lm)(hidden)
        chunks = torch.cat([Head(lm)(hidden[:, i : i + 7]) for i in range(0, 20, 7)], dim=1)
    assert whole.dtype == torch.float32 and gap(whole, logits) < 1e-5 and gap(chunks, logits) < 1e-5
    assert torch.equal(Head(lm).frozen()(hidden), whole)


@pytest.mark.parametrize(
    "name, fields",
    [
        ("gemma2", {"final_logit_softcapping": None}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere2", {"logit_scale": 1.0}),
    ],
)
def test_each_change_of_the_logits_matters(name, fields):
    """The tiny models' soft-cap, divisor and scale are large enough that ignoring one shows."""
    logits, hidden = both(model(name), torch.tensor(make_prompts([20])))
    head = Head(model(name))
    for attribute, neutral in (("softcap", None), ("divisor", 1.0), ("scale", 1.0)):
        if {"final_logit_softcapping": "softcap", "logits_scaling": "divisor", "logit_scale": "scale"}[
            next(iter(fields))
        ] == attribute:
            setattr(head, attribute, neutral)
    assert gap(head(hidden), logits) > 0.1


def test_bfloat16_models_have_a_float32_head():
    lm = model("llama", 8, torch.bfloat16)
    _, hidden = both(lm, torch.tensor(make_prompts([20])))
    logits = Head(lm)(hidden)
    expected = hidden.float() @ lm.lm_head.weight.float().T
    assert logits.dtype == torch.float32 and gap(logits, expected) < 1e-5
    check_head(lm)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x + 0.01,
        lambda x: x * 1.001,
        lambda x: torch.tanh(x / 90) * 90,
        lambda x: x - x.mean(-1, keepdim=True),
    ],
)
def test_unknown_post_processing_is_refused(change, monkeypatch):
    lm = build_family("llama")
    original = lm.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    monkeypatch.setattr(lm, "forward", forward)
    if change(torch.tensor([-100.0, 0.0, 100.0])).sub(torch.tensor([-100.0, 0.0, 100.0])).abs().max() > 1e-3:
        with pytest.raises(KvrlError, match="llama changes its logits after the head"):
            check_head(lm)


@pytest.mark.parametrize("times", [0, 2])
def test_a_head_that_is_not_called_once_is_refused(times, monkeypatch):
    """Its weight used directly, or another pass through it: what it computes cannot be known from its call."""
    lm = build_family("llama")
    original = lm.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        if times == 2:
            lm.lm_head(torch.zeros(1, 1, 64))
        return out

    if times == 0:
        monkeypatch.setattr(lm.lm_head, "__class__", type("Unhooked", (nn.Linear,), {"__call__": nn.Linear.forward}))
    monkeypatch.setattr(lm, "forward", forward)
    with pytest.raises(KvrlError, match="llama changes its logits after the head"):
        check_head(lm)


def test_adapters_in_the_head_are_honoured():
    torch.manual_seed(0)
    base = copy.deepcopy(model("llama"))
    config = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    lm = get_peft_model(base, config)
    check_head(lm)
    logits, hidden = both(lm, torch.tensor(make_prompts([20])))
    assert gap(Head(lm)(hidden), logits) < 1e-5
    with lm.disable_adapter():
        plain, hidden = both(lm, torch.tensor(make_prompts([20])))
        assert gap(Head(lm)(hidden), plain) < 1e-5
    assert gap(plain, logits) > 0.1


def test_gradients_reach_the_heads_weights():
    lm = copy.deepcopy(model("cohere2"))
    hidden = torch.randn(3, 64)
    Head(lm)(hidden).square().sum().backward()
    expected = (4.0 * 2 * (hidden @ lm.lm_head.weight.T)).detach().T @ hidden  # logit scale 2, squared
    assert gap(lm.lm_head.weight.grad, expected) < 1e-3 * expected.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_does_not_reach_the_head(dtype, frozen):
    lm = model("gemma2", 8, dtype)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)

    def logits():
        head = Head(lm)
        return (head.frozen(native=True) if frozen else head)(hidden)

    expected = logits()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(), expected) and logits().dtype == torch.float32


@pytest.mark.parametrize("native", [True, False])
def test_a_frozen_head_takes_hidden_states_that_autocast_widened(native):
    lm = model("llama", 8, torch.bfloat16)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert gap(Head(lm).frozen(native=native)(hidden), hidden @ lm.lm_head.weight.float().T) < 1e-5


BERT_LIKE = {
    "ModernBertDecoder": {"layer_types": ["full_attention"] * 2},
    "Bert": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Roberta": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
NAMES = {"Bert": "BertLMHeadModel"}


@pytest.mark.parametrize("prefix", BERT_LIKE)
def test_layers_between_the_trunk_and_the_head_are_refused(prefix):
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **BERT_LIKE[prefix],
    )  # fmt: skip
    lm = getattr(transformers, NAMES.get(prefix, f"{prefix}ForCausalLM"))(config)
    with pytest.raises(KvrlError, match="changes the trunk's hidden states before its head"):
        check_head(lm)


@pytest.mark.parametrize("change", [lambda x: x * 1.0001, lambda x: x.roll(1, 1), lambda x: x[:, :, :1].expand_as(x)])
def test_any_change_of_the_heads_input_is_refused(change):
    lm = build_family("llama")
    lm.lm_head.register_forward_pre_hook(lambda module, args: (change(args[0]),))
    with pytest.raises(KvrlError, match="llama changes the trunk's hidden states before its head"):
        check_head(lm)


class Wrapper(nn.Module):
    """What PEFT looks like from outside, with something of its own around the model."""

    def __init__(self, inner: nn.Module, change) -> None:
        super().__init__()
        self.inner, self.config, self.change = inner, inner.config, change

    def get_base_model(self):
        return self.inner

    def forward(self, input_ids, **kwargs):
        return self.inner(input_ids=self.change(input_ids), **kwargs)


@pytest.mark.parametrize("change", [lambda ids: (ids + 1) % 97, lambda ids: torch.cat([ids, ids], dim=1)])
def test_what_a_wrapper_does_around_the_model_is_refused(change):
    check_head(Wrapper(build_family("llama"), lambda ids: ids))
    with pytest.raises(KvrlError, match="Wrapper acts outside the llama model that it wraps"):
        check_head(Wrapper(build_family("llama"), change))


def test_a_compiled_model_is_checked_as_it_stands():
    """A compiler's rounding is no layer between trunk and head, and the trunk is called without it."""
    lm, calls = build_family("llama"), []
    lm.compile(backend=lambda graph, inputs: calls.append(1) or graph.forward)
    check_head(lm)
    assert not calls


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


def functional(lm):
    lm.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), FunctionalDropout())


def hooked(name, change):
    return lambda lm: lm.get_submodule(name).register_forward_hook(
        lambda module, args, out: change(out) if module.training else None
    )


NOISE = {
    "functional dropout": (functional, "model.layers.1.mlp.act_fn.1"),
    "neftune": (hooked("model.embed_tokens", lambda x: x + 0.1 * torch.randn_like(x)), "model.embed_tokens"),
    "on the head": (hooked("lm_head", lambda x: x + 0.1 * torch.randn_like(x)), "lm_head"),
    "rare": (hooked("model.layers.0.mlp", lambda x: x * (1 + (torch.rand(()) < 0.3))), "model.layers.0.mlp"),
    "no noise, but training alone": (hooked("model.norm", lambda x: x * 1.01), "model.norm"),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_of_training_mode_is_refused_by_name(name):
    lm = build_family("llama")
    plant, where = NOISE[name]
    plant(lm)
    lm.model.layers[1].eval()
    lm.model.layers[1].mlp.act_fn.train()
    torch.manual_seed(0)  # the first two numbers are above 0.3
    state, modes = torch.get_rng_state(), [m.training for m in lm.modules()]
    with pytest.raises(KvrlError, match=f"model: {where} gives other values in training mode"):
        check_head(lm)
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in lm.modules()] == modes


def test_numbers_drawn_and_not_used_are_no_noise():
    lm = build_family("llama")
    hooked("model.norm", lambda x: x + 0.0 * torch.rand(()))(lm)
    state = torch.get_rng_state()
    check_head(lm)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_an_adapter_that_starts_at_zero_is_refused():
    """PVeRA draws its directions; before the first update nothing shows."""
    lm = get_peft_model(build_family("llama"), PveraConfig(r=4, target_modules=["q_proj"]))
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    with pytest.raises(KvrlError, match=r"layers\.0\.self_attn\.q_proj gives other values in training mode"):
        check_head(lm)
    assert all(torch.equal(p, before[name]) for name, p in lm.named_parameters())


def test_checking_does_not_disturb_a_graph():
    """Adapters at zero are moved for the check and back; a backward pass that waits must not mind."""
    lm = get_peft_model(copy.deepcopy(model("llama")), LoraConfig(r=2, target_modules=["q_proj"]))
    lm.eval()
    loss = lm(input_ids=torch.tensor(make_prompts([9]))).logits.square().mean()
    check_head(lm)
    assert not lm.training
    loss.backward()
    grads = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    assert any(bool(g.any()) for name, g in grads.items() if "lora_B" in name)
    assert not any(bool(g.any()) for name, g in grads.items() if "lora_A" in name)  # B is zero again
