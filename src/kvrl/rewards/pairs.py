"""A pairwise judge as the reward of Online DPO: how often a completion is preferred to the others of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvrl.errors import KvrlError
from kvrl.rewards.call import Scores, arguments_of, check_arguments
from kvrl.rewards.judge import Judge


@dataclass(frozen=True)
class Preferences:
    """Has the call of `kvrl.rewards.build.Rewards`, so that a trainer need not tell them apart."""

    judge: Judge
    group_size: int
    """Completions of one prompt, consecutive; every two of them are compared, in both orders."""

    def __call__(self, completions: list[str], columns: Mapping[str, list]) -> Scores:
        """The mean of a completion's verdicts, 1 for better, 0.5 for a tie; of two, the verdict itself."""
        size = self.group_size
        pairs = [(i, j) for i in range(len(completions)) for j in range(i + 1, (i // size + 1) * size)]
        of_first = {name: [values[i] for i, _ in pairs] for name, values in columns.items()}
        prompts = of_first.pop("prompt")
        verdicts = self.judge.prefer(
            prompts, [completions[i] for i, _ in pairs], [completions[j] for _, j in pairs], **of_first
        )
        wins = torch.zeros(len(completions))  # [N]
        for (i, j), verdict in zip(pairs, verdicts, strict=True):
            wins[i] += verdict
            wins[j] += 1 - verdict
        rewards = wins / (size - 1)
        return Scores(rewards, rewards[:, None], ["judge"], 0)

    def check(self, columns: Mapping[str, list]) -> None:
        """Raise KvrlError if rows of such columns cannot be compared: for the first rows, before any rollout."""
        arguments = arguments_of(columns)
        if "prompts" not in arguments:
            raise KvrlError("reward.funcs.judge: needs column prompt; rename the data's column")
        check_arguments(self.judge, "judge", ["completions", *arguments])
