"""kvrl: reinforcement learning of language models with rollouts in a fixed KV budget, replayed exactly."""

from kvrl.cache.config import CacheConfig
from kvrl.cache.trace import KVTrace
from kvrl.errors import KvrlError
from kvrl.logprobs import completion_mask, logprobs, sampler_logprobs
from kvrl.rollout.config import SamplingConfig
from kvrl.rollout.engine import rollout
from kvrl.rollout.types import Rollout

__version__ = "0.1.0"
__all__ = [
    "CacheConfig",
    "KVTrace",
    "KvrlError",
    "Rollout",
    "SamplingConfig",
    "completion_mask",
    "logprobs",
    "rollout",
    "sampler_logprobs",
]
