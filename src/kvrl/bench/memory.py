"""The memory of a rollout: K and V as allocated and the process's peak, in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvrl.attention.probe import prepare, text_config
from kvrl.bench.process import PeakMemory, in_new_process
from kvrl.bench.rollout import random_prompt
from kvrl.bench.settings import Settings
from kvrl.cache.config import CacheConfig
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.train.setup import load_model

NEW_TOKENS = 8  # after a prompt that fills the rest


@dataclass(frozen=True)
class RolloutMemory:
    """Of sequences that reach their full length under one cache."""

    policy: str
    kv_bytes: int
    """As allocated, the staging row included."""
    peak_bytes: int
    """The most that the process (or the card) held above what the loaded model takes."""
    trace_bytes: int
    """Of one sequence: the evictions' indices, without their positions."""
    trace_position_bytes: int
    trace_entries: int
    """Layers times KV heads times tokens."""


def rollout_memory(settings: Settings, folder: str, *, dense: bool) -> RolloutMemory:
    """Measured in a new process, so that its peak memory is its own."""
    s = settings
    given = {"path": folder, "dtype": s.dtype, "policy": "dense" if dense else s.policy, "budget": s.budget,
             "buffer": s.buffer, "tokens": s.tokens, "slots": s.slots, "threads": torch.get_num_threads(),
             "seed": s.seed}  # fmt: skip
    return RolloutMemory(**in_new_process("kvrl.bench.memory", given))


def measure(given: dict[str, Any]) -> RolloutMemory:
    """What the new process does: a group of `slots` completions of one long prompt."""
    torch.set_num_threads(given["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepare(load_model(given["path"], given["dtype"], merge=True)[0].to(device)).eval()
    cache = CacheConfig(policy=given["policy"], budget=given["budget"], buffer=given["buffer"])
    sampling = SamplingConfig(max_completion_length=NEW_TOKENS, num_generations=given["slots"], eos_token_ids=[])
    prompt = random_prompt(text_config(model).vocab_size, given["tokens"] - NEW_TOKENS, given["seed"])
    peak = PeakMemory(device)
    engine = Engine(model, cache, sampling, num_slots=given["slots"], max_prompt_length=len(prompt))
    trace = engine.run([prompt], seed=given["seed"])[0].trace
    return RolloutMemory(
        given["policy"], engine.kv_bytes, peak.bytes, trace.events.nbytes, trace.evicted_at_event.nbytes,
        trace.events.numel(),
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asdict(measure(json.loads(sys.argv[1])))))
