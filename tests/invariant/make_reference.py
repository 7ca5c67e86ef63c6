"""The reference of the pinned trajectory, from an implementation that shares no code with kvrl.

Stock Llama with eager attention, an additive mask for each layer and head, GRPO's loss and AdamW in plain
PyTorch: 20 steps on the committed rollouts, one at a time. Writes reference.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from make_rollouts import BATCHES, GENERATIONS, MODEL
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
BETA, LOW, HIGH, LEARNING_RATE, MAX_NORM = 0.05, 0.1, 0.2, 2e-3, 1.0


def load() -> LlamaForCausalLM:
    model = LlamaForCausalLM._from_config(LlamaConfig(**MODEL), attn_implementation="eager")
    model.load_state_dict(load_file(HERE / "model.safetensors"))
    return model


def logps(model, prompt, completion, events, positions):
    """Log-probs of a completion with each entry hidden from the queries at and after its eviction."""
    ids = torch.cat([prompt, completion])
    t = len(ids)
    query = torch.arange(t)[:, None]
    masks = []
    for layer in events:
        gone_at = torch.full(layer.shape, 10**9)
        for head in range(layer.shape[0]):
            for k in range(t):
                if layer[head, k] >= 0:
                    gone_at[head, k] = positions[layer[head, k]]
        visible = (torch.arange(t) <= query) & (query < gone_at[:, None, :])  # [kv_heads, T, T]
        masks.append(torch.zeros(visible.shape).masked_fill(~visible, float("-inf")).repeat_interleave(2, 0)[None])

    def hide(i):
        def hook(module, args, kwargs):
            return args, {**kwargs, "attention_mask": masks[i]}

        return hook

    hooks = [
        block.self_attn.register_forward_pre_hook(hide(i), with_kwargs=True)
        for i, block in enumerate(model.model.layers)
    ]
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    scores = logits.log_softmax(-1)
    return torch.stack([scores[len(prompt) - 1 + j, token] for j, token in enumerate(completion)])


def main() -> None:
    data, model, reference = load_file(HERE / "rollouts.safetensors"), load(), load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, norms = [], []
    for b in range(BATCHES):
        names = sorted({k.rsplit(".", 1)[0] for k in data if k.startswith(f"{b:02d}.")})
        rewards = [data[f"{n}.reward"].item() for n in names]
        terms, tokens = [], 0
        for i, n in enumerate(names):
            group = torch.tensor(rewards[i // GENERATIONS * GENERATIONS :][:GENERATIONS])
            spread = group.std()
            advantage = 0.0 if spread == 0 else (rewards[i] - group.mean()) / (spread + 1e-4)
            given = (data[f"{n}.prompt"], data[f"{n}.completion"], data[f"{n}.events"], data[f"{n}.evicted_at_event"])
            new = logps(model, *given)
            with torch.no_grad():
                base = logps(reference, *given)
            ratio = (new - data[f"{n}.logprobs"]).exp()
            kept = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            k3 = (base - new).exp() - (base - new) - 1
            terms.append((-kept + BETA * k3).sum())
            tokens += len(new)
        loss = sum(terms) / tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    (HERE / "reference.json").write_text(json.dumps({"losses": losses, "grad_norms": norms}, indent=1) + "\n")


if __name__ == "__main__":
    main()
