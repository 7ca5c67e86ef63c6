"""Decode speed: tokens per second of the engine at a number of slots and a context, compaction included."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from kvrl.attention.probe import probe, text_config
from kvrl.bench.machine import Machine
from kvrl.cache.config import CacheConfig
from kvrl.cache.memory import fitting_slots, slot_bytes
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.sampler.request import Progress


@dataclass(frozen=True)
class DecodeSpeed:
    """Of one engine at one context, over a whole round of compactions."""

    slots: int
    context: int
    """Tokens of each sequence before the first measured one."""
    entries: int
    """KV entries that a slot holds, on average over the measured steps."""
    tokens_per_second: float
    """Compaction included."""
    step_seconds: float
    """Median of a step, without compaction."""
    compaction_share: float
    """Of the time."""
    roofline_share: float
    """The machine's least time for a step over the measured mean."""
    kv_bytes: int


def slots_within(model: nn.Module, cache: CacheConfig, kv_bytes: int, max_tokens: int) -> int:
    """Slots whose K and V, the staging row included, fit into so many bytes; one at least, as engines round them."""
    dtype = next(model.parameters()).dtype
    return most_slots(slot_bytes(probe(model), cache, max_tokens=max_tokens, dtype=dtype), kv_bytes)


def most_slots(row: int, kv_bytes: int) -> int:
    """Slots of `row` bytes in kv_bytes, one at least: what is measured is printed with its bytes."""
    return max(1, fitting_slots(row, kv_bytes))


def decode_speed(
    model: nn.Module, machine: Machine, cache: CacheConfig, *, slots: int, context: int, steps: int, seed: int = 0,
    cuda_graphs: bool = False,
) -> DecodeSpeed:  # fmt: skip
    """Measure `steps` decode steps of `slots` completions after one shared prompt of `context` tokens.

    steps: at least the buffer, or the mean leaves compactions out.
    """
    sampling = SamplingConfig(max_completion_length=steps + 2, num_generations=slots, eos_token_ids=[])
    engine = Engine(model, cache, sampling, num_slots=slots, max_prompt_length=context, cuda_graphs=cuda_graphs)
    prompt = random_prompt(text_config(model).vocab_size, context, seed)
    times: list[float] = []

    def note(progress: Progress) -> None:
        times.append(time.perf_counter())

    engine.run([prompt], seed=seed, on_step=note)
    seconds = [b - a for a, b in zip(times, times[1:], strict=False)]
    usual, mean = statistics.median(seconds), statistics.mean(seconds)
    grown = context + steps // 2
    entries = grown if cache.is_dense else min(grown, cache.budget + cache.buffer // 2)
    return DecodeSpeed(
        slots=slots,
        context=context,
        entries=entries,
        tokens_per_second=slots / mean,
        step_seconds=usual,
        compaction_share=max(0.0, 1 - usual / mean),
        roofline_share=machine.decode_seconds(model, engine.spec, slots, entries) / mean,
        kv_bytes=engine.kv_bytes,
    )


def random_prompt(vocab: int, tokens: int, seed: int) -> list[int]:
    """Token ids that are not special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab, (tokens,), generator=generator).tolist()
