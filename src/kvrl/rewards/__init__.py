"""Reward functions: how they are called and what their answers mean."""

from kvrl.rewards.call import RewardFunc, Scores, score

__all__ = ["RewardFunc", "Scores", "score"]
