"""Made once: the model and the rollouts of the pinned trajectory. Run again only if their format changes."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kvrl

HERE = Path(__file__).parent
MODEL = {
    "vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
BATCHES, PROMPTS, GENERATIONS = 20, 2, 3


def main() -> None:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, HERE / "model.safetensors")
    rng = random.Random(7)
    out: dict[str, torch.Tensor] = {}
    for b in range(BATCHES):
        prompts = [[rng.randrange(3, 29) for _ in range(rng.randrange(2, 9))] for _ in range(PROMPTS)]
        rollouts = kvrl.rollout(
            model,
            prompts,
            cache=kvrl.CacheConfig(policy="rkv", budget=10, buffer=5, window=3, sinks=2),
            sampling=kvrl.SamplingConfig(max_completion_length=28, num_generations=GENERATIONS, eos_token_ids=[0]),
            seed=b,
        )
        for i, r in enumerate(rollouts):
            name = f"{b:02d}.{i}"
            out[f"{name}.prompt"] = torch.tensor(r.prompt_ids)
            out[f"{name}.completion"] = torch.tensor(r.completion_ids)
            out[f"{name}.logprobs"] = r.logprobs
            out[f"{name}.events"] = r.trace.events
            out[f"{name}.evicted_at_event"] = r.trace.evicted_at_event
            out[f"{name}.reward"] = torch.tensor(rng.choice([0.0, 0.0, 1.0]))
    save_file(out, HERE / "rollouts.safetensors")


if __name__ == "__main__":
    main()
