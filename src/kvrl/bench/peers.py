"""Other libraries, measured by one script each in an environment of its own (`benchmarks/peers` of the repository)."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrl.errors import KvrlError

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Peer:
    """A library that is measured beside kvrl."""

    name: str
    script: str
    """In benchmarks/peers."""
    own_environment: bool
    """Whether it has one under .peers; else it runs in kvrl's."""

    @property
    def python(self) -> Path:
        return ROOT / ".peers" / self.name / "bin" / "python" if self.own_environment else Path(sys.executable)

    @property
    def path(self) -> Path:
        return ROOT / "benchmarks" / "peers" / self.script

    @property
    def missing(self) -> str | None:
        """Why it cannot be run, with the command that mends it; None if it can."""
        if not self.path.exists():
            return f"{self.name}: not measured: its driver is in kvrl's repository, benchmarks/peers/{self.script}"
        if not self.python.exists():
            return f"{self.name}: not measured: not set up; run benchmarks/peers/setup.sh {self.name}"
        return None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm", "vllm_rollout.py", own_environment=True),
        Peer("generate", "transformers_rollout.py", own_environment=False),
        Peer("continuous", "transformers_rollout.py", own_environment=False),
        Peer("kvpress", "kvpress_rollout.py", own_environment=True),
        Peer("trl", "trl_step.py", own_environment=True),
    )
}
PEERS_OF = {"rollout": ("vllm", "generate", "continuous", "kvpress"), "step": ("trl",)}
"""Who is measured beside kvrl by which benchmark."""


@dataclass(frozen=True)
class Answer:
    """What a peer measured, or one line that says why it did not."""

    result: dict[str, Any] | None
    note: str | None = None


def ask(name: str, given: dict[str, Any]) -> Answer:
    """Run a peer's driver with these settings."""
    from kvrl.bench.process import last_json  # not above: it imports torch, and `kvrl --help` names the peers

    peer = PEERS[name]
    if peer.missing:
        return Answer(None, peer.missing)
    threads = str(given["threads"])
    env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
                        "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    env.pop("PYTHONPATH", None)  # kvrl's own modules have no place in a peer's environment
    try:
        return Answer(last_json([str(peer.python), str(peer.path), json.dumps({**given, "peer": name})], name, env))
    except KvrlError as error:
        return Answer(None, f"not measured: {error}")


def parse_peers(text: str, what: str) -> tuple[str, ...]:
    """`vllm,generate`, or `all` of a benchmark. KvrlError for a name that it does not measure."""
    known = PEERS_OF[what]
    names = known if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise KvrlError(f"--peers: {name!r} is not one of {', '.join(known)}; name one of them, or all")
    return names
