"""Accuracy of a model on held-out problems under several cache budgets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from torch import nn

from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.eval.report import to_json
from kvrl.rewards.call import score
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.tasks import Task, completion_text, encode_prompt, get_task
from kvrl.train.config import RolloutSettings
from kvrl.train.config_file import explain
from kvrl.train.data import PromptLimits, columns_of


@dataclass(frozen=True)
class Evaluation:
    """One budget's result. kv_bytes counts K and V of the slots as allocated, buffer included."""

    budget: str
    accuracy: float
    kv_bytes: int
    kv_bytes_share: float
    mean_length: float
    truncated: float
    dropped: int = 0
    """Problems left out: a prompt that is too long, or whose protected entries a budget cannot hold."""


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
    rollout: RolloutSettings | None = None,
) -> list[Evaluation]:
    """Mean reward of one completion for each of n held-out problems, under each budget (`full`: the whole cache).

    rollout: the limits of prompts. A problem over one of them, or whose protected entries exceed one of the budgets,
    stops the evaluation (the default), or is left out under all budgets, so that all meet the same problems.
    KvrlError if none is left.
    """
    settings = rollout or RolloutSettings()
    caches = [cache.as_dense() if budget == "full" else cache.model_copy(update={"budget": budget})
              for budget in budgets]  # fmt: skip
    limits = PromptLimits.of(settings, *caches)
    rows, prompts = [], []
    refused: KvrlError | None = None
    for number, row in enumerate(task.rows("eval", n, seed)):
        try:
            ids = encode_prompt(tokenizer, row["prompt"])
        except KvrlError as error:
            raise KvrlError(f"held-out problem {number}: {error}") from None
        if (refusal := limits.refusal(len(ids))) is None:
            rows.append(row)
            prompts.append(ids)
            continue
        refused, choice = refusal
        if choice == "stop":
            raise KvrlError(f"held-out problem {number}: {refused}")
    if not rows:
        raise KvrlError(f"eval.n: none of the {n} held-out problems is within the limits ({refused})")
    one = sampling.model_copy(update={"num_generations": 1})
    results = []
    for budget, chosen in zip(budgets, caches, strict=True):
        engine = Engine(
            model, chosen, one, num_slots=min(slots, len(rows)), tokenizer=tokenizer,
            max_prompt_length=settings.max_prompt_length or max(map(len, prompts)),
            native_kernels=settings.native_kernels, cuda_graphs=settings.cuda_graphs,
        )  # fmt: skip
        rollouts = engine.run(prompts, seed=seed)
        texts = [completion_text(tokenizer, r) for r in rollouts]
        scores = score([task.reward], None, texts, columns_of(rows), names=["task"])
        results.append(
            Evaluation(
                budget=str(budget),
                accuracy=float(scores.rewards.nanmean()),
                kv_bytes=engine.kv_bytes,
                kv_bytes_share=engine.kv_bytes / engine.dense_kv_bytes,
                mean_length=sum(len(r.completion_ids) for r in rollouts) / len(rollouts),
                truncated=sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
                dropped=n - len(rows),
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
    if results and results[0].dropped:
        table.caption = f"{results[0].dropped} problems left out: their prompts are over the limits"
    return table


def run_eval(args: argparse.Namespace) -> None:
    """`kvrl eval`: one task, or a benchmark. Whatever can be wrong is told before a model is loaded."""
    given = {k: getattr(args, k) for k in ("buffer", "window", "sinks") if getattr(args, k) is not None}
    budgets = [b for b in args.budgets if b != "full"]
    if args.policy == "dense" and budgets:
        raise KvrlError(f"--budgets: {budgets[0]} has no meaning under --policy dense, which keeps every entry; "
                        "set --budgets full, or --policy to one that `kvrl policies` lists")  # fmt: skip
    cache = CacheConfig(policy=args.policy, budget=max(budgets, default=512), **given)
    try:
        sampling = SamplingConfig(temperature=args.temperature, max_completion_length=args.max_completion_length)
    except ValidationError as error:
        raise KvrlError(explain(error, SamplingConfig, prefix="--")) from None
    make_policy(CacheConfig(policy=args.policy))  # an unknown name is told whatever the budgets are
    for budget in budgets:
        make_policy(cache.model_copy(update={"budget": budget}))
    if args.benchmark is not None:
        from kvrl.eval.benchmark import load_sets, run_benchmark

        return run_benchmark(args, cache, sampling, load_sets(args.benchmark, args.data_dir, args.task_params))
    if args.data_dir is not None:
        raise KvrlError("--data_dir: is the folder of a benchmark's files; for a task set --task_params '{path: FILE}'")
    from kvrl.train.setup import load_model

    n = 256 if args.n is None else args.n
    task = get_task(args.task, **args.task_params)
    task.rows("eval", n, args.seed)
    model, tokenizer = load_model(args.model, args.dtype)
    model.to(Accelerator().device)
    with torch.no_grad():
        results = evaluate(
            model, tokenizer, task, cache=cache, budgets=args.budgets, sampling=sampling, n=n, seed=args.seed,
            slots=args.slots or min(128, n),
        )  # fmt: skip
    if args.json:
        print(to_json({"model": args.model, "task": args.task, "policy": args.policy,
                       "results": [asdict(r) for r in results]}, indent=2))  # fmt: skip
    else:
        Console().print(evaluation_table(results, f"{args.model} on {args.task}, policy {args.policy}"))
