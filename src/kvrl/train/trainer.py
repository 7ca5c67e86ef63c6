"""Training on rollouts of a fixed KV budget. `train_step` is the whole step, top to bottom."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from kvrl.attention.probe import find_routers
from kvrl.beacons.config import beacons_for
from kvrl.beacons.insert import insert_drawn
from kvrl.clock import now
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import Evaluation, evaluate
from kvrl.learner import Scorer, sampler_logprobs
from kvrl.objectives.corrections import CorrectionConfig
from kvrl.objectives.losses import mean_metrics, merge_metrics
from kvrl.objectives.sparse_rl import SparseRLConfig
from kvrl.sampler.rollout import rollout
from kvrl.sampler.types import Rollout
from kvrl.tasks import completion_text
from kvrl.train.algorithms.base import Views
from kvrl.train.batch import Batch, Cut, micro_batches, minibatches
from kvrl.train.checkpoint import save_checkpoint, save_models
from kvrl.train.config import Config
from kvrl.train.data import columns_of
from kvrl.train.diagnostics import check_parity, dense_mismatch, difference, parity, repetition_rate, spread
from kvrl.train.optimizer import CRITIC, POLICY, STUDENT, optimized
from kvrl.train.output import check_output_dir, make_output_dir, prepare_output_dir
from kvrl.train.run import Run, build
from kvrl.train.runlog import RunLog


def train_step(run: Run, step: int) -> dict[str, float]:
    """Sample, score, compare, check the replay, update. Returns the step's metrics."""
    start = time.perf_counter()
    batch, metrics = collect(run)
    rollout_seconds = time.perf_counter() - start
    metrics |= guard(run, batch, step)
    metrics |= update(run, batch, step, check=parity_is_free(run))
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
        metrics["dense_mismatch"] = dense_mismatch(run.accelerator.unwrap_model(run.scorer), checked(run, batch))
        metrics["repetition"] = repetition_rate(batch.rollouts)
    return metrics


def parity_is_free(run: Run) -> bool:
    """Whether the learner's log-probs before the first update are the replay's, and no routing is to be compared."""
    config = run.config
    own = config.learner_view == config.sampler_view and config.method != "breadcrumbs"  # whose rollouts get beacons
    return own and not find_routers(run.model)


def replayed(run: Run, batch: Batch) -> dict[str, float]:
    """Parity by a forward of its own."""
    metrics = parity(run.accelerator.unwrap_model(run.scorer), checked(run, batch))
    check_parity(metrics, run.config.parity_tolerances)
    return metrics


