"""Accuracy of a model on held-out problems under several cache budgets."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from kvrl.beacons.config import beacons_for, decodings
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.eval.models import load, load_other
from kvrl.eval.report import to_json, widened
from kvrl.eval.run_defaults import is_teacher, settings_of, teacher_of, without_task
from kvrl.progress import sampling_bar
from kvrl.rewards.call import Scores, score
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.sampler.request import Progress
from kvrl.sampler.types import Rollout
from kvrl.tasks import Task, completion_text, encode_prompt, get_task
from kvrl.train.config import RolloutSettings
from kvrl.train.data import PromptLimits, columns_of

Scoring = Callable[[list[str], Mapping[str, list]], Scores]
"""Scores completions by the rows' columns."""


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
    buffer: int | None = None
    """Entries above the budget before a compaction; None under the full cache and under beacons."""
    evictions: float = 0.0
    """Compactions of one sequence, on average."""
    longest: int = 0
    """Tokens of the longest sequence, prompt and completion."""
    held_entries: float = 0.0
    """KV entries of a layer and head that a decode step attended to, on average."""


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
    on_step: Callable[[Progress], None] | None = None,
    teacher: nn.Module | None = None,
    rewards: Scoring | None = None,
) -> list[Evaluation]:
    """Mean reward of one completion for each of n held-out problems, under each budget (`full`: the whole cache).

    budgets: as `CacheConfig.at_budget` reads them. teacher: decodes whatever has no beacons (None: the model does).
    rewards: score the completions where the task has no scorer.

    rollout: the limits of prompts. A problem over one of them, or whose protected entries exceed one of the budgets,
    stops the evaluation (the default), or is left out under all budgets, so that all meet the same problems.
    KvrlError if none is left.
    """
    settings = rollout or RolloutSettings()
    caches = [cache.at_budget(budget) for budget in budgets]
    rows, prompts = held_out(tokenizer, task, PromptLimits.of(settings, *caches), n, seed)
    results = []
    for budget, chosen in zip(budgets, caches, strict=True):
        engine, rollouts, scores = decode(
            model if teacher is None or chosen.is_beacon else teacher, tokenizer, task, rows, prompts, cache=chosen,
            sampling=sampling, seed=seed, slots=slots, rollout=settings, on_step=on_step, rewards=rewards,
        )  # fmt: skip
        results.append(
            Evaluation(
                budget=str(budget),
                accuracy=float(scores.nanmean()),
                kv_bytes=engine.kv_bytes,
                kv_bytes_share=engine.kv_bytes / engine.dense_kv_bytes,
                mean_length=sum(len(r.completion_ids) for r in rollouts) / len(rollouts),
                truncated=sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
                dropped=n - len(rows),
                buffer=None if chosen.is_dense or chosen.is_beacon else chosen.buffer,
                evictions=sum(r.trace.num_events for r in rollouts) / len(rollouts),
                longest=max(r.num_tokens for r in rollouts),
                held_entries=rollouts[0].stats["held_entries"],
            )
        )
    return results


def decode(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    rows: list[dict[str, Any]],
    prompts: list[list[int]],
    *,
    cache: CacheConfig,
    sampling: SamplingConfig,
    seed: int,
    slots: int,
    rollout: RolloutSettings | None = None,
    on_step: Callable[[Progress], None] | None = None,
    rewards: Scoring | None = None,
) -> tuple[Engine, list[Rollout], Tensor]:
    """One completion for each held-out problem under a cache: the engine, the rollouts, and their rewards f32 [N]."""
    settings = rollout or RolloutSettings()
    engine = Engine(
        model, cache, sampling.model_copy(update={"num_generations": 1}), num_slots=min(slots, len(rows)),
        tokenizer=tokenizer, max_prompt_length=settings.max_prompt_length or max(map(len, prompts)),
        kv_memory=settings.kv_memory, native_kernels=settings.native_kernels, cuda_graphs=settings.cuda_graphs,
    )  # fmt: skip
    rollouts = engine.run(prompts, seed=seed, on_step=on_step)
    return engine, rollouts, rewards_of(task, rows, [completion_text(tokenizer, r) for r in rollouts], rewards)


def rewards_of(task: Task, rows: list[dict[str, Any]], texts: list[str], rewards: Scoring | None = None) -> Tensor:
    """The task's own rewards of completions, f32 [N], NaN where there is none; those of `rewards` if it has none."""
    if task.reward is None:
        assert rewards is not None
        return rewards(texts, columns_of(rows)).rewards
    # no remedy: reward.on_error is a training run's and does not change what is measured
    return score([task.reward], None, texts, columns_of(rows), names=["task"], remedy="").rewards


def scored_task(args: argparse.Namespace) -> Task:
    """The task of `kvrl eval`. KvrlError for one that cannot score completions."""
    task = get_task(args.task, **args.task_params)
    if task.reward is None:
        raise KvrlError(
            f"--task_params: {task.name} with answers: false has nothing to score completions by; give rows with "
            "answers and leave answers out"
        )
    return task


