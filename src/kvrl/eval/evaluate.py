"""Accuracy of a model on held-out problems under several cache budgets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.rewards.call import score
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.tasks import Task, encode_prompt, get_task
from kvrl.train.data import columns_of


@dataclass(frozen=True)
class Evaluation:
    """One budget's result. kv_bytes counts K and V of the slots as allocated, buffer included."""

    budget: str
    accuracy: float
    kv_bytes: int
    kv_bytes_share: float
    mean_length: float
    truncated: float


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    *,
    cache: CacheConfig,
    budgets: Sequence[int | str],
    sampling: SamplingConfig,
    n: int,
    seed: int,
    slots: int,
) -> list[Evaluation]:
    """Mean reward of one completion for each of n held-out problems, under each budget (`full`: the whole cache)."""
    rows = task.rows("eval", n, seed)
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    one = sampling.model_copy(update={"num_generations": 1})
    results = []
    for budget in budgets:
        chosen = cache.as_dense() if budget == "full" else cache.model_copy(update={"budget": budget})
        engine = Engine(
            model, chosen, one, num_slots=min(slots, n), max_prompt_length=max(map(len, prompts)), tokenizer=tokenizer
        )
        rollouts = engine.run(prompts, seed=seed)
        texts = [tokenizer.decode(r.completion_ids) for r in rollouts]
        scores = score([task.reward], None, texts, columns_of(rows))
        results.append(
            Evaluation(
                budget=str(budget),
                accuracy=float(scores.rewards.nanmean()),
                kv_bytes=engine.kv_bytes,
                kv_bytes_share=engine.kv_bytes / engine.dense_kv_bytes,
                mean_length=sum(len(r.completion_ids) for r in rollouts) / len(rollouts),
                truncated=sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
            )
        )
    return results


def evaluation_table(results: Sequence[Evaluation], title: str) -> Table:
    """Results as a table for the terminal."""
    table = Table(title=title)
    for name in ("budget", "accuracy", "KV bytes", "of full", "mean length", "cut off"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.budget, f"{r.accuracy:.3f}", f"{r.kv_bytes:,}", f"{r.kv_bytes_share:.0%}",
            f"{r.mean_length:.0f}", f"{r.truncated:.0%}",
        )  # fmt: skip
    return table


def run_eval(args: argparse.Namespace) -> None:
    """`kvrl eval`."""
    from kvrl.train.setup import load_model

    task = get_task(args.task, **args.task_params)
    model, tokenizer = load_model(args.model, args.dtype)
    given = {k: getattr(args, k) for k in ("buffer", "window", "sinks") if getattr(args, k) is not None}
    budgets = [b for b in args.budgets if b != "full"]
    cache = CacheConfig(policy=args.policy, budget=max(budgets, default=512), **given)
    if args.temperature < 0:
        raise KvrlError(f"--temperature: {args.temperature} is below 0; 0 is greedy")
    sampling = SamplingConfig(temperature=args.temperature, max_completion_length=args.max_completion_length)
    with torch.no_grad():
        results = evaluate(
            model, tokenizer, task, cache=cache, budgets=args.budgets, sampling=sampling, n=args.n, seed=args.seed,
            slots=args.slots or min(128, args.n),
        )  # fmt: skip
    if args.json:
        print(json.dumps({"model": args.model, "task": args.task, "policy": args.policy,
                          "results": [asdict(r) for r in results]}, indent=2))  # fmt: skip
    else:
        Console().print(evaluation_table(results, f"{args.model} on {args.task}, policy {args.policy}"))
