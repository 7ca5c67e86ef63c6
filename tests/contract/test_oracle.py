"""Contract 11: sampler = replay = stock model with entries deleted as the trace says; 10: off = stock."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

import kvrl
from helpers import DENSE_MISMATCH, bar, cache, gap, make_prompts, model, oracle, replay, sample, stock
from kvrl.attention.replay import ReplayContext
from kvrl.cache.policies import POLICIES
from kvrl.eval.oracle import full_forward_logprobs, oracle_logprobs
from kvrl.head import decoder
from kvrl.models.tiny_families import FAMILIES, WINDOWED

CASES = [(name, window) for name in FAMILIES for window in ((8, 40) if name in WINDOWED else (8,))]


def rings_alone(name: str, window: int) -> bool:
    """A Mistral whose windows all fit a slot evicts nothing, so there is no mismatch to see."""
    return name == "mistral" and window == 8


@pytest.mark.parametrize("name, window", CASES)
def test_oracle_without_deletions_is_the_stock_model(name, window, double):
    twin, (ids,) = stock(name, window, torch.float64), make_prompts([70])
    difference = gap(oracle_logprobs(twin, ids, 1), full_forward_logprobs(twin, ids, 1))
    assert difference < 1e-10


@pytest.mark.parametrize("policy", ["rkv", "recent"])
@pytest.mark.parametrize("name, window", CASES)
def test_families(name, window, policy):
    check_parity(name, window, policy)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"rkv", "recent"}))
def test_policies_on_full_and_windowed_layers(policy):
    check_parity("llama", 8, policy)
    check_parity("gemma2", 40, policy)


@pytest.mark.parametrize("granularity", ["per_head", "per_layer", "shared"])
def test_granularities(granularity):
    check_parity("qwen2", 40, "snapkv", granularity=granularity)


def test_evicting_at_every_token():
    check_parity("llama", 8, "tova", buffer=1, sinks=0, window=0)


def check_parity(name: str, model_window: int, policy: str, **fields) -> None:
    lm, twin = model(name, model_window), stock(name, model_window)
    rollouts = sample(lm, config=cache(policy, **fields))
    sampled, limit = kvrl.sampler_logprobs(rollouts), bar(twin, rollouts)
    assert gap(sampled, oracle(twin, rollouts)) <= limit
    for backend in ("mask", "segments"):
        assert gap(sampled, replay(lm, rollouts, backend=backend)) <= limit
        dense = gap(sampled, replay(lm, rollouts, view="dense", backend=backend))
        assert dense > DENSE_MISMATCH or rings_alone(name, model_window)


@pytest.mark.parametrize("name, window", CASES)
def test_float64_leaves_no_room_for_a_small_mistake(name, window, double):
    lm, twin = model(name, window, torch.float64), stock(name, window, torch.float64)
    rollouts = sample(lm, config=cache("rkv"))
    truth = oracle(twin, rollouts, torch.float64)
    assert gap(replay(lm, rollouts, backend="mask"), truth) < 1e-10
    assert gap(replay(lm, rollouts, backend="segments"), truth) < 1e-10
    assert gap(kvrl.sampler_logprobs(rollouts), truth) < 2e-6  # recorded in fp32


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_lifetime_off_by_one_shows(shift, double, monkeypatch):
    monkeypatch.setattr(kvrl.KVTrace, "validate", lambda self: self)  # which would refuse it
    lm, rollouts = model("llama", 8, torch.float64), sample(model("llama", 8, torch.float64))
    truth = replay(lm, rollouts, backend="mask")
    shifted = [
        dataclasses.replace(r, trace=dataclasses.replace(r.trace, evicted_at_event=r.trace.evicted_at_event + shift))
        for r in rollouts
    ]
    assert gap(replay(lm, shifted, backend="mask"), truth) > DENSE_MISMATCH
    assert gap(oracle(stock("llama", 8, torch.float64), shifted, torch.float64), truth) > DENSE_MISMATCH


class Forgetful(ReplayContext):
    """A replay that ignores one keyword of the attention call."""

    ignored: dict

    def attend(self, call):
        return super().attend(dataclasses.replace(call, **self.ignored))

    def _check_window(self, call):
        """Would see an ignored window."""


@pytest.mark.parametrize(
    "name, window, ignored",
    [
        ("gemma2", 8, {"softcap": None}),
        ("gemma2", 8, {"window": None}),
        ("gemma2", 40, {"window": None}),
        ("gemma2", 40, {"scaling": 0.25}),
        ("gpt_oss", 8, {"s_aux": None}),
        ("granite", 8, {"scaling": 0.25}),
    ],
)
@pytest.mark.parametrize("backend", ["mask", "segments"])
def test_an_ignored_keyword_shows(name, window, ignored, backend, monkeypatch):
    lm = model(name, window)
    rollouts = sample(lm)
    right = replay(lm, rollouts, backend=backend)
    monkeypatch.setattr(Forgetful, "ignored", ignored, raising=False)
    monkeypatch.setattr(sys.modules["kvrl.views"], "ReplayContext", Forgetful)
    assert gap(replay(lm, rollouts, backend=backend), right) > DENSE_MISMATCH


@pytest.mark.parametrize("name, window", CASES)
def test_compression_off_gives_the_stock_logits(name, window, double):
    lm, twin, (ids,) = (
        model(name, window, torch.float64),
        stock(name, window, torch.float64),
        make_prompts([70]),
    )
    kvrl.rollout(lm, [[1]], cache=cache("dense"), sampling=kvrl.SamplingConfig(max_completion_length=1))
    given = {"input_ids": torch.tensor([ids]), "use_cache": False}
    with torch.no_grad():
        expected = twin(**given).logits
        assert gap(lm(**given).logits, expected) < 1e-10  # no context
        hidden = {}
        for backend in ("mask", "segments"):
            context = ReplayContext(None, len(ids), backend=backend)
            position = torch.arange(len(ids))[None]
            assert gap(lm(**given, position_ids=position, kv=context).logits, expected) < 1e-10
            hidden[backend] = decoder(lm)(**given, position_ids=position, kv=context).last_hidden_state
    assert gap(hidden["mask"], hidden["segments"]) < 1e-10