def held_out(
    tokenizer: Any, task: Task, limits: PromptLimits, n: int, seed: int
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Those of `n` held-out problems that are within the limits, and their prompts' ids. KvrlError if none is."""
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
    return rows, prompts


def evaluation_table(results: Sequence[Evaluation], title: str) -> Table:
    """Results as a table for the terminal."""
    table = Table(title=title)
    first = "budget + buffer" if any(r.buffer is not None for r in results) else "decoding"
    for name in (first, "accuracy", "KV bytes", "of full", "evictions", "mean length", "cut off"):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.budget if r.buffer is None else f"{r.budget} + {r.buffer}", f"{r.accuracy:.3f}", f"{r.kv_bytes:,}",
            f"{r.kv_bytes_share:.0%}", f"{r.evictions:.1f}", f"{r.mean_length:.0f}", f"{r.truncated:.0%}",
        )  # fmt: skip
    if results and results[0].dropped:
        table.caption = f"{results[0].dropped} problems left out: their prompts are over the limits"
    return table


def idle_budgets(results: Sequence[Evaluation]) -> str | None:
    """One line for the compressed budgets under which nothing was evicted; None if there are none."""
    idle = [r for r in results if r.buffer is not None and r.evictions == 0]
    if not idle:
        return None
    room = idle[0].longest - 1 - int(idle[0].budget)
    remedy = f"lower --buffer to at most {room}" if room > 0 else f"lower --budgets below {idle[0].longest - 1}"
    sums = ", ".join(f"{r.budget} + {r.buffer}" for r in idle)
    return (
        f"kvrl: warning: --budgets: nothing was evicted under budget + buffer {sums}, as the longest sequence has "
        f"{idle[0].longest} tokens: this is the accuracy of the full cache; {remedy}"
    )


def points(budgets: Sequence[int | str] | None, cache: CacheConfig, model: nn.Module) -> Sequence[int | str]:
    """What `kvrl eval` evaluates: the budgets given, or `full`; under beacons each window asked for, and these."""
    if not cache.is_beacon:
        return budgets or ["full"]
    own = beacons_for(cache, model)
    return [*decodings(own.every, own.schedule), *(budgets or [])]


def teacher_for(args: argparse.Namespace, cache: CacheConfig, tokenizer: Any) -> nn.Module | None:
    """The teacher of a separate student, where something is decoded without beacons; said on stderr.

    The student never learnt to do without them, and its run decoded with its teacher.
    """
    if cache.is_beacon and is_teacher(args.model):
        print(f"kvrl: warning: {args.model} is the teacher of a separate student and never learned to read beacons; "
              "decode with the model/ beside it, or with --policy dense", file=sys.stderr)  # fmt: skip
    path = teacher_of(args.model)
    if path is None or (cache.is_beacon and "full" not in (args.budgets or [])):
        return None
    teacher = load_other(path, args.dtype, "the run's teacher", tokenizer)
    print(f"{args.model} is a separate student: without beacons its teacher decodes, {path}", file=sys.stderr)
    return teacher


def run_eval(args: argparse.Namespace) -> None:
    """`kvrl eval`: one task, a curve, or a benchmark. Whatever can be wrong is told before a model is loaded."""
    from kvrl.eval.curve_command import check_flags, run_curve

    check_flags(args)
    if args.curve:
        return run_curve(args)
    cache, sampling, taken = settings_of(args)
    budgets = [b for b in args.budgets or [] if b != "full"]
    if cache.is_beacon and budgets:
        raise KvrlError(f"--budgets: {budgets[0]} has no meaning under --policy beacon, whose dial is --every; set "
                        "--every, or --budgets full for the full cache too")  # fmt: skip
    if args.policy == "dense" and budgets:
        raise KvrlError(f"--budgets: {budgets[0]} has no meaning under --policy dense, which keeps every entry; "
                        "set --budgets full, or --policy to one that `kvrl policies` lists")  # fmt: skip
    # an unknown name is told whatever the budgets are, and so is what beacons cannot have
    make_policy(cache if cache.is_beacon else CacheConfig(policy=args.policy))
    for budget in budgets:
        try:
            make_policy(cache.model_copy(update={"budget": budget}))
        except KvrlError as error:
            raise KvrlError(str(error).replace("cache.budget", "--budgets")) from None
    if taken is not None:
        print(taken, file=sys.stderr)
    if args.benchmark is not None:
        from kvrl.eval.benchmark import load_sets, run_benchmark

        return run_benchmark(args, cache, sampling, load_sets(args.benchmark, args.data_dir, args.task_params))
    if args.task is None:
        raise without_task(args.model, "--task or --benchmark")
    if args.data_dir is not None:
        raise KvrlError("--data_dir: is the folder of a benchmark's files; for a task set --task_params '{path: FILE}'")
    n = 256 if args.n is None else args.n
    task = scored_task(args)
    task.rows("eval", n, args.seed)
    model, tokenizer = load(args.model, args.dtype, "MODEL")
    teacher = teacher_for(args, cache, tokenizer)
    with torch.no_grad(), sampling_bar(Console(stderr=True)) as on_step:
        results = evaluate(
            model, tokenizer, task, cache=cache, budgets=points(args.budgets, cache, model), sampling=sampling, n=n,
            seed=args.seed, slots=args.slots or min(128, n), on_step=on_step, teacher=teacher,
        )  # fmt: skip
    if (warning := idle_budgets(results)) is not None:
        print(warning, file=sys.stderr)
    if args.json:
        print(to_json({"model": args.model, "task": args.task, "policy": args.policy,
                       "results": [asdict(r) for r in results]}, indent=2))  # fmt: skip
    else:
        widened(Console()).print(evaluation_table(results, f"{args.model} on {args.task}, policy {args.policy}"))
