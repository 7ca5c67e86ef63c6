"""What a run tells while it samples, and how many slots a memory figure gives."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.progress import Progress as Bar

import kvrl
from helpers import NEW, assert_same_bits, cache, make_prompts, model, sample, sampling
from kvrl.attention.probe import prepare, probe
from kvrl.cache.memory import slots_within
from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.progress import SamplingTask, sampling_bar
from kvrl.sampler.engine import Engine
from kvrl.sampler.request import Progress
from kvrl.train.config import Config
from kvrl.train.preflight import check_memory


def test_progress_counts_requests_and_tokens():
    seen: list[Progress] = []
    rollouts = sample(prompts=make_prompts([4, 5]), slots=2, new=3, sampling_fields={"num_generations": 2},
                      on_step=seen.append)  # fmt: skip
    # Two prompts of two samples in two slots, three tokens each, the first from the prefill: two steps a pair
    assert seen == [
        Progress(steps=1, active=2, waiting=2, done=0, total=4, tokens=2),
        Progress(steps=2, active=2, waiting=2, done=2, total=4, tokens=4),
        Progress(steps=3, active=2, waiting=0, done=2, total=4, tokens=6),
        Progress(steps=4, active=2, waiting=0, done=4, total=4, tokens=8),
    ]
    assert sum(len(r.completion_ids) for r in rollouts) == 4 * 3


def test_a_step_that_feeds_a_beacon_draws_nothing():
    lm, tokenizer = build_tiny_model(build_tiny_tokenizer(["a", "b"]), 0), build_tiny_tokenizer(["a", "b"])
    kvrl.add_beacon(lm, tokenizer, every=2)
    seen: list[Progress] = []
    (r,) = kvrl.rollout(lm, [[1, 5]], cache=kvrl.CacheConfig(policy="beacon"), sampling=sampling(6, eos_token_ids=[]),
                        on_step=seen.append)  # fmt: skip
    # fed: a b [beacon] c d [beacon] e; the last is not
    assert [p.tokens for p in seen] == [1, 2, 2, 3, 4, 4, 5] and len(r.completion_ids) == 6


def test_no_step_runs_with_an_empty_slot_while_requests_wait():
    seen: list[Progress] = []
    ids = list(range(3, 60))  # about half of the vocabulary ends a completion: slots fall free at every step
    kvrl.rollout(
        model(), make_prompts([4, 5, 6, 7]), cache=cache(), sampling=sampling(12, eos_token_ids=ids, num_generations=4),
        slots=4, on_step=seen.append,
    )  # fmt: skip
    waiting_before = [16 - 4, *(p.waiting for p in seen)]
    assert all(p.active == 4 for p, waiting in zip(seen, waiting_before, strict=False) if p.waiting > 0 and waiting > 0)
    assert seen[-1].done == 16 and seen[-1].waiting == 0


def test_the_bar_follows_runs_and_is_absent_without_a_terminal():
    bar = Bar(console=Console(file=io.StringIO(), force_terminal=True))
    task = SamplingTask(bar)
    task(Progress(1, 2, 2, 0, 4, 2))
    task(Progress(2, 2, 0, 3, 4, 4))
    (line,) = bar.tasks
    assert line.visible and (line.completed, line.total) == (3, 4) and "tok/s" in line.description
    task(Progress(3, 1, 0, 4, 4, 5))
    assert not bar.tasks[0].visible
    task(Progress(1, 1, 0, 0, 9, 1))  # the next run starts anew
    assert bar.tasks[0].visible and (bar.tasks[0].completed, bar.tasks[0].total) == (0, 9)
    with sampling_bar(Console(file=io.StringIO())) as on_step:
        assert on_step is None


def test_slots_follow_from_bytes():
    spec = probe(prepare(model()))
    row = 2 * spec.num_layers * spec.kv_heads * (24 + 8) * spec.head_dim * 4  # K and V of one slot in float32

    def fit(rows: float) -> int:
        return slots_within(int(rows * row), spec, cache(), max_tokens=50, dtype=torch.float32)

    assert [fit(rows) for rows in (2, 3.9, 4, 5, 8.9, 9, 12.5, 13)] == [1, 2, 3, 4, 4, 8, 8, 12]
    # one row is the staging row
    with pytest.raises(KvrlError, match=f"rollout.kv_memory: {2 * row - 1} bytes are below the {2 * row} that one"):
        fit(2 - 0.5 / row)
    for held, smaller in (
        (cache(), "cache.budget or cache.buffer"),
        (cache("dense"), "sampling.max_completion_length"),
    ):
        with pytest.raises(KvrlError, match=f"or lower {smaller}$"):
            slots_within(1, spec, held, max_tokens=50, dtype=torch.float32)
    engine = Engine(model(), cache(), sampling(), num_slots=100, max_prompt_length=8, kv_memory=9 * row)
    assert engine.num_slots == 8 and engine.kv_bytes == 9 * row
    assert Engine(model(), cache(), sampling(), num_slots=3, max_prompt_length=8, kv_memory=9 * row).num_slots == 3


def test_a_memory_limit_changes_no_value():
    spec = probe(prepare(model()))
    row = 2 * spec.num_layers * spec.kv_heads * (24 + 8) * spec.head_dim * 4
    limited = sample(prompts=make_prompts([4, 9, 18]), kv_memory=5 * row, sampling_fields={"num_generations": 2})
    counted = sample(prompts=make_prompts([4, 9, 18]), slots=4, sampling_fields={"num_generations": 2})
    for a, b in zip(limited, counted, strict=True):
        assert_same_bits(a, b)
    assert limited[0].stats["kv_bytes"] == 5 * row and len(limited[0].completion_ids) == NEW


def test_the_configuration_takes_sizes_and_the_run_is_refused_before_it_starts():
    config = Config(rollout={"kv_memory": "3KiB"}, sampling={"max_completion_length": 8})
    assert config.rollout.kv_memory == 3072
    assert Config(rollout={"kv_memory": "2GiB"}, train={"prompts_per_step": 40}).slots == 40 * 8  # no cap by count
    lm = prepare(model())
    with pytest.raises(KvrlError, match="rollout.kv_memory: 3072 bytes are below"):
        check_memory(config, lm, probe(lm), [cache()], 10)
