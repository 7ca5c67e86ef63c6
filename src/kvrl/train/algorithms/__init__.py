"""The reinforcement learning algorithms: one file each with its settings and what it does to a rollout batch.

An algorithm is a class of the shape of `Algorithm`, one line in `ALGORITHMS`, and its section in the `Config`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrl.train.algorithms.base import Algorithm
    from kvrl.train.config import Config

# name -> module:class; the section of the configuration has the same name
ALGORITHMS = {
    "grpo": "kvrl.train.algorithms.grpo:Grpo",
    "rloo": "kvrl.train.algorithms.rloo:Rloo",
    "ppo": "kvrl.train.algorithms.ppo:Ppo",
    "online_dpo": "kvrl.train.algorithms.online_dpo:OnlineDpo",
}


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm that the configuration names."""
    module, _, attribute = ALGORITHMS[config.algorithm].partition(":")
    return getattr(importlib.import_module(module), attribute)(config)
