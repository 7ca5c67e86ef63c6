"""transformers: `generate` (a batch of sequences of one length) and `generate_batch` (continuous batching)."""

from __future__ import annotations

import time
from typing import Any

import torch
from timing import answer, given, windows
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

PREFILL = 512  # tokens of a prompt that go through the model at once


class Clock(StoppingCriteria):
    """Notes the time after each token and never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def sampling(new: int) -> GenerationConfig:
    """Temperature 1, the whole vocabulary, no end."""
    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new, pad_token_id=0)


@torch.no_grad()
def prefilled(model: Any, prompt: list[int], sequences: int) -> DynamicCache:
    """The cache of all but the prompt's last token, made once and copied to each sequence."""
    cache, ids = DynamicCache(config=model.config), torch.tensor([prompt[:-1]])
    for start in range(0, ids.shape[1], PREFILL):
        model(input_ids=ids[:, start : start + PREFILL], past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(sequences)
    return cache


def generate(model: Any, prompt: list[int], point: dict[str, int]) -> list[float]:
    """Tokens per second of each window; the prompt is in the cache before the clock starts."""
    sequences, steps, repeats = point["sequences"], point["steps"], point["repeats"]
    clock, ids = Clock(), torch.tensor([prompt]).repeat(sequences, 1)
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=prefilled(model, prompt, sequences),
        generation_config=sampling(steps * repeats + 1), stopping_criteria=StoppingCriteriaList([clock]),
    )  # fmt: skip
    return windows(clock.times, steps, repeats, sequences)


def continuous(model: Any, prompt: list[int], point: dict[str, int], kv_bytes: int) -> list[float]:
    """Tokens per second while every sequence decodes: from the last one's first token to the first one's last."""
    from transformers import ContinuousBatchingConfig

    sequences, steps, repeats = point["sequences"], point["steps"], point["repeats"]
    config, page = model.config, 256
    heads, dim = config.num_key_value_heads, config.head_dim or config.hidden_size // config.num_attention_heads
    block = 2 * config.num_hidden_layers * heads * dim * page * model.dtype.itemsize
    made = model.generate_batch(
        [prompt] * sequences, generation_config=sampling(steps * repeats + 1), record_timestamps=True,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=max(kv_bytes // block, 2 * sequences), allow_block_sharing=False
        ),
    )  # fmt: skip
    stamps = [out.timestamps for out in made.values()]
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    tokens = sum(begin < t <= end for times in stamps for t in times)
    return [tokens / (end - begin)]


def main() -> None:
    s = given()
    torch.set_num_threads(s["threads"])
    torch.manual_seed(s["seed"])
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=getattr(torch, s["dtype"])).eval()
    points = []
    for point in s["points"]:
        prompt = s["prompt"][: point["context"]]
        speeds = (
            generate(model, prompt, point) if s["peer"] == "generate"
            else continuous(model, prompt, point, s["kv_bytes"])
        )  # fmt: skip
        points.append({"tokens_per_second": speeds})
    answer(["transformers", "torch"], points=points)


if __name__ == "__main__":
    main()
