"""Random streams: counter-based, so a number depends on its key alone."""

from __future__ import annotations

import pytest
import torch

import kvrl
from helpers import cache, make_prompts, model, sample, sampling
from kvrl.sampler import engine as engine_module
from kvrl.sampler.sampling import draw
from kvrl.streams import fold, stream_key, uniform

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """The finaliser in Python's own integers, from the paper."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("parts", [(0,), (0, 0), (7, 3, 1), (-1, 2), (2**63 + 5, 9), (12345678901234567890,)])
def test_keys_against_python_integers(parts):
    key = 0
    for part in parts:
        key = splitmix((key + ((part & MASK) + 1) * 0x9E3779B97F4A7C15) & MASK)
    assert stream_key(*parts) & MASK == key
    number = float(uniform(torch.tensor(stream_key(*parts))))
    assert number == (splitmix(key) >> 12) * 2.0**-52


def test_streams_differ():
    keys = {stream_key(seed, request, g) for seed in range(6) for request in range(30) for g in range(6)}
    assert len(keys) == 6 * 30 * 6
    assert stream_key(1, 2) != stream_key(2, 1)


def test_uniform_numbers_are_uniform_and_uncorrelated():
    x = uniform(fold(torch.tensor(stream_key(0)), torch.arange(100_000)))
    assert float(x.min()) >= 0 and float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) < 0.005 and abs(float(x.var()) - 1 / 12) < 0.002
    y = uniform(fold(torch.tensor(stream_key(1)), torch.arange(100_000)))
    assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1])) < 0.02


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_one_number_for_each_token_of_a_request(slots, monkeypatch):
    """Whatever the slots: token t of (seed, request, sample) uses uniform(fold(stream, t)), once."""
    used = []

    def record(logits, uniforms, config):
        used.append(uniforms)
        return draw(logits, uniforms, config)

    monkeypatch.setattr(engine_module, "draw", record)
    sample(prompts=make_prompts([5, 9]), new=6, seed=4, slots=slots, sampling_fields={"num_generations": 2})
    drawn = {float(u) for batch in used for u in batch}
    expected = {
        float(uniform(fold(torch.tensor(stream_key(4, p, g)), t))) for p in (0, 1) for g in (0, 1) for t in range(6)
    }
    assert expected <= drawn


def test_seed_and_request_decide():
    prompts = make_prompts([9, 9], seed=3)
    given = {"cache": cache(), "sampling": sampling(12), "slots": 2}
    a, b = kvrl.rollout(model(), [prompts[0]] * 2, seed=1, request_ids=[5, 6], **given)
    assert a.completion_ids != b.completion_ids
    c, d = kvrl.rollout(model(), [prompts[0]] * 2, seed=1, request_ids=[6, 5], **given)
    assert (c.completion_ids, d.completion_ids) == (b.completion_ids, a.completion_ids)
    e, _ = kvrl.rollout(model(), [prompts[0]] * 2, seed=2, request_ids=[5, 6], **given)
    assert e.completion_ids != a.completion_ids


def test_the_global_generator_is_neither_read_nor_advanced():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    a = sample(new=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert [r.completion_ids for r in sample(new=5)] == [r.completion_ids for r in a]
