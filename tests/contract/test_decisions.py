"""Contract 1, 2, 5, 9: when entries go, which ones may not, and what the memory holds."""

from __future__ import annotations

import pytest
import torch

from helpers import NEW, cache, make_prompts, model, sample, sampling
from kvrl.attention.sampler import DecodeContext
from kvrl.cache.policies import POLICIES, Policy
from kvrl.cache.trace import NEVER, num_events, occupancy
from kvrl.models.tiny_families import HEAD_DIM, KV_HEADS
from kvrl.sampler.engine import Engine

BUDGET, BUFFER = 24, 8


def alive(trace, query: int) -> torch.Tensor:
    """Which entries the query at a position sees, by the definition: bool [layers, heads, T]."""
    k = torch.arange(trace.num_tokens)
    return (k <= query) & (query < trace.evicted_at())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_schedule_and_occupancy(policy):
    for r in sample(config=cache(policy)):
        forwarded = r.num_tokens - 1  # the last sampled token has no forward
        expected = [t for t in range(BUDGET + BUFFER, forwarded + 1, BUFFER)]
        assert r.trace.evicted_at_event.tolist() == expected
        assert r.trace.events.dtype == torch.int16
        lifetimes = r.trace.evicted_at()
        assert bool((lifetimes[..., -1] == NEVER).all())
        for event, at in enumerate(expected):
            assert bool(((r.trace.events == event).sum(-1) == BUFFER).all())
            assert bool((alive(r.trace, at - 1).sum(-1) == BUDGET + BUFFER).all())  # the newest entry included
            assert bool((alive(r.trace, at).sum(-1) == BUDGET + 1).all())
        r.trace.validate()


@pytest.mark.parametrize("tokens, held, events", [
    (0, 0, 0), (1, 1, 0), (31, 31, 0), (32, 24, 1), (33, 25, 1), (39, 31, 1), (40, 24, 2), (41, 25, 2),
])  # fmt: skip
def test_counts_by_hand(tokens, held, events):
    assert occupancy(tokens, BUDGET, BUFFER) == held
    assert num_events(tokens, BUDGET, BUFFER) == events


def test_the_last_token_has_no_decision():
    """31 tokens forwarded and one drawn: the slot was never full. One more fires exactly once."""
    (r,) = sample(prompts=make_prompts([22]), new=10)
    assert r.num_tokens == BUDGET + BUFFER and r.trace.num_events == 0 and bool((r.trace.events == -1).all())
    (r,) = sample(prompts=make_prompts([22]), new=11)
    assert r.trace.num_events == 1


class Constant(Policy):
    """Every score is the same."""

    name = "constant"
    paper = "none"
    value: float = 0.0

    def score(self, entries):
        return torch.full(entries.position.shape, self.value)


@pytest.fixture
def constant(monkeypatch):
    monkeypatch.setitem(POLICIES, "constant", Constant)


@pytest.mark.parametrize("value", [0.0, -1e30, 1e30])
@pytest.mark.parametrize("granularity", ["per_head", "per_layer", "shared"])
def test_protected_entries_survive_ties_and_newer_ones_stay(constant, value, granularity):
    """Among equals the oldest candidates go: everything but 4 sinks, in order, buffer by buffer."""
    config = cache("constant", params={"value": value}, granularity=granularity, window=5)
    (r,) = sample(prompts=make_prompts([42]), config=config)
    expected = torch.full((r.num_tokens,), -1)
    for event in range(r.trace.num_events):
        expected[4 + 8 * event : 12 + 8 * event] = event
    assert torch.equal(r.trace.events.long(), expected.expand(2, 2, -1))


class Perverse(Constant):
    """Wants to evict exactly what must stay, and to keep the middle."""

    name = "perverse"

    def score(self, entries):
        middle = entries.position[..., -1:].float() / 2
        return -(entries.position - middle).abs().mul(1e30)


