"""The seam: a prepared model without a context is still the stock model, whatever the caller asks of it."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

import kvrl
from helpers import cache, gap, make_prompts, model, replay, sample, sampling, stock
from kvrl.attention import seam
from kvrl.attention.probe import prepare, text_config
from kvrl.attention.seam import NAME, AttentionCall, DeferredMask, attend_masked, kvrl_attention
from kvrl.cache.policies.h2o import H2O
from kvrl.cache.policies.rkv import RKV
from kvrl.errors import KvrlError
from kvrl.learner import Scorer
from kvrl.models.tiny_families import FAMILIES, WINDOWED, build_family
from kvrl.sampler.engine import Engine

UNFUSED = ("gemma2", "gpt_oss")  # soft-caps and sinks, which transformers' `sdpa` ignores or refuses


def twins(name: str):
    """A prepared model and the same weights under the implementation that it must equal."""
    lm, twin = build_family(name).eval(), build_family(name).eval()
    twin.set_attn_implementation("eager" if name in UNFUSED else "sdpa")
    return prepare(lm), twin


def assert_as_stock(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit where the stock model has `sdpa` too."""
    assert gap(got, expected) < 1e-4 if name in UNFUSED else torch.equal(got, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "cohere2"])
def test_padded_batches_without_a_context(name):
    """Left padding with an attention mask, as generation uses it."""
    lm, twin = twins(name)
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
    assert_as_stock(name, got[mask.bool()], expected[mask.bool()])
    assert gap(got[mask.bool()], stock(name)(**given).logits[mask.bool()]) < 1e-4


@pytest.mark.parametrize("kind", ["soft", "hard", "bool", "none"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_masks_of_a_caller(name, kind):
    """4-D masks are the whole truth: additive ones with biases too."""
    lm, twin = twins(name)
    ids, (i, j) = torch.tensor(make_prompts([20])), torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij")
    seen = (j <= i) & ((j != 5) | (i == 5))
    hard = torch.zeros(20, 20).masked_fill(~seen, torch.finfo(torch.float32).min)
    soft = hard + torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    mask = {"soft": soft, "hard": hard, "bool": seen, "none": None}[kind]
    mask = None if mask is None else mask.expand(1, 1, 20, 20)
    # Eager attention adds a bool mask as numbers: its twin gets the same one as biases
    given = hard.expand(1, 1, 20, 20) if name in UNFUSED and kind == "bool" else mask
    with torch.no_grad():
        got = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits
        expected = twin(input_ids=ids, attention_mask=given, use_cache=False).logits
        plain = lm(input_ids=ids, use_cache=False).logits
    assert_as_stock(name, got, expected)
    assert (gap(got, plain) > 1e-2) == (kind != "none")  # each of the masks matters


@pytest.mark.parametrize("name, error, message", [
    ("llama", RuntimeError, "attn_mask dtype"),  # PyTorch's own, as from the stock model
    ("gemma2", KvrlError, r"attention_mask: torch.int64 is not bool .* and not additive"),
])  # fmt: skip
def test_a_mask_of_integers_is_refused(name, error, message):
    ids = torch.tensor(make_prompts([6]))
    with pytest.raises(error, match=message):
        twins(name)[0](input_ids=ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("name", ["llama", *WINDOWED])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_generation_without_a_context(name, implementation):
    """transformers' own caches still work on a prepared model, one token and several at a time."""
    lm, twin = twins(name)
    ids = torch.tensor(make_prompts([20])).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for new in (1, 12):  # a static cache for one token more is as long as the prompt
        given = {
            "do_sample": False,
            "max_new_tokens": new,
            "min_new_tokens": new,
            "attention_mask": mask,
            "pad_token_id": 0,
            "cache_implementation": implementation,
        }
        assert torch.equal(lm.generate(ids, **given), twin.generate(ids, **given))


def test_masks_are_built_once_and_at_once_for_a_cache(monkeypatch):
    lm, ids = twins("gemma2")[0], torch.tensor(make_prompts([20]))
    mask, built = torch.ones_like(ids), []
    mask[0, :4] = 0
    original = seam.sdpa_mask
    monkeypatch.setattr(seam, "sdpa_mask", lambda **kwargs: built.append(1) or original(**kwargs))
    with torch.no_grad():
        past = lm(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    assert len(built) == 2  # full and sliding, for three layers
    kinds = []
    monkeypatch.setattr(
        seam, "attend_masked", lambda call, *a: kinds.append(type(call.mask)) or attend_masked(call, *a)
    )
    with torch.no_grad():
        lm(input_ids=ids[:, :1], attention_mask=torch.cat([mask, mask[:, :1]], 1), past_key_values=past)
    assert len(built) == 4 and DeferredMask not in kinds


def test_prepare_is_idempotent_and_named():
    lm = build_family("llama")
    assert prepare(prepare(lm)) is lm and text_config(lm)._attn_implementation == NAME


def test_a_prepared_model_can_be_pickled_into_a_new_process(monkeypatch):
    """There the config names the implementation before anyone has registered it."""
    stored = pickle.dumps(prepare(build_family("llama")))
    monkeypatch.delitem(AttentionInterface._global_mapping, NAME)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, NAME)
    lm, ids = prepare(pickle.loads(stored)), torch.tensor(make_prompts([6]))
    assert torch.equal(lm(input_ids=ids).logits, twins("llama")[0](input_ids=ids).logits)


def test_a_block_of_queries_without_a_mask_is_causal_over_its_own_keys():
    """What `sdpa` means by no mask: later keys are a static cache's empty ones."""
    attention = build_family("llama").model.layers[0].self_attn
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16, generator=g) for h, n in ((4, 3), (2, 5), (2, 5)))
    first = kvrl_attention(attention, q, k, v, None)[0]
    unfused = kvrl_attention(attention, q, k, v, None, softcap=1e6)[0]
    expected = kvrl_attention(attention, q, k[:, :, :3], v[:, :, :3], torch.ones(3, 3).tril().bool()[None, None])[0]
    assert gap(first, expected) < 1e-6 and gap(unfused, expected) < 1e-4
    one = kvrl_attention(attention, q[:, :, :1], k, v, None, softcap=1e6)[0]
    assert gap(one, kvrl_attention(attention, q[:, :, :1], k, v, None)[0]) < 1e-4


def test_attention_in_both_directions_is_refused_in_a_context():
    attention = build_family("llama").model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    for given, of_module in (({"is_causal": False}, True), ({}, False)):
        attention.is_causal = of_module
        with pytest.raises(KvrlError, match="LlamaAttention attends in both directions"):
            kvrl_attention(attention, q, k, k, None, kv=object(), **given)


def test_the_output_is_laid_out_as_that_of_sdpa():
    """Some models take a view of it."""
    attention = build_family("llama").model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)

    class Context:
        def attend(self, call: AttentionCall) -> torch.Tensor:
            return call.q

    assert kvrl_attention(attention, q, k, k, None, kv=Context())[0].is_contiguous()


