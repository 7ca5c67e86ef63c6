"""What `kvrl bench` runs: one record for all four benchmarks, whose defaults are those that the bars are meant for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from kvrl.bench.peers import parse_peers
from kvrl.errors import KvrlError

What = Literal["rollout", "learner", "step", "memory"]
DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Settings:
    """The benchmark and its sizes. Lengths are in tokens."""

    what: What = "rollout"
    model: str = "smollm2-135m"
    dtype: DTypeName = "bfloat16"
    threads: int | None = None
    """Arithmetic threads. None: PyTorch's."""
    policy: str = "rkv"
    budget: int = 512
    buffer: int = 128
    repeats: int = 3
    """Measurements whose median counts."""
    seed: int = 0
    peers: tuple[str, ...] = ()
    kv_memory: int = 2 << 30
    """rollout: bytes of K and V that kvrl and its peers may fill."""
    prompt_length: int = 64
    contexts: tuple[int, ...] = (64, 1000, 2000, 4000, 6000, 8000)
    """rollout: tokens before the first measured one."""
    new_tokens: int = 8000
    """rollout: of each sequence, at equal memory."""
    sequences: int = 16
    """rollout: of the case with a fixed number."""
    fixed_tokens: int = 4096
    """rollout: new tokens of each sequence in that case."""
    check_tokens: int = 1024
    """rollout: new tokens of the full run that the integral is compared with."""
    short_tokens: int = 128
    """rollout: new tokens where nothing is evicted."""
    short_sequences: int = 128
    peer_steps: int = 16
    """rollout: decode steps of one measurement of a peer with a full cache."""
    fit: Literal["end", "each"] = "end"
    """rollout: full-cache peers get as many sequences as fit at the end, or anew at each context."""
    read_floats: int = 128 << 20
    """rollout: numbers that are read to measure the bandwidth."""
    matrix_side: int = 4096
    """rollout: of the matrices that are multiplied to measure the matrix rate."""
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    """learner: of the sequence."""
    gradient_checkpointing: bool = False
    completions: int = 32
    """step: of one step, 8 to a prompt."""
    completion_length: int = 1024
    tokens: int = 8192
    """memory: of each sequence."""
    slots: int = 8
    """memory: sequences held."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """The benchmark's defaults, or those of --quick, under the flags that were given. KvrlError for bad sizes."""
        defaults = replace(QUICK if args.quick else cls(), what=args.what)
        if args.what in ONCE:
            defaults = replace(defaults, repeats=1)
        if args.what == "memory":
            defaults = replace(defaults, completions=GROUP)
        given: dict[str, Any] = {f.name: getattr(args, f.name, None) for f in fields(cls)}
        for name in ("contexts", "lengths"):
            given[name] = given[name] and tuple(given[name])
        given["peers"] = None if given["peers"] is None else parse_peers(given["peers"], args.what)
        settings = replace(defaults, **{name: value for name, value in given.items() if value is not None})
        settings.check()
        return settings

    def check(self) -> None:
        """Raise KvrlError for sizes that measure nothing."""
        if self.what != "rollout" and self.policy in ("dense", "beacon"):
            raise KvrlError(
                f"--policy: {self.policy} evicts nothing by a budget, which is what {self.what} measures; name "
                "another of `kvrl policies`"
            )
        if self.threads is not None and self.threads > MOST_THREADS:
            raise KvrlError(f"--threads: {self.threads} is above {MOST_THREADS}; lower it")
        if self.what == "rollout" and len(self.contexts) < 2:
            raise KvrlError(f"--contexts: {self.contexts[0]} alone gives no slope; give two lengths or more")
        end = self.prompt_length + self.new_tokens
        if self.what == "rollout" and self.contexts[0] < self.prompt_length:
            raise KvrlError(
                f"--contexts: {self.contexts[0]} is below the prompt's {self.prompt_length} tokens; leave it out"
            )
        beyond = [context for context in self.contexts if context > end]
        if self.what == "rollout" and len(self.contexts) - len(beyond) < 2:
            raise KvrlError(
                f"--contexts: {beyond[0]} is beyond the run's end at {end}, which needs two within it; lower it "
                "or raise --new_tokens"
            )
        least = max(self.prompt_length, self.budget + self.buffer)
        if self.what == "learner" and (self.lengths[0] <= least or len(self.lengths) < 2):
            raise KvrlError(
                f"--lengths: {','.join(map(str, self.lengths))} must be two lengths or more, each above {least} tokens "
                "(those of the prompt, and budget + buffer); give longer ones"
            )
        if self.what in ("step", "memory") and (self.completions < GROUP or self.completions % GROUP):
            raise KvrlError(
                f"--completions: {self.completions} is not a multiple of the group of {GROUP}; give {GROUP} or "
                f"{2 * GROUP}, for example"
            )
        if self.what == "memory" and self.tokens <= self.budget + self.buffer:
            raise KvrlError(
                f"--tokens: {self.tokens} fit into budget {self.budget} + buffer {self.buffer}, so nothing is evicted; "
                "raise --tokens or lower --budget"
            )


GROUP = 8  # completions of one prompt
MOST_THREADS = 1024

ONCE = ("step", "memory")  # a step of full size takes minutes

QUICK = Settings(
    model="tiny", budget=24, buffer=8, repeats=1, kv_memory=1 << 20, prompt_length=8, contexts=(8, 40, 80),
    new_tokens=90, sequences=4, fixed_tokens=40, check_tokens=32, short_tokens=6, short_sequences=4, peer_steps=4,
    read_floats=1 << 18, matrix_side=64,
    lengths=(70, 140), completions=8, completion_length=40, tokens=256, slots=2,
)  # fmt: skip
"""Everything small: seconds, to see that a benchmark runs. Its figures mean nothing."""