@pytest.mark.parametrize("window, sinks", [(0, 0), (0, 4), (7, 0), (9, 3)])
def test_sinks_and_window_are_honoured(monkeypatch, window, sinks):
    monkeypatch.setitem(POLICIES, "perverse", Perverse)
    for r in sample(config=cache("perverse", window=window, sinks=sinks)):
        assert bool((r.trace.events[..., :sinks] == -1).all())
        for event, at in enumerate(r.trace.evicted_at_event.tolist()):
            gone = (r.trace.events == event).nonzero()[:, -1]
            assert gone.max() < at - window and gone.min() >= sinks
            if event == 0:  # the policy got its way with the others; of two equals the older went
                wanted = sorted(range(sinks, at - window), key=lambda k: (-abs(k - (at - 1) / 2), k))[:BUFFER]
                assert set(gone.tolist()) == set(wanted)


def test_the_prompt_stays_when_asked(monkeypatch):
    monkeypatch.setitem(POLICIES, "perverse", Perverse)
    prompts = make_prompts([3, 15, 16])
    for r in sample(prompts=prompts, config=cache("perverse", protect_prompt=True)):
        assert r.trace.num_events > 0
        assert bool((r.trace.events[..., : len(r.prompt_ids)] == -1).all())
    assert any(bool((r.trace.events[..., :15] >= 0).any()) for r in sample(prompts=prompts, config=cache("perverse")))


@pytest.mark.parametrize("policy", ["rkv", "knorm", "h2o"])
def test_sets_by_granularity(policy):
    """per_head: heads differ; per_layer: heads agree, layers differ; shared: all agree."""
    for granularity, heads_agree, layers_agree in (
        ("per_head", False, False), ("per_layer", True, False), ("shared", True, True)
    ):  # fmt: skip
        events = sample(config=cache(policy, granularity=granularity))[2].trace.events
        assert torch.equal(events[:, 0], events[:, 1]) == heads_agree
        assert torch.equal(events[0], events[1]) == layers_agree


def test_entries_that_a_window_hides_go_first():
    (r,) = sample(model("mistral", 34), make_prompts([42]), cache("knorm", sinks=0, window=0), new=20)
    lifetimes = r.trace.evicted_at().long()
    for event, at in enumerate(r.trace.evicted_at_event.tolist()):
        hidden = torch.arange(r.num_tokens) <= at - 34
        assert bool((lifetimes[..., hidden] <= at).all()), event


@pytest.mark.parametrize("name, window, entries", [
    ("llama", 8, 2 * 32), ("gemma2", 8, 32 + 2 * 8), ("gemma2", 40, 3 * 32), ("mistral", 8, 2 * 8)
])  # fmt: skip
def test_kv_bytes_by_hand_and_constant(name, window, entries):
    engine = Engine(model(name, window), cache(), sampling(), num_slots=3, max_prompt_length=64)
    expected = 2 * 4 * (3 + 1) * KV_HEADS * HEAD_DIM * entries  # K and V, fp32, a staging row
    assert engine.kv_bytes == expected
    held = {name: t.data_ptr() for name, t in vars(engine.slots).items() if isinstance(t, torch.Tensor)}
    rollouts = engine.run(make_prompts([60, 3, 18, 40]))
    assert rollouts[0].stats["kv_bytes"] == engine.kv_bytes == expected
    now = {name: t.data_ptr() for name, t in vars(engine.slots).items() if isinstance(t, torch.Tensor)}
    assert now == held  # allocated once, compacted in place


def test_dense_kv_bytes_by_hand():
    engine = Engine(model("gemma2"), cache(), sampling(NEW), num_slots=3, max_prompt_length=60)
    assert engine.dense_kv_bytes == 2 * 4 * 4 * KV_HEADS * HEAD_DIM * (90 + 2 * 8)
    dense = Engine(model("gemma2"), cache("dense"), sampling(NEW), num_slots=3, max_prompt_length=60)
    assert dense.kv_bytes == dense.dense_kv_bytes


def test_compaction_runs_after_the_whole_forward(monkeypatch):
    """A set shared by all layers needs every layer's scores: no layer sees an eviction within a step."""
    seen = []
    original = DecodeContext.attend

    def attend(self, call):
        seen.append((call.layer, self.alive.sum(dim=-1).flatten().tolist()))
        return original(self, call)

    monkeypatch.setattr(DecodeContext, "attend", attend)
    sample(prompts=make_prompts([30]), new=6)
    assert (
        [n for layer, (n,) in seen if layer == 0] == [n for layer, (n,) in seen if layer == 1] == [31, 32, 25, 26, 27]
    )