def checked(run: Run, batch: Batch) -> list[Rollout]:
    """About `parity.samples` completions."""
    return batch.rollouts[:: max(1, len(batch.rollouts) // run.config.parity.samples)]


def update(run: Run, batch: Batch, step: int, *, check: bool = False) -> dict[str, float]:
    """The optimiser steps on one batch. Every log-prob here is in the method's learner view.

    check: parity by the first one's forward, before it changes anything (`parity_is_free`).
    """
    config, algorithm, distiller = run.config, run.algorithm, run.distiller
    rollouts, settings, view = batch.rollouts, config.settings, config.learner_view
    breadcrumbs, rl, taught_seconds = config.method == "breadcrumbs", True, 0.0
    if breadcrumbs:  # the view `dense` is without the beacons, `sparse` is the policy that the distillation teaches
        rollouts = insert_drawn(rollouts, beacons_for(config.cache, run.model), config.seed, step)
        rl = config.breadcrumbs.rl
        view = "dense" if rl else "sparse"  # alone the student needs the gradient, the teacher none
    learner = run.scorer if rl or run.pupil is None else run.pupil
    apart = run.pupil is not None and rl  # a second model is taught by a forward of its own
    views = fixed_views(run, batch)
    fixed = algorithm.prepare(batch, views, step)
    taught = None if distiller is None else distiller.mask(fixed.mask, fixed.advantages)  # [N, C]
    metrics = dict(fixed.metrics) | ({} if views.correction is None else views.correction.metrics)

    losses, norms, parts, entropies = [], [], [], []
    differences: list[Tensor] | None = [] if check else None  # to the sampler, before the first update
    for iteration in range(settings.num_iterations):
        order = config.seed + 1009 * step + iteration
        for mini in minibatches(len(rollouts), settings.num_minibatches, settings.num_generations, order):
            if not fixed.teaches(mini):  # every sample was dropped or rejected
                run.skipped += 1
                continue
            normaliser = algorithm.normaliser(fixed, mini)
            micros = micro_batches(rollouts, algorithm.units(fixed, mini), config.train.micro_batch_tokens)
            for micro in micros:
                chosen = [rollouts[i] for i in micro]
                distill = None if distiller is None or apart else distiller.distillation
                scored = learner(chosen, view=view, distill=distill)
                if differences is not None:
                    differences.append(difference(scored.logps.detach(), chosen))
                cut = Cut(micro, scored.logps)
                loss, part = algorithm.loss(scored, fixed, cut, normaliser) if rl else (torch.zeros(()), {})
                if distiller is not None:
                    assert taught is not None
                    lesson, spent = distiller.lesson(scored, chosen, run.pupil if apart else None)
                    term, more = distiller.term(lesson, cut(taught), int(taught[mini].sum()))
                    if distiller.settings.grad_ratio is not None:
                        distiller.gather(loss, term)
                    term, part = distiller.weight_at(step) * term, part | more
                    if breadcrumbs and rl:  # the two share no graph: what the beacons cost can be told
                        start = now(term.device)
                        run.accelerator.backward(term)
                        taught_seconds += spent + now(term.device) - start
                        term = term.detach()
                    loss = loss + term
                run.accelerator.backward(loss)
                losses.append(loss.detach())
                parts.append(part)
                entropies.append(scored.entropy[cut(fixed.mask)])
            if differences is not None:
                metrics |= spread(torch.cat(differences))
                check_parity(metrics, config.parity_tolerances)
                differences = None
            if algorithm.critic_alone(step):
                for tensor in optimized(run.optimizer, POLICY):
                    tensor.grad = None
            first = STUDENT if learner is run.pupil else POLICY
            norms.append(clip_gradient(run, optimized(run.optimizer, first), step))
            for role in (CRITIC, STUDENT):
                if role != first and (others := optimized(run.optimizer, role)):
                    clip_gradient(run, others, step)
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad(set_to_none=True)
            if distiller is not None:
                distiller.after_update()  # the average follows, the controller moves the weight

    if differences is not None:  # no sample taught anything
        metrics |= replayed(run, batch)
    if norms:
        metrics |= mean_metrics(merge_metrics(parts)) | {
            "loss": float(sum(losses)) / len(norms),
            "grad_norm": float(sum(norms)) / len(norms),
            "entropy": float(torch.cat(entropies).mean()),
        }
    if distiller is not None:
        metrics["distill/weight"] = distiller.weight_at(step)
    if breadcrumbs and rl:
        metrics["breadcrumbs/seconds"] = taught_seconds
    return metrics | {"learning_rate": run.scheduler.get_last_lr()[0], "updates_skipped": float(run.skipped)}


def clip_gradient(run: Run, parameters: list[Tensor], step: int) -> Tensor:
    """Clip to train.max_grad_norm; returns the norm before. KvrlError if it is no number: nothing would be left."""
    norm = run.accelerator.clip_grad_norm_(parameters, run.config.train.max_grad_norm)
    if not bool(torch.isfinite(norm)):
        raise KvrlError(
            f"train: the gradient's norm is {float(norm)} at step {step}; the weights were left as they are. Look at "
            "rewards and losses in metrics.jsonl; lower train.learning_rate, or set model.dtype to float32"
        )
    return norm


def fixed_views(run: Run, batch: Batch) -> Views:
    """What no update of this batch changes: log-probs and values before them, the correction, the reference."""
    config, settings, rollouts = run.config, run.config.settings, batch.rollouts
    sampler = sampler_logprobs(rollouts)
    old = values = correction = reference = None
    correct: CorrectionConfig | SparseRLConfig | None = None
    if config.method == "corrected":
        correct = config.correction
    elif config.method == "sparse_rl":
        correct = config.sparse_rl
    needed = config.updates > 1 or run.algorithm.needs_old
    saves = needed and config.sampler_is_exact and run.critic is None  # a critic's values need the forward anyway
    from_sampler = settings.old_logprobs == "sampler" or (settings.old_logprobs is None and saves)
    if run.critic is not None or correct is not None or (needed and not from_sampler):
        old, values = score_all(run, run.accelerator.unwrap_model(run.scorer), rollouts)
    if from_sampler:
        old = sampler
    if correct is not None:
        assert old is not None
        correction = correct(old - sampler, batch.mask)
    if settings.beta > 0:
        assert run.reference is not None
        with run.reference.active() as model:
            frozen = Scorer(
                model, backend=config.replay.backend, chunk=config.replay.logprob_chunk,
                native_kernels=config.replay.native_kernels,
            )  # fmt: skip
            reference, _ = score_all(run, frozen, rollouts)
    return Views(sampler, old, reference, values, correction)


def collect(run: Run) -> tuple[Batch, dict[str, float]]:
    """One step's groups; under dynamic sampling, groups without signal are replaced by new ones (DAPO, 3.2)."""
    config, size = run.config, run.config.settings.num_generations
    wanted = config.train.prompts_per_step
    dynamic = config.grpo.dynamic_sampling if config.algorithm == "grpo" else None
    rounds = dynamic.max_rounds if dynamic else 1
    kept_rollouts: list[Rollout] = []
    kept_rewards: list[Tensor] = []
    every: list[Tensor] = []
    metrics: dict[str, float] = {}
    for _ in range(rounds):
        rollouts, rewards, metrics = sample(run, wanted)
        every.append(rewards)
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
    metrics |= batch.metrics() | {
        "reward": float(torch.cat(every).nanmean()),  # of all that was sampled: dynamic sampling must not flatter it
        "sampling_rounds": float(len(every)),
        "prompts_dropped": float(run.prompts.dropped),
        "position": float(run.prompts.position),
    }
    return batch, metrics


def sample(run: Run, count: int) -> tuple[list[Rollout], Tensor, dict[str, float]]:
    """Rollouts of the next `count` prompts, their rewards f32 [N], and the sampler's metrics."""
    config = run.config
    rows = run.prompts.take(count)
    rollouts = rollout(
        run.model,
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
    scores = run.rewards(texts, columns)
    stats = rollouts[0].stats
    return (
        rollouts,
        scores.rewards,
        scores.metrics()
        | {
            "tokens_per_second": stats["tokens_per_second"],
            "kv_bytes": stats["kv_bytes"],
            "scratch_bytes": stats["scratch_bytes"],
            "kv_bytes_share": stats["kv_bytes"] / stats["dense_kv_bytes"],
            "held_entries": stats["held_entries"],
            "held_entries_max": stats["held_entries_max"],
            "trace_bytes": float(sum(r.trace.nbytes for r in rollouts)),
        },
    )


@torch.no_grad()
def score_all(run: Run, scorer: Scorer, rollouts: list[Rollout]) -> tuple[Tensor, Tensor | None]:
    """All rollouts' log-probs (and values, with a critic) in the learner's view, no gradient: f32 [N, C] on the CPU."""
    logps = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts))
    values = None if scorer.critic is None else torch.zeros_like(logps)
    units = [[i] for i in range(len(rollouts))]
    for micro in micro_batches(rollouts, units, run.config.train.micro_batch_tokens):
        scored = scorer([rollouts[i] for i in micro], view=run.config.learner_view)
        logps[micro, : scored.logps.shape[1]] = scored.logps.float().cpu()
        if values is not None:
            values[micro, : scored.logps.shape[1]] = scored.values.float().cpu()
    return logps, values


def evaluate_now(run: Run) -> list[Evaluation]:
    """Held-out accuracy under the configured budgets; under beacons of the model that reads them."""
    config, done = run.config, []
    for model, budgets in run.decoded():
        done += evaluate(
            model, run.tokenizer, run.task, cache=config.cache, budgets=budgets,
            sampling=config.sampling, n=config.eval.n, seed=config.eval.seed, slots=config.slots,
            rollout=config.rollout, on_step=run.on_step,
        )  # fmt: skip
    return done


def train(config: Config) -> dict[str, Any]:
    """Run a configuration to its end; returns the evaluations at start and end.

    Writes metrics.jsonl, checkpoints/, model/, summary.json and reward.png to output_dir. KvrlError for a folder
    that holds another run, before anything is changed.
    """
    from kvrl.eval.report import widened, write_report

    output_dir = Path(config.output_dir)
    check_output_dir(config)
    make_output_dir(output_dir)
    console = widened(Console(highlight=False))
    run, done = build(config, console.print)
    prepare_output_dir(config)
    evaluations: dict[int, list[Evaluation]] = {}
    with RunLog(output_dir, config.train.max_steps, console) as log:
        run.on_step = log.sampling

        def evaluate_at(step: int) -> None:
            if config.eval.n:
                evaluations[step] = evaluate_now(run)
                log.evaluation(step, evaluations[step])

        if done == 0:
            evaluate_at(0)
        for step in range(done + 1, config.train.max_steps + 1):
            log.step(step, train_step(run, step))
            if config.eval.every and step % config.eval.every == 0 and step < config.train.max_steps:
                evaluate_at(step)
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                state = {"position": run.prompts.position, "dropped": run.prompts.dropped, "skipped": run.skipped,
                         "block": run.prompts.block}  # fmt: skip
                save_checkpoint(
                    output_dir, step, models=run.models, tokenizer=run.tokenizer, optimizer=run.optimizer,
                    scheduler=run.scheduler, state=state, config=config, critic=run.critic, distiller=run.distiller,
                )  # fmt: skip
        save_models(output_dir, run.models, run.tokenizer)
        evaluate_at(config.train.max_steps)
        summary = write_report(output_dir, log.say)
    return summary | {"evaluations": {k: [asdict(e) for e in v] for k, v in evaluations.items()}}
