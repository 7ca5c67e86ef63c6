"""The compiled decode attention: against float64 attention, whatever shapes, strides, masks and threads."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from helpers import assert_same_bits, cache, gap, make_prompts, model, sample
from kvrl.cache.policies import POLICIES
from kvrl.models.tiny_families import FAMILIES
from kvrl.native import build
from kvrl.native.decode_attention import decode_attention, supported

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not supported(torch.float32, CPU, 64), reason="needs g++")

# rows, query heads, KV heads, head width, capacity: groups of 1 to 8, widths with and without blocks of 64
SHAPES = [
    (5, 9, 3, 64, 100),
    (4, 2, 2, 16, 33),
    (3, 7, 1, 128, 77),
    (2, 16, 2, 256, 64),
    (3, 10, 2, 80, 16),
    (2, 6, 1, 32, 1),
]


def inputs(shape, dtype, seed=0):
    rows, hq, h, d, capacity = shape
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(rows, hq, d, generator=g)
    new_k, new_v = torch.randn(rows, h, d, generator=g), torch.randn(rows, h, d, generator=g)
    k, v = torch.randn(rows + 1, h, capacity, d, generator=g), torch.randn(rows + 1, h, capacity, d, generator=g)
    at = torch.randint(0, capacity, (rows,), generator=g)
    return *(x.to(dtype) for x in (q, new_k, new_v, k, v)), at


def exact(q, k, v, visible, scaling, softcap=None, sinks=None):
    """Attention in float64: visible bool [S, H, capacity]."""
    rows, hq, d = q.shape
    k, v, visible = (x.repeat_interleave(hq // k.shape[1], dim=1) for x in (k.double(), v.double(), visible))
    logits = torch.einsum("shd,shnd->shn", q.double(), k) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(1, hq, 1).expand(rows, -1, -1)], dim=-1)
    return torch.einsum("shn,shnd->shd", logits.softmax(-1)[..., : k.shape[2]], v)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", "window"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_exact_attention(shape, kind, dtype, limit):
    q, new_k, new_v, k, v, at = inputs(shape, dtype)
    rows, hq, h, d, capacity = shape
    before_k = k.clone()
    count, visible = at + 1, torch.arange(capacity) <= at[:, None, None].expand(rows, h, 1)
    more, given = {}, {}
    if kind == "softcap":
        more["softcap"] = given["softcap"] = 1.3
    if kind == "sinks":
        more["sinks"] = given["sinks"] = torch.linspace(-1, 9, hq)
    if kind == "window":
        position = torch.arange(capacity, dtype=torch.int32).repeat(rows, h, 1) * 3
        oldest = 3 * (at - 5)
        given |= {"position": position, "oldest": oldest}
        visible = visible & (position > oldest[:, None, None])
    out = decode_attention(q, new_k, new_v, k[:-1], v[:-1], at, count, scaling=d**-0.5, **given)
    row = torch.arange(rows)
    assert torch.equal(k[row, :, at], new_k) and torch.equal(v[row, :, at], new_v)
    k[row, :, at] = before_k[row, :, at]
    assert torch.equal(k, before_k)  # nothing else was written
    k[row, :, at] = new_k
    assert gap(out, exact(q, k[:-1], v[:-1], visible, d**-0.5, **more)) < limit
    assert out.dtype == dtype


def test_strided_inputs():
    q, new_k, new_v, k, v, at = inputs(SHAPES[0], torch.float32)
    whole = [x.clone() for x in (k, v)]
    plain = decode_attention(q, new_k, new_v, k[:-1], v[:-1], at, at + 1, scaling=0.1)
    fused = torch.cat([q, new_k, new_v], dim=1)  # as views of one projection
    parts = fused.split([9, 3, 3], dim=1)
    assert not parts[1].is_contiguous()
    assert torch.equal(decode_attention(*parts, whole[0][:-1], whole[1][:-1], at, at + 1, scaling=0.1), plain)


def test_threads_and_rows_do_not_change_bits():
    q, new_k, new_v, k, v, at = inputs((7, 9, 3, 64, 50), torch.bfloat16)
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(decode_attention(q, new_k, new_v, k[:-1], v[:-1], at, at + 1, scaling=0.125))
    torch.set_num_threads(1)
    alone = [
        decode_attention(q[i : i + 1], new_k[i : i + 1], new_v[i : i + 1], k[i : i + 1], v[i : i + 1], at[i : i + 1],
                         at[i : i + 1] + 1, scaling=0.125)
        for i in range(7)
    ]  # fmt: skip
    for out in (*outs[1:], torch.cat(alone)):
        assert torch.equal(out, outs[0])


def test_entries_beyond_the_count_are_not_read():
    q, new_k, new_v, k, v, at = inputs(SHAPES[0], torch.float32)
    k[:, :, 60:], v[:, :, 60:] = math.nan, math.nan
    at = at.clamp(max=59)
    assert decode_attention(q, new_k, new_v, k[:-1], v[:-1], at, at + 1, scaling=0.1).isfinite().all()


@pytest.mark.parametrize("name", ["q", "new_k", "v"])
def test_nan_is_not_lost(name):
    given = dict(zip(("q", "new_k", "new_v", "k", "v"), inputs(SHAPES[0], torch.float32)[:5], strict=True))
    given[name][0, 0, 0] = math.nan
    at = torch.full((5,), 40)
    k, v = given.pop("k")[:-1], given.pop("v")[:-1]
    assert decode_attention(*given.values(), k, v, at, at + 1, scaling=0.1)[0].isnan().any()


def test_large_scores_do_not_overflow():
    q, new_k, new_v, k, v, at = inputs(SHAPES[0], torch.float32)
    out = decode_attention(300 * q, new_k, new_v, k[:-1], v[:-1], at, at + 1, scaling=1.0)
    visible = (torch.arange(100) <= at[:, None, None]).expand(5, 3, 100)
    assert gap(out, exact(300 * q, k[:-1], v[:-1], visible, 1.0)) < 2e-3


def test_what_is_supported():
    assert supported(torch.bfloat16, CPU, 16) and not supported(torch.float32, CPU, 24)
    assert not supported(torch.float64, CPU, 64) and not supported(torch.float32, torch.device("meta"), 64)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", *(f for f in FAMILIES if f in ("gemma2", "gpt_oss", "mistral"))])
def test_rollouts_as_with_torch(name, policy):
    """The same tokens and evictions, log-probs within rounding: policy, window, soft-cap and sinks are the same."""
    for window in (8, 40):
        native, plain = (
            sample(model(name, window), config=cache(policy) if policy != "dense" else None, native_kernels=kernels)
            for kernels in (True, False)
        )
        for a, b in zip(native, plain, strict=True):
            assert a.token_ids == b.token_ids and torch.equal(a.trace.events, b.trace.events)
            assert gap(a.logprobs, b.logprobs) < 3e-5


def test_the_flag_turns_it_off(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr("kvrl.attention.sampler.decode_attention", never)
    with pytest.raises(AssertionError, match="called"):
        sample(prompts=make_prompts([5]), new=3)
    (a,) = sample(prompts=make_prompts([5]), new=3, native_kernels=False)
    (b,) = sample(prompts=make_prompts([5]), new=3, native_kernels=False)
    assert_same_bits(a, b)


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.load.cache_clear()
    with pytest.warns(UserWarning, match="rollout.native_kernels: .* not available .it needs Linux and g..."):
        assert not supported(torch.float32, CPU, 64)
    assert not supported(torch.float32, CPU, 64)  # and says it once
    monkeypatch.delenv("CXX")
    build.load.cache_clear()
    assert supported(torch.float32, CPU, 64)


def test_what_cannot_be_compiled_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "--no-such-flag"))
    build.load.cache_clear()
    with pytest.warns(UserWarning, match="g.. failed: .*no-such-flag"):
        assert build.load("decode_attention") is None
    assert not list(build.cache_dir().glob("*.so"))
    build.load.cache_clear()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_c_compiler_in_the_environment_will_do(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "gcc")
    build.load.cache_clear()
    assert build.load("compaction") is not None and build.load("decode_attention") is not None
    build.load.cache_clear()


def test_what_cannot_be_loaded_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-c"))  # an object file and no library
    build.load.cache_clear()
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert build.load("decode_attention") is None
    assert not list(build.cache_dir().glob("*.so"))
    build.load.cache_clear()
