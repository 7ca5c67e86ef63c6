"""kvrl: reinforcement learning of language models with rollouts in a fixed KV budget, replayed exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrl.beacons.model import add_beacon as add_beacon
    from kvrl.cache.config import CacheConfig as CacheConfig
    from kvrl.cache.trace import KVTrace as KVTrace
    from kvrl.errors import KvrlError as KvrlError
    from kvrl.learner import completion_mask as completion_mask
    from kvrl.learner import logprobs as logprobs
    from kvrl.learner import sampler_logprobs as sampler_logprobs
    from kvrl.sampler.config import SamplingConfig as SamplingConfig
    from kvrl.sampler.rollout import rollout as rollout
    from kvrl.sampler.types import Rollout as Rollout

__version__ = "0.1.0"

# Imported on first use: `kvrl --help` and a wrong flag need no torch.
_HOMES = {
    "CacheConfig": "kvrl.cache.config",
    "KVTrace": "kvrl.cache.trace",
    "KvrlError": "kvrl.errors",
    "Rollout": "kvrl.sampler.types",
    "SamplingConfig": "kvrl.sampler.config",
    "add_beacon": "kvrl.beacons.model",
    "completion_mask": "kvrl.learner",
    "logprobs": "kvrl.learner",
    "rollout": "kvrl.sampler.rollout",
    "sampler_logprobs": "kvrl.learner",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
