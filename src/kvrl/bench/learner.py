"""The learner's cost: forward and backward over one sequence, replayed and dense, each in a process of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from kvrl.activations import planned_trace
from kvrl.attention.probe import prepare, probe, text_config
from kvrl.bench.machine import median_seconds
from kvrl.bench.process import PeakMemory, in_new_process
from kvrl.cache.trace import KVTrace
from kvrl.learner import Scorer
from kvrl.sampler.types import Rollout
from kvrl.train.setup import checkpoint_activations, load_model
from kvrl.views import View

PROMPT = 64  # tokens of a sequence that are not scored


@dataclass(frozen=True)
class LearnerCost:
    """Of one forward and backward over one sequence."""

    view: View
    backend: str
    tokens: int
    seconds: float
    """Median."""
    peak_bytes: int
    """Of the process (a CPU) or of what the card had allocated, above what the loaded model takes."""


def learner_cost(
    path: str, dtype: str, *, view: View, backend: str, tokens: int, budget: int, buffer: int, checkpointing: bool,
    repeats: int,
) -> LearnerCost:  # fmt: skip
    """Measured in a new process, so that its peak memory is its own."""
    given = {"path": path, "dtype": dtype, "view": view, "backend": backend, "tokens": tokens, "budget": budget,
             "buffer": buffer, "checkpointing": checkpointing, "repeats": repeats,
             "threads": torch.get_num_threads()}  # fmt: skip
    return LearnerCost(**in_new_process("kvrl.bench.learner", given))


def measure(given: dict[str, Any]) -> LearnerCost:
    """What the new process does."""
    torch.set_num_threads(given["threads"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepare(load_model(given["path"], given["dtype"], merge=True)[0].to(device)).train()
    if given["checkpointing"]:
        checkpoint_activations(model)
    rollout = synthetic_rollout(model, given["tokens"], given["budget"], given["buffer"])
    scorer = Scorer(model, backend=given["backend"])

    def step() -> None:
        scorer([rollout], view=given["view"]).logps.mean().backward()
        model.zero_grad(set_to_none=True)

    peak = PeakMemory(device)
    seconds = median_seconds(step, given["repeats"], device)
    return LearnerCost(given["view"], given["backend"], given["tokens"], seconds, peak.bytes)


def synthetic_rollout(model: nn.Module, tokens: int, budget: int, buffer: int) -> Rollout:
    """Random tokens under a trace with the schedule of a real one: which entries go does not change the cost."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, text_config(model).vocab_size, (tokens,), generator=generator).tolist()
    scored = tokens - PROMPT
    trace: KVTrace = planned_trace(probe(model), tokens, budget, buffer)
    return Rollout(
        ids[:PROMPT], ids[PROMPT:], torch.zeros(scored), torch.ones(scored, dtype=torch.bool), trace, "length"
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(json.loads(sys.argv[1])))))
