"""Tiny models, prompts and comparisons that the tests of cache, attention, rollout and contract share."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

import kvrl
from kvrl.cache.trace import KVTrace, num_events
from kvrl.eval.oracle import incremental_error, oracle_logprobs
from kvrl.models.tiny_families import BOS, VOCAB, build_family

LIMIT = 1e-4  # no fp32 difference of parity may exceed it, whatever the stock model's own error
DENSE_MISMATCH = 1e-2  # what a dense learner must be off by, or the test could not tell
LENGTHS = (4, 18, 42)  # one event late in the completion, several there, and two in the prompt
NEW = 30


@functools.cache
def model(name: str = "llama", window: int = 8, dtype: torch.dtype = torch.float32):
    """The family's tiny model as kvrl runs it. Shared between tests: leave weights and mode as they are."""
    return _with_experts(build_family(name, window=window, dtype=dtype), "batched_mm")


@functools.cache
def stock(name: str = "llama", window: int = 8, dtype: torch.dtype = torch.float32):
    """The same weights in a separate, untouched model with eager attention: the oracle's."""
    twin = build_family(name, window=window, dtype=dtype).eval()
    twin.set_attn_implementation("eager")
    return _with_experts(twin, "eager")


def _with_experts(lm, implementation: str):
    """Experts of a float64 model cannot be computed by grouped products, the default."""
    if lm.dtype is torch.float64 and hasattr(lm.config, "num_experts_per_tok"):
        lm.set_experts_implementation(implementation)
    return lm


def make_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """BOS and random tokens, one prompt for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [[BOS, *torch.randint(3, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]


def cache(policy: str = "rkv", **fields) -> kvrl.CacheConfig:
    """Budget 24, buffer 8, with windows that fit into it."""
    given = {"budget": 24, "buffer": 8, **({"window": 4} if policy in ("rkv", "snapkv") else {}), **fields}
    if policy == "snapkv":
        given.setdefault("params", {"prompt_window": 8})
    return kvrl.CacheConfig(policy=policy, **given)


def sampling(new: int = NEW, **fields) -> kvrl.SamplingConfig:
    """Completions of a fixed length unless EOS ids are given."""
    return kvrl.SamplingConfig(**{"max_completion_length": new, "eos_token_ids": [], **fields})


def sample(lm=None, prompts=None, config=None, *, new: int = NEW, seed: int = 0, **kwargs) -> list[kvrl.Rollout]:
    """Rollouts of the tiny llama under R-KV, or of what is given."""
    lm = model() if lm is None else lm
    prompts = make_prompts() if prompts is None else prompts
    fields = kwargs.pop("sampling_fields", {})
    return kvrl.rollout(lm, prompts, cache=config or cache(), sampling=sampling(new, **fields), seed=seed, **kwargs)


@torch.no_grad()
def replay(lm, rollouts, **kwargs) -> torch.Tensor:
    return kvrl.logprobs(lm, rollouts, **kwargs)


def oracle(twin, rollouts: Sequence[kvrl.Rollout], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The oracle's log-probs of every completion token, [N, max C], 0 beyond."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts), dtype=dtype)
    for i, r in enumerate(rollouts):
        logps = oracle_logprobs(twin, r.token_ids, len(r.prompt_ids), r.trace.evicted_at(), temperature=r.temperature)
        out[i, : len(logps)] = logps
    return out


def bar(twin, rollouts: Sequence[kvrl.Rollout]) -> float:
    """Three times the stock model's own incremental-against-full error on the longest rollout, capped."""
    longest = max(rollouts, key=lambda r: r.num_tokens)
    return min(LIMIT, 3 * incremental_error(twin, longest.token_ids, 1))


def gap(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor | None = None) -> float:
    """Largest absolute difference."""
    difference = (a.double() - b.double()).abs()
    return (difference if where is None else difference[where]).max().item()


def assert_same_bits(a: kvrl.Rollout, b: kvrl.Rollout) -> None:
    """Tokens, log-probs and evictions of two rollouts are equal to the bit."""
    assert a.token_ids == b.token_ids
    assert torch.equal(a.logprobs, b.logprobs)
    assert torch.equal(a.trace.events, b.trace.events)
    assert torch.equal(a.trace.evicted_at_event, b.trace.evicted_at_event)


def random_trace(tokens: int, budget: int, buffer: int, seed: int, heads: int = 2) -> KVTrace:
    """Lifetimes of a sampler that evicts at random: one layer."""
    g = torch.Generator().manual_seed(seed)
    events = torch.full((1, heads, tokens), -1, dtype=torch.int16)
    count = num_events(tokens - 1, budget, buffer)
    at = budget + buffer + buffer * torch.arange(count, dtype=torch.int32)
    for i, t in enumerate(at.tolist()):
        for h in range(heads):
            alive = (events[0, h, :t] < 0).nonzero()[:, 0]
            events[0, h, alive[torch.randperm(len(alive), generator=g)[:buffer]]] = i
    return KVTrace(events, at, budget, buffer).validate()
