"""TRL: steps of GRPOTrainer with plain generation, pure bf16 weights, no KL, completions of full length."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from timing import answer, given
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Seconds of each optimiser step, its generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


class Timed(GRPOTrainer):
    """Notes the time that generation takes."""

    generation: list[float]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = super()._generate(*args, **kwargs)
        self.generation.append(time.perf_counter() - start)
        return out


def odd_share(completions: list[str], **_: Any) -> list[float]:
    """The reward that kvrl's benchmark has."""
    return [sum(ord(c) % 2 for c in text) / max(1, len(text)) for text in completions]


def main() -> None:
    s = given()
    torch.set_num_threads(s["threads"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, seed=s["seed"], use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, max_steps=s["steps"], learning_rate=1e-6, beta=0.0,
            num_generations=s["num_generations"], per_device_train_batch_size=s["micro_batch"],
            gradient_accumulation_steps=s["completions"] // s["micro_batch"],
            gradient_checkpointing=s["gradient_checkpointing"], max_completion_length=s["completion_length"],
            temperature=1.0, model_init_kwargs={"dtype": s["dtype"]},
            generation_kwargs={"min_new_tokens": s["completion_length"]},  # no sequence ends early
        )  # fmt: skip
        clock, data = Clock(), Dataset.from_dict({"prompt": s["prompts"]})
        trainer = Timed(model=s["model"], args=config, reward_funcs=odd_share, train_dataset=data, callbacks=[clock])
        trainer.generation = []
        trainer.train()
    per_step = len(trainer.generation) // s["steps"]
    rollouts = [sum(trainer.generation[i * per_step : (i + 1) * per_step]) for i in range(s["steps"])]
    answer(["trl", "transformers", "torch"], seconds=clock.seconds, rollout_seconds=rollouts)


if __name__ == "__main__":
    main()
