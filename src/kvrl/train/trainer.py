"""Training on rollouts of a fixed KV budget. `train_step` is the whole step, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kvrl.attention.probe import find_routers
from kvrl.errors import KvrlError, RewardError
from kvrl.eval.benchmark import as_json, benchmark_table, evaluate_sets
from kvrl.eval.evaluate import Evaluation, evaluate
from kvrl.eval.report import to_json
from kvrl.rewards.call import Scores
from kvrl.sampler.rollout import rollout
from kvrl.sampler.types import Rollout
from kvrl.tasks import completion_text
from kvrl.train.batch import Batch
from kvrl.train.checkpoint import save_checkpoint, save_models
from kvrl.train.config import Config
from kvrl.train.data import columns_of
from kvrl.train.diagnostics import check_parity, dense_mismatch, parity, repetition_rate
from kvrl.train.output import check_output_dir, make_output_dir, prepare_output_dir
from kvrl.train.run import Run, build
from kvrl.train.runlog import RunLog
from kvrl.train.setup import REFERENCE
from kvrl.train.update import update

BENCHMARK = "benchmark.json"


def train_step(run: Run, step: int) -> dict[str, float]:
    """Sample, score, compare, check the replay, update. Returns the step's metrics."""
    start = time.perf_counter()
    batch, metrics = collect(run)
    rollout_seconds = time.perf_counter() - start
    metrics |= guard(run, batch, step)
    metrics |= update(run, batch, step, check=parity_is_free(run))
    if "parity/mean" not in metrics:  # no sample taught anything
        metrics |= replayed(run, batch)
    seconds = time.perf_counter() - start
    if (taught := metrics.get("breadcrumbs/seconds")) is not None:  # against what the step takes without it
        metrics["breadcrumbs/overhead"] = taught / (seconds - taught)
    return metrics | {"seconds": seconds, "rollout_seconds": rollout_seconds}