def test_no_dense_mask_is_built(monkeypatch):
    """With a context, nothing of size T x T comes from transformers."""
    lm = build_family("gemma2")
    engine = Engine(lm, cache(), sampling(5), num_slots=2, max_prompt_length=40)
    scorer = Scorer(lm)
    monkeypatch.setattr(seam, "sdpa_mask", lambda **kwargs: pytest.fail("a mask was built"))
    scorer(engine.run(make_prompts([5, 40])))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_rollouts_under_autocast(name, native):
    """fp32 weights, products in bfloat16: keys and values come in several types, and both sides still agree."""
    lm = model(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = Engine(lm, cache(), sampling(12), num_slots=4, max_prompt_length=42, native_kernels=native)
        rollouts = engine.run(make_prompts())
        under = replay(lm, rollouts)
    assert rollouts[2].trace.num_events and engine.slots.k.dtype == torch.float32
    assert (under - kvrl.sampler_logprobs(rollouts)).abs().mean() < 0.05
    assert gap(under, replay(lm, rollouts)) > 1e-4  # it was bfloat16


@pytest.mark.parametrize(
    "policy, kind, method", [("rkv", RKV, "score"), ("h2o", H2O, "score"), ("h2o", H2O, "observe")]
)
def test_policies_score_in_float32_under_autocast(policy, kind, method, monkeypatch):
    original, seen = getattr(kind, method), []

    def watched(self, *args):
        seen.append(torch.is_autocast_enabled("cpu"))
        return original(self, *args)

    monkeypatch.setattr(kind, method, watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sample(config=cache(policy), new=12)
    assert seen and not any(seen)
