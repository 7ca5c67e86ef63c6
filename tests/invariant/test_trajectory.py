"""Pinned trajectory: 20 learner steps on committed rollouts against losses and gradient norms of plain PyTorch.

`make_reference.py` made the reference without any code of kvrl; `make_rollouts.py` made the rollouts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvrl.cache.trace import KVTrace
from kvrl.sampler.types import Rollout
from kvrl.train import run as runs
from kvrl.train.batch import Batch
from kvrl.train.config import Config
from kvrl.train.update import update

HERE = Path(__file__).parent
MODEL = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def committed_batches(config: Config) -> list[Batch]:
    data, batches = load_file(HERE / "rollouts.safetensors"), []
    for b in range(20):
        rollouts, rewards = [], []
        for i in range(6):
            name = f"{b:02d}.{i}"
            completion = data[f"{name}.completion"].tolist()
            trace = KVTrace(data[f"{name}.events"], data[f"{name}.evicted_at_event"], 10, 5)
            rollouts.append(
                Rollout(
                    prompt_ids=data[f"{name}.prompt"].tolist(), completion_ids=completion,
                    logprobs=data[f"{name}.logprobs"], loss_mask=torch.ones(len(completion), dtype=torch.bool),
                    trace=trace.validate(), finish_reason="length",
                )
            )  # fmt: skip
            rewards.append(data[f"{name}.reward"])
        batches.append(Batch.build(rollouts, torch.stack(rewards), config))
    return batches


@pytest.mark.parametrize("backend", ["segments", "mask"])
def test_twenty_learner_steps_follow_the_reference(tmp_path, monkeypatch, backend):
    def load(config, task, folder):
        model = LlamaForCausalLM(LlamaConfig(**MODEL))
        model.load_state_dict(load_file(HERE / "model.safetensors"))
        return model, None

    monkeypatch.setattr(runs, "load_policy", load)
    monkeypatch.setattr(runs, "preflight", lambda *_: None)  # there is no tokenizer and nothing is sampled
    config = Config(
        output_dir=str(tmp_path),
        task={"name": "recurrence"},
        cache={"policy": "rkv", "budget": 10, "buffer": 5, "window": 3, "sinks": 2},
        sampling={"max_completion_length": 28},
        grpo={"num_generations": 3, "beta": 0.05, "epsilon": 0.1, "epsilon_high": 0.2, "old_logprobs": "sampler"},
        train={"max_steps": 20, "prompts_per_step": 2, "learning_rate": 2e-3, "micro_batch_tokens": 70},
        replay={"backend": backend, "logprob_chunk": 16},
    )
    run, _ = runs.build(config, lambda text: None)
    steps = [update(run, batch, i + 1) for i, batch in enumerate(committed_batches(config))]
    reference = json.loads((HERE / "reference.json").read_text())
    assert [s["loss"] for s in steps] == pytest.approx(reference["losses"], rel=1e-3, abs=1e-5)
    assert [s["grad_norm"] for s in steps] == pytest.approx(reference["grad_norms"], rel=1e-3)
    assert sum(s["clip_high/mean"] + s["clip_low/mean"] > 0 for s in steps) > 10  # the clipping is on the pinned path
