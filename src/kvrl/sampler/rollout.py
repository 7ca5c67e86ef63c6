"""`kvrl.rollout`: prompts in, rollouts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.sampler.request import Continue, Progress
from kvrl.sampler.types import Rollout


def rollout(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    cache: CacheConfig,
    sampling: SamplingConfig,
    seed: int = 0,
    slots: int | None = None,
    kv_memory: int | None = None,
    tokenizer: Any = None,
    request_ids: Sequence[int] | None = None,
    every: Sequence[int | Sequence[int]] | None = None,
    on_turn: Continue | None = None,
    on_step: Callable[[Progress], None] | None = None,
    max_prompt_length: int | None = None,
    native_kernels: bool = True,
    cuda_graphs: bool = False,
) -> list[Rollout]:
    """Sample completions of token-id prompts in a fixed KV budget.

    Returns `sampling.num_generations` consecutive rollouts for each prompt. slots: sequences decoded together
    (default: all, at most 128; above 4 rounded up to a multiple of 4). kv_memory: bytes that K and V of all slots may
    take (the number follows from them, up to `slots` if that is given); at a given number a request's bits do not
    depend on the others. With the full cache a slot is as long as the longest prompt needs: give
    max_prompt_length to fix it, or bits depend on that length. every: the window of each prompt's beacons, or a list of
    its windows in turn (the last for the rest), of the set that the cache section names (None: as that section says).
    native_kernels: attend by a compiled kernel (CPU only). cuda_graphs: capture the decode step (CUDA only).
    Raises KvrlError for a model, policy, budget or prompt that cannot be run exactly.
    """
    if not len(prompts):
        return []
    for name, given, kind in (("cache", cache, CacheConfig), ("sampling", sampling, SamplingConfig)):
        if not isinstance(given, kind):
            raise KvrlError(f"{name}: is a {type(given).__name__}; give a kvrl.{kind.__name__}")
    requests = len(prompts) * sampling.num_generations
    num_slots = slots if slots is not None else requests if kv_memory is not None else min(128, requests)
    longest = max_prompt_length if max_prompt_length is not None else max(_length(p) for p in prompts)
    engine = Engine(
        model, cache, sampling, num_slots=num_slots, max_prompt_length=longest, tokenizer=tokenizer,
        kv_memory=kv_memory, native_kernels=native_kernels, cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return engine.run(prompts, seed=seed, request_ids=request_ids, every=every, on_turn=on_turn, on_step=on_step)


def _length(prompt: Any) -> int:
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise KvrlError(f"prompts: {str(prompt)[:40]!r} is not a list of token ids; encode text by a tokenizer")
    return len(prompt)
