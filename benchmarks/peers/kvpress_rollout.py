"""kvpress: DecodingPress keeps `budget` entries, compressing every `buffer` steps, in a batch of one length.

The scores are the keys' norms (KnormPress): the cheapest that it has.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from kvpress import DecodingPress, KnormPress
from timing import answer, given, windows
from transformers import AutoModelForCausalLM, DynamicCache

PREFILL = 512


@torch.no_grad()
def decode(model: Any, prompt: list[int], point: dict[str, int], budget: int, buffer: int) -> list[float]:
    """Tokens per second of each window of decode steps, compressions included."""
    sequences, steps, repeats = point["sequences"], point["steps"], point["repeats"]
    cache, ids = DynamicCache(), torch.tensor([prompt[:-1]])
    for start in range(0, ids.shape[1], PREFILL):
        chunk = ids[:, start : start + PREFILL]
        model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(sequences)
    press = DecodingPress(KnormPress(), compression_interval=buffer, target_size=budget, hidden_states_buffer_size=0)
    token, times = torch.full((sequences, 1), prompt[-1]), []
    with press(model):
        for step in range(steps * repeats + 1):
            position = torch.tensor([len(prompt) - 1 + step])
            logits = model(
                input_ids=token, past_key_values=cache, use_cache=True, position_ids=position.expand(sequences, 1),
                cache_position=position, logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip
            token = torch.multinomial(logits.float().softmax(-1), 1)
            times.append(time.perf_counter())
    held = cache.get_seq_length()
    assert held <= budget + buffer, f"{held} entries are held: the press did not compress"
    return windows(times, steps, repeats, sequences)


def main() -> None:
    s = given()
    torch.set_num_threads(s["threads"])
    torch.manual_seed(s["seed"])
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=getattr(torch, s["dtype"])).eval()
    points = [
        {"tokens_per_second": decode(model, s["prompt"][: p["context"]], p, s["budget"], s["buffer"])}
        for p in s["points"]
    ]
    answer(["kvpress", "transformers", "torch"], points=points)


if __name__ == "__main__":
    main()