def guard(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Before any update: does the learner see what the sampler saw? ParityError if it does not.

    Where `parity_is_free` the first update's own forward tells, in `update`.
    """
    metrics = {} if parity_is_free(run) else replayed(run, batch)
    every = run.config.parity.dense_every
    if every and (step - 1) % every == 0:
        with run.writer() as model:
            metrics["dense_mismatch"] = dense_mismatch(run.scorer_of(model), checked(run, batch))
        metrics["repetition"] = repetition_rate(batch.rollouts)
    return metrics


def parity_is_free(run: Run) -> bool:
    """Whether the learner's log-probs before the first update are the replay's, and no routing is to be compared."""
    config = run.config
    own = config.learner_view == config.sampler_view and config.method != "breadcrumbs"  # whose rollouts get beacons
    return own and not find_routers(run.model)


def replayed(run: Run, batch: Batch) -> dict[str, float]:
    """Parity by a forward of its own."""
    with run.writer() as model:
        metrics = parity(run.scorer_of(model), checked(run, batch))
    check_parity(metrics, run.config.parity_tolerances)
    return metrics


def checked(run: Run, batch: Batch) -> list[Rollout]:
    """About `parity.samples` completions."""
    return batch.rollouts[:: max(1, len(batch.rollouts) // run.config.parity.samples)]


def collect(run: Run) -> tuple[Batch, dict[str, float]]:
    """One step's groups; under dynamic sampling, groups without signal are replaced by new ones (DAPO, 3.2)."""
    config, size = run.config, run.config.settings.num_generations
    wanted = config.train.prompts_per_step
    dynamic = config.grpo.dynamic_sampling if config.algorithm == "grpo" else None
    rounds = dynamic.max_rounds if dynamic else 1
    kept_rollouts: list[Rollout] = []
    kept_rewards: list[Tensor] = []
    sampled: list[list[Rollout]] = []
    scores: list[Scores] = []
    for _ in range(rounds):
        rollouts, scored = sample(run, wanted)
        rewards = scored.rewards
        sampled.append(rollouts)
        scores.append(scored)
        signal = Batch.build(rollouts, rewards, config).advantages.signal.view(-1, size).any(dim=-1)
        chosen = signal.nonzero()[:, 0].tolist() if dynamic else range(wanted)
        for g in chosen:
            kept_rollouts += rollouts[g * size : (g + 1) * size]
            kept_rewards.append(rewards[g * size : (g + 1) * size])
        if len(kept_rewards) >= wanted:
            break
    if not kept_rewards:  # no group with signal in any round: an update without gradient, counted as such
        kept_rollouts, kept_rewards = rollouts, [rewards]
    batch = Batch.build(kept_rollouts[: wanted * size], torch.cat(kept_rewards)[: wanted * size], config)
    scored = Scores.joined(scores)
    # Rewards and caches of all that was sampled: dynamic sampling must not flatter them
    metrics = (
        scored.metrics()
        | sampler_metrics(sampled)
        | batch.metrics()
        | {
            "reward": float(scored.rewards.nanmean()),  # NaN where nothing was given
            "sampling_rounds": float(len(sampled)),
            "prompts_dropped": float(run.prompts.dropped),
            "position": float(run.prompts.position),
        }
    )
    return batch, metrics


def sample(run: Run, count: int) -> tuple[list[Rollout], Scores]:
    """Rollouts of the next `count` prompts, and their rewards."""
    config = run.config
    rows = run.prompts.take(count)
    with run.writer() as model:
        rollouts = rollout(
            model,
            [row.ids for row in rows],
            cache=config.rollout_cache,
            sampling=config.sampling,
            seed=config.seed,
            slots=config.slots,
            kv_memory=config.rollout.kv_memory,
            tokenizer=run.tokenizer,
            request_ids=[row.number for row in rows],
            on_step=run.on_step,
            max_prompt_length=config.rollout.max_prompt_length,
            native_kernels=config.rollout.native_kernels,
            cuda_graphs=config.rollout.cuda_graphs,
        )
    texts = [completion_text(run.tokenizer, r) for r in rollouts]
    columns = columns_of([row.row for row in rows for _ in range(config.settings.num_generations)])
    return rollouts, run.score(texts, columns)


def sampler_metrics(rounds: list[list[Rollout]]) -> dict[str, float]:
    """What the caches of a step's rollouts took, all rounds of its sampling together."""
    stats = [rollouts[0].stats for rollouts in rounds]
    seconds = sum(s["seconds"] for s in stats)
    return {
        "tokens_per_second": sum(s["tokens_per_second"] * s["seconds"] for s in stats) / seconds,
        "kv_bytes": max(s["kv_bytes"] for s in stats),
        "scratch_bytes": max(s["scratch_bytes"] for s in stats),
        "kv_bytes_share": max(s["kv_bytes"] / s["dense_kv_bytes"] for s in stats),
        "held_entries": sum(s["held_entries"] for s in stats) / len(stats),
        "held_entries_max": max(s["held_entries_max"] for s in stats),
        "trace_bytes": float(sum(r.trace.nbytes for rollouts in rounds for r in rollouts)),
    }


def evaluate_now(run: Run) -> list[Evaluation]:
    """Held-out accuracy under the configured budgets; under beacons of the model that reads them."""
    config, done = run.config, []
    for model, budgets in run.decoded():
        done += evaluate(
            model, run.tokenizer, run.task, cache=config.cache, budgets=budgets,
            sampling=config.sampling, n=config.eval.n, seed=config.eval.seed, slots=config.slots,
            rollout=config.rollout, on_step=run.on_step, rewards=run.score,
        )  # fmt: skip
    return done


def benchmark(run: Run, output_dir: Path, say: Callable[[object], None]) -> None:
    """The sets of `eval.benchmark`: a table, and benchmark.json."""
    config, name = run.config, run.config.eval.benchmark
    results = evaluate_sets(
        run.student or run.model, run.tokenizer, run.benchmark, cache=config.cache, budgets=config.eval_budgets,
        sampling=config.sampling, n=config.eval.benchmark_n, seed=config.eval.seed, slots=config.slots, say=say,
        teacher=None if run.student is None else run.model, rollout=config.rollout,
    )  # fmt: skip
    (output_dir / BENCHMARK).write_text(to_json({"benchmark": name, **as_json(results)}, indent=2))
    say(benchmark_table(results, f"{name}, policy {config.cache.policy}"))


def save(run: Run, output_dir: Path, step: int, state: dict[str, int]) -> Path:
    """Write the checkpoint of a step; returns its folder. state: `Run.state` when that step was over."""
    return save_checkpoint(
        output_dir, step, models=run.models, tokenizer=run.tokenizer, optimizer=run.optimizer, scheduler=run.scheduler,
        state=state, config=run.config, critic=run.critic, distiller=run.distiller,
    )  # fmt: skip


def train(config: Config) -> dict[str, Any]:
    """Run a configuration to its end; returns the evaluations at start and end.

    Writes metrics.jsonl, checkpoints/, model/, summary.json, benchmark.json and figures to output_dir. KvrlError for a
    folder that holds another run, before anything is changed, and for rewards that cannot be had, after a checkpoint.
    """
    from kvrl.eval.report import widened, write_report

    output_dir = Path(config.output_dir)
    check_output_dir(config)
    make_output_dir(output_dir)
    console = widened(Console(highlight=False))
    run, done = build(config, console.print)
    prepare_output_dir(config)
    if run.reference is not None and not (output_dir / REFERENCE).exists():  # nor where a run goes on elsewhere
        run.reference.save(output_dir / REFERENCE)
    evaluations: dict[int, list[Evaluation]] = {}
    with RunLog(output_dir, config.train.max_steps, console) as log:
        run.on_step = log.sampling

        def evaluate_at(step: int) -> None:
            if config.eval.n:
                evaluations[step] = evaluate_now(run)
                log.evaluation(step, evaluations[step])

        finished, state = done, run.state()
        try:
            if done == 0:
                evaluate_at(0)
            for step in range(done + 1, config.train.max_steps + 1):
                log.step(step, train_step(run, step))
                finished, state = step, run.state()
                if config.eval.every and step % config.eval.every == 0 and step < config.train.max_steps:
                    evaluate_at(step)
                if config.checkpoint.every and step % config.checkpoint.every == 0:
                    save(run, output_dir, step, state)
            save_models(output_dir, run.models, run.tokenizer)
            evaluate_at(config.train.max_steps)
            if run.benchmark:
                benchmark(run, output_dir, log.say)
        except RewardError as error:
            kept = save(run, output_dir, finished, state)
            raise KvrlError(
                f"{error}; the run after step {finished} is in {kept}: --checkpoint.resume latest"
            ) from error
        summary = write_report(output_dir, log.say)
    return summary | {"evaluations": {k: [asdict(e) for e in v] for k, v in evaluations.items()}}
