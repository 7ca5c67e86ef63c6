"""Reward functions: which there are, how they are called and what their answers mean.

A reward of the registry is one file with a subclass of `Reward`, whose parameters are its fields, and one line in
`REWARDS`.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from pydantic import ValidationError

from kvrl.errors import KvrlError
from kvrl.rewards.base import Reward
from kvrl.rewards.call import BadReward, RewardFunc, Scores, score
from kvrl.train.config_file import explain

__all__ = ["REWARDS", "BadReward", "Reward", "RewardFunc", "Scores", "get_reward", "score"]

# name -> module:class, imported when asked for: a reward may need an extra that is not installed
REWARDS = {
    "math_verify": "kvrl.rewards.math_answer:MathVerify",
    "rouge_l": "kvrl.rewards.rouge:RougeL",
    "exact_match": "kvrl.rewards.match:ExactMatch",
    "fuzzy_match": "kvrl.rewards.match:FuzzyMatch",
    "f1": "kvrl.rewards.match:F1",
    "reward_model": "kvrl.rewards.reward_model:RewardModel",
    "judge": "kvrl.rewards.judge:Judge",
}


def get_reward(name: str, **params: Any) -> Reward:
    """The reward of that name, not yet prepared. Errors: KvrlError for an unknown name or parameter, or a bad value."""
    if name not in REWARDS:
        known = ["task", *REWARDS]
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "choose one, or give path/to/file.py:function"
        raise KvrlError(f"reward.funcs: {name} is not one of {', '.join(known)}; {remedy}")
    module, _, attribute = REWARDS[name].partition(":")
    kind: type[Reward] = getattr(importlib.import_module(module), attribute)
    for param in params:
        if param not in kind.model_fields:
            has = ", ".join(kind.model_fields)
            raise KvrlError(f"reward.funcs.{name}.params.{param}: {name} has no such parameter; it has {has}")
    try:
        return kind(**params)
    except ValidationError as error:
        raise KvrlError(explain(error, kind, prefix=f"reward.funcs.{name}.params.")) from None
