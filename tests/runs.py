"""Runs of a few seconds that the tests of training share."""

from __future__ import annotations

import json
from pathlib import Path

from kvrl.train.config import Config

TASK = {"name": "recurrence", "params": {"min_steps": 3, "max_steps": 4}}


def make_config(folder: Path, **changes) -> Config:
    """A run of a few seconds whose completions outgrow the cache (12 + 6 entries, up to 34 tokens)."""
    base = {
        "output_dir": str(folder),
        "task": TASK,
        "warm_start": {"steps": 6, "batch_size": 16, "learning_rate": 3e-3},
        "cache": {"policy": "rkv", "budget": 12, "buffer": 6, "window": 4, "sinks": 2},
        "sampling": {"max_completion_length": 30},
        "grpo": {"num_generations": 4},
        "train": {"max_steps": 2, "prompts_per_step": 3, "learning_rate": 1e-3},
        "eval": {"n": 0},
    }
    for name, value in changes.items():
        merges = isinstance(base.get(name), dict) and isinstance(value, dict) and value.get("policy") != "beacon"
        base[name] = {**base[name], **value} if merges else value
    return Config(**base)


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def noisy_rewards(monkeypatch) -> None:
    """Rewards that always carry signal: the share of even digits."""

    def reward(self, completions, **columns):
        return [sum(c in "02468" for c in text) / max(1, len(text)) for text in completions]

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)


def make_beacon_config(folder: Path, **changes) -> Config:
    """The same with beacons of every 2 or 3 tokens, drawn for each completion."""
    own = {"method": "shadow_mask", "cache": {"policy": "beacon", "params": {"every": [2, 3]}}, **changes}
    return make_config(folder, **own)
