"""On a CUDA device: parity of every family, policy and backend, captured decoding, isolation and gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import beacon_models
import kvrl
from helpers import LIMIT, assert_same_bits, cache, gap, make_prompts, model, replay, sample, sampling, stock
from kvrl.cache.policies import POLICIES
from kvrl.eval.oracle import incremental_error, oracle_logprobs
from kvrl.models.tiny_families import FAMILIES
from kvrl.sampler.engine import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@functools.cache
def on_gpu(name: str = "llama", window: int = 8):
    return copy.deepcopy(model(name, window)).cuda()


@functools.cache
def stock_on_gpu(name: str = "llama", window: int = 8):
    return copy.deepcopy(stock(name, window)).cuda()


def check(name: str, config: kvrl.CacheConfig, window: int = 8) -> None:
    lm, twin = on_gpu(name, window), stock_on_gpu(name, window)
    rollouts = sample(lm, config=config)
    sampled = kvrl.sampler_logprobs(rollouts)
    longest = max(rollouts, key=lambda r: r.num_tokens)
    limit = min(LIMIT, 3 * incremental_error(twin, longest.token_ids, 1))
    truth = torch.zeros_like(sampled)
    for i, r in enumerate(rollouts):
        logps = oracle_logprobs(twin, r.token_ids, len(r.prompt_ids), r.trace.evicted_at())
        truth[i, : len(logps)] = logps.cpu()
    assert gap(truth, sampled) <= limit
    for backend in ("mask", "segments") if name == "gpt_oss" else ("mask", "segments", "flex"):
        assert gap(replay(lm, rollouts, backend=backend).cpu(), sampled) <= limit, backend


@pytest.mark.parametrize("window", [8, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_parity_of_every_family(name, window):
    check(name, cache(), window)


@pytest.mark.parametrize("policy", POLICIES)
def test_parity_of_every_policy(policy):
    check("llama", cache(policy) if policy != "dense" else kvrl.CacheConfig(policy="dense"))


@pytest.mark.parametrize("policy", ["rkv", "h2o", "tova", "streaming", "dense"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_captured_decode_step_changes_nothing(name, policy):
    config = cache(policy) if policy != "dense" else kvrl.CacheConfig(policy="dense")
    eager, captured = (sample(on_gpu(name), config=config, cuda_graphs=graphs) for graphs in (False, True))
    for a, b in zip(eager, captured, strict=True):
        assert a.token_ids == b.token_ids and torch.equal(a.trace.events, b.trace.events)
        assert gap(a.logprobs, b.logprobs) < 1e-5


def test_a_captured_step_sees_new_weights():
    """A second run captures again: nothing of the weights before an update may be left in it."""
    lm = copy.deepcopy(on_gpu())
    engine = Engine(lm, cache(), sampling(), num_slots=3, max_prompt_length=64, cuda_graphs=True)
    engine.run(make_prompts(), seed=3)
    with torch.no_grad():
        for p in lm.parameters():
            p.mul_(0.9)
    again = engine.run(make_prompts(), seed=3)
    fresh = Engine(lm, cache(), sampling(), num_slots=3, max_prompt_length=64, cuda_graphs=True).run(
        make_prompts(), seed=3
    )
    for a, b in zip(again, fresh, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["rkv", "h2o", "random"])
def test_mates_and_place_do_not_touch_a_request(policy, graphs):
    def run(prompts, ids):
        engine = Engine(on_gpu(), cache(policy), sampling(), num_slots=4, max_prompt_length=64, cuda_graphs=graphs)
        return engine.run(prompts, seed=3, request_ids=ids)

    mine, mates = make_prompts([37], seed=9), make_prompts([3, 50, 20, 33], seed=5)
    (alone,) = run(mine, [77])
    for place in (0, 2, 4):
        together = run([*mates[:place], *mine, *mates[place:]], [*range(place), 77, *range(place, 4)])
        assert_same_bits(together[place], alone)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_gradients_of_the_backends_agree(name):
    rollouts = sample(on_gpu(name))
    mask = kvrl.completion_mask(rollouts).cuda()
    gradients = {}
    for backend in ("mask", "segments", "flex"):
        lm = copy.deepcopy(on_gpu(name))
        (kvrl.logprobs(lm, rollouts, backend=backend) * mask).sum().backward()
        gradients[backend] = torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])
    scale = gradients["mask"].abs().max().item()
    for backend in ("segments", "flex"):
        assert gap(gradients[backend], gradients["mask"]) < 2e-3 * scale, backend


def test_flex_over_many_lengths():
    """More lengths than the compiler keeps variants of: the kernel must stay a compiled one, and right."""
    lm = on_gpu()
    for length in (3, 10, 25, 40, 47, 55, 63, 71, 80, 95, 110, 140, 170):
        rollouts = sample(lm, prompts=make_prompts([length]), new=20)
        assert gap(replay(lm, rollouts, backend="flex"), replay(lm, rollouts, backend="mask")) < LIMIT


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name, positions", [("llama", "sequence"), ("gemma2", "shared")])
def test_beacons(name, positions, graphs):
    lm = copy.deepcopy(beacon_models.model(name, positions=positions)).cuda()
    rollouts = beacon_models.sample(lm, cuda_graphs=graphs)
    for backend in ("mask", "segments", "flex"):
        assert gap(replay(lm, rollouts, backend=backend).cpu(), kvrl.sampler_logprobs(rollouts)) < LIMIT, backend


def test_truncated_sampling():
    rollouts = sample(on_gpu(), sampling_fields={"top_p": 0.8, "top_k": 40, "temperature": 1.3})
    assert gap(replay(on_gpu(), rollouts).cpu(), kvrl.sampler_logprobs(rollouts)) < LIMIT
