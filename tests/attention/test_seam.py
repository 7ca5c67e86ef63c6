"""The seam: a prepared model without a context is still the stock model, whatever the caller asks of it."""

from __future__ import annotations

import pytest
import torch

from helpers import cache, gap, make_prompts, model, sampling, stock
from kvrl.attention import seam
from kvrl.attention.probe import prepare, text_config
from kvrl.attention.seam import NAME, kvrl_attention
from kvrl.errors import KvrlError
from kvrl.learner import Scorer
from kvrl.models.tiny_families import WINDOWED, build_family
from kvrl.sampler.engine import Engine


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "cohere2"])
def test_padded_batches_without_a_context(name):
    """Left padding with an attention mask, as generation uses it."""
    lm, twin = prepare(model(name)), stock(name)
    a, b = make_prompts([9, 20])
    ids = torch.tensor([[0] * 11 + a, b])
    mask = torch.tensor([[0] * 11 + [1] * 9, [1] * 20])
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "use_cache": False,
    }
    with torch.no_grad():
        got, expected = lm(**given).logits, twin(**given).logits
    assert gap(got[mask.bool()], expected[mask.bool()]) < 1e-4


@pytest.mark.parametrize("name", ["llama", *WINDOWED])
def test_generation_without_a_context(name):
    """transformers' own cache still works on a prepared model, one token and several at a time."""
    lm, twin = prepare(build_family(name).eval()), stock(name)
    ids = torch.tensor(make_prompts([20]))
    given = {
        "do_sample": False,
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
    }
    assert torch.equal(lm.generate(ids, **given), twin.generate(ids, **given))


def test_prepare_is_idempotent_and_named():
    lm = build_family("llama")
    assert prepare(prepare(lm)) is lm and text_config(lm)._attn_implementation == NAME


def test_a_block_of_queries_without_a_mask_is_refused():
    lm = prepare(build_family("llama"))
    attention = lm.model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 5, 16)
    with pytest.raises(KvrlError, match="attention_mask: missing"):
        kvrl_attention(attention, q, k, k, None)


def test_no_dense_mask_is_built(monkeypatch):
    """With a context, nothing of size T x T comes from transformers."""
    lm = build_family("gemma2")
    engine = Engine(lm, cache(), sampling(5), num_slots=2, max_prompt_length=40)
    scorer = Scorer(lm)
    monkeypatch.setattr(seam, "sdpa_mask", lambda **kwargs: pytest.fail("a mask was built"))
    scorer(engine.run(make_prompts([5, 40])))
