"""What CUDA graphs ask of decode steps and compaction, shown on a CPU: fixed shapes, no sync, no host constants."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvrl
from helpers import cache, make_prompts, model, sampling
from kvrl.cache import compaction
from kvrl.cache.policies import POLICIES
from kvrl.sampler import engine as engines
from kvrl.sampler.engine import Engine

FORBIDDEN = {"_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "masked_select", "item", "unique"}


class OnDevice(TorchDispatchMode):
    """Refuses what a capture refuses: values that the host reads, and tensors made of its numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.split("::")[1] not in FORBIDDEN, func
        return func(*args, **(kwargs or {}))


class Recorded:
    """Stands for a graph: the same runs before the capture, the same static input, operations checked."""

    made: list[str] = []

    def __init__(self, step, shape, device, what):
        self.step, self.inputs = step, torch.zeros(shape, dtype=torch.int64)
        Recorded.made.append(what)
        for _ in range(3):
            self.run()

    def run(self):
        with OnDevice(), mock.patch("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True):
            return self.step(self.inputs)

    def __call__(self, inputs):
        self.inputs.copy_(inputs)  # of the shape that was captured
        return self.run()


@pytest.fixture
def recorded(monkeypatch):
    """Puts `Recorded` in the graph's place; returns the names of what is captured from then on."""
    monkeypatch.setattr(Recorded, "made", [])

    def record() -> list[str]:
        monkeypatch.setattr(engines, "Captured", Recorded)
        monkeypatch.setattr(compaction, "Captured", Recorded)
        return Recorded.made

    return record


@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 8), ("gemma2", 40), ("gpt_oss", 40)])
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_can_be_captured_and_are_the_same(recorded, policy, name, window):
    if name != "llama" and policy not in ("rkv", "h2o"):
        pytest.skip("one policy with queries and one with state")
    config = cache(policy) if policy != "dense" else kvrl.CacheConfig(policy="dense")
    prompts = make_prompts()

    def run(graphs):
        engine = Engine(
            model(name, window), config, sampling(), num_slots=3, max_prompt_length=64, native_kernels=False,
            cuda_graphs=graphs,
        )  # fmt: skip
        engine.cuda_graphs = graphs
        return engine.run(prompts, seed=3)

    plain = run(False)
    made = recorded()
    captured = run(True)
    routed = name == "gpt_oss"  # a mixture of experts records its routing, which a graph cannot
    wanted = ["the model's decode step"] + ([] if policy == "dense" else ["compaction"])
    assert made == ([] if routed else wanted)
    for a, b in zip(plain, captured, strict=True):
        assert a.completion_ids == b.completion_ids and a.logprobs.equal(b.logprobs)
        assert torch.equal(a.trace.events, b.trace.events)


def test_a_run_too_short_to_evict_captures_no_compaction(recorded):
    made = recorded()
    engine = Engine(model(), cache("rkv"), sampling(10), num_slots=3, max_prompt_length=10, native_kernels=False)
    engine.cuda_graphs = True
    rollouts = engine.run(make_prompts((4, 8)), seed=3)
    assert made == ["the model's decode step"] and not any(r.trace.num_events for r in rollouts)


@pytest.mark.parametrize("graphs", [False, True])
def test_scores_that_are_not_numbers_stop_the_run(monkeypatch, recorded, graphs):
    engine = Engine(model(), cache("rkv"), sampling(), num_slots=3, max_prompt_length=64, native_kernels=False)
    monkeypatch.setattr(type(engine.slots.policy), "score", lambda self, e: torch.full_like(e.keys[..., 0], torch.nan))
    recorded()
    engine.cuda_graphs = graphs
    with pytest.raises(kvrl.KvrlError, match="rkv gave scores that are not numbers at token 32"):
        engine.run([[5, 6, 7]], seed=3)
