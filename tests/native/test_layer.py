"""The compiled decode step of a trunk: against its modules, row by row, and for which models it is taken."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import kvrl
from helpers import assert_same_bits, cache, make_prompts, replay, sampling
from kvrl.attention.probe import prepare, probe
from kvrl.head import decoder
from kvrl.models.tiny_families import VOCAB, build_family
from kvrl.native import layer as native
from kvrl.native.gemm import multiplies
from kvrl.native.layer import FAMILIES, NativeTrunk, native_trunk
from kvrl.sampler.engine import Engine

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not multiplies(torch.float32), reason="no compiler")


def build(family: str = "llama", dtype: torch.dtype = torch.float32):
    if dtype == torch.bfloat16 and not multiplies(dtype):
        pytest.skip("no bfloat16 instructions")
    lm = prepare(build_family(family, dtype=dtype)).eval()
    with torch.no_grad():  # weights of norms and biases that are not their start
        for name, p in lm.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))).to(p.dtype)
    return lm


def step(rows: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (rows,), generator=g), torch.randint(100, (rows,), generator=g)


@torch.no_grad()
def by_modules(lm, ids, positions):
    return decoder(lm)(
        input_ids=ids[:, None], position_ids=positions[:, None], use_cache=False, kv=native._Mixture()
    ).last_hidden_state


@torch.no_grad()
def by_kernels(trunk: NativeTrunk, ids, positions):
    return trunk(ids, positions, native._Mixture())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_modules_compute(family, dtype):
    lm = build(family, dtype)
    trunk = native_trunk(lm, probe(lm))
    assert trunk is not None
    ids, positions = step(rows=31)  # blocks of 24 rows, tiles of 6 and 1
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(by_kernels(trunk, ids, positions), by_modules(lm, ids, positions), **limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_on_nothing_else(dtype):
    lm = build("qwen3", dtype)
    trunk = NativeTrunk(lm, probe(lm))
    ids, positions = step(rows=31)
    whole = by_kernels(trunk, ids, positions)
    for rows in (1, 2, 3, 4, 5, 6, 7, 25):
        assert torch.equal(by_kernels(trunk, ids[-rows:], positions[-rows:]), whole[-rows:])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(by_kernels(trunk, ids, positions), whole)
    finally:
        torch.set_num_threads(threads)


def test_the_engine_takes_it_and_reads_the_weights_of_each_run():
    lm = build()
    prompts, given = make_prompts([5, 9]), {"num_slots": 2, "max_prompt_length": 9}
    engine = Engine(lm, cache(), sampling(40), **given)
    first = engine.run(prompts)
    assert isinstance(engine.trunk, NativeTrunk) and first[0].trace.num_events > 0
    with torch.no_grad():
        for p in lm.parameters():
            p *= 1.05
    second = engine.run(prompts)
    diff = replay(lm, second) - kvrl.sampler_logprobs(second)
    assert diff.abs().max() < 1e-5 and (replay(lm, first) - kvrl.sampler_logprobs(first)).abs().max() > 1e-3
    plain = Engine(lm, cache(), sampling(40), native_kernels=False, **given)
    for a, b in zip(plain.run(prompts), second, strict=True):
        assert a.token_ids == b.token_ids and torch.equal(a.trace.events, b.trace.events)
        torch.testing.assert_close(a.logprobs, b.logprobs, rtol=0, atol=1e-5)
    assert plain.trunk is None


def test_two_runs_of_one_engine_are_the_same():
    lm = build("mistral")
    engine = Engine(lm, cache(), sampling(20), num_slots=3, max_prompt_length=9)
    for a, b in zip(engine.run(make_prompts([5, 9])), engine.run(make_prompts([5, 9])), strict=True):
        assert_same_bits(a, b)


def hooked(lm):
    decoder(lm).layers[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)


def watched(lm):
    decoder(lm).layers[1].mlp.register_forward_hook(lambda module, args, out: None)


def with_bias(lm):
    old = decoder(lm).layers[0].self_attn.o_proj
    decoder(lm).layers[0].self_attn.o_proj = nn.Linear(old.in_features, old.out_features)


def adapted(lm):
    class Adapted(nn.Linear):
        pass

    old = decoder(lm).layers[0].mlp.up_proj
    new = Adapted(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    decoder(lm).layers[0].mlp.up_proj = new


def wrapped_norm(lm):
    class Wrapper(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.base_layer, self.variance_epsilon = norm, norm.variance_epsilon

        def forward(self, x):
            return self.base_layer(x)

    layer = decoder(lm).layers[1]
    layer.input_layernorm = Wrapper(layer.input_layernorm)


def mixed(lm):
    decoder(lm).layers[1].input_layernorm.to(torch.float64)


def other_activation(lm):
    decoder(lm).layers[1].mlp.act_fn = nn.GELU()


def scaled(lm):
    attn = decoder(lm).layers[1].self_attn
    forward = attn.forward
    attn.forward = lambda *args, **kwargs: (1.1 * (out := forward(*args, **kwargs))[0], *out[1:])


@pytest.mark.parametrize("change", [hooked, watched, with_bias, adapted, wrapped_norm, mixed, other_activation, scaled])
def test_a_changed_model_keeps_its_modules(change):
    lm = build()
    spec = probe(lm)
    assert native_trunk(lm, spec) is not None
    changed = copy.deepcopy(lm)
    change(changed)
    assert native_trunk(changed, spec) is None


def with_adapters(family: str = "llama", dtype: torch.dtype = torch.float32, size: float = 0.1, **fields):
    """LoRA on every linear layer and on a row of the embedding, with weights off their start by `size`."""
    lm = build(family, dtype)
    wrapped = get_peft_model(lm, LoraConfig(target_modules="all-linear", trainable_token_indices=[5], **fields))
    with torch.no_grad():
        for p in wrapped.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=size)
    return wrapped.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_in_float32_are_part_of_the_weights(family):
    lm = with_adapters(family)
    spec, (ids, positions) = probe(prepare(lm)), step(rows=31)
    ids[0] = 5
    trunk = native_trunk(lm, spec)
    assert trunk is not None
    expected = by_modules(lm, ids, positions)
    torch.testing.assert_close(by_kernels(trunk, ids, positions), expected, rtol=1e-5, atol=1e-5)
    with lm.disable_adapter():
        without = native_trunk(lm, spec)
        assert without is not None
        plain = by_modules(lm, ids, positions)
        torch.testing.assert_close(by_kernels(without, ids, positions), plain, rtol=1e-5, atol=1e-5)
    assert (plain - expected).abs().max() > 0.1


def test_the_engine_samples_with_adapters_as_the_learner_scores_them():
    lm = with_adapters("qwen3")
    engine = Engine(lm, cache(), sampling(40), num_slots=2, max_prompt_length=9)
    rollouts = engine.run(make_prompts([5, 9]))
    assert isinstance(engine.trunk, NativeTrunk) and rollouts[0].trace.num_events > 0
    assert (replay(lm, rollouts) - kvrl.sampler_logprobs(rollouts)).abs().max() < 2e-5


def test_other_adapters_keep_their_modules():
    for fields in ({"use_dora": True}, {"lora_bias": True}):
        lm = with_adapters(**fields)
        assert native_trunk(lm, probe(prepare(lm))) is None
    for size in (0.1, 0.0):  # at the start they do what LoRA does, so numbers do not tell
        lm = with_adapters(size=size, use_dora=True)
        assert native_trunk(lm, probe(prepare(lm))) is None
        assert not native._is_linear(decoder(lm).layers[0].self_attn.q_proj)
        lm = with_adapters(size=size)
        lm.merge_adapter()
        assert native_trunk(lm, probe(prepare(lm))) is None
    if multiplies(torch.bfloat16):  # which rounds the sum
        lm = with_adapters(dtype=torch.bfloat16)
        assert native_trunk(lm, probe(prepare(lm))) is None


def test_other_models_keep_their_modules():
    for family in ("gemma2", "phi3", "olmo2", "qwen3_moe"):
        lm = build(family)
        assert native_trunk(lm, probe(lm)) is None
    lm = prepare(build_family("llama", dtype=torch.float64))
    assert native_trunk(lm, probe(lm)) is None
    lm = build()
    with torch.autocast("cpu", torch.bfloat16):
        assert native_trunk(lm, probe(lm)) is None
    assert native_trunk(lm, dataclasses.replace(probe(lm), head_dim=8)) is None
