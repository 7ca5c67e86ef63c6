"""The chunked head equals `model(...).logits` for every family, and refuses what it does not know."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

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
