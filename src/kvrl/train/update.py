"""The optimiser steps on one rollout batch. Every log-prob here is in the method's learner view."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrl.beacons.config import beacons_for
from kvrl.beacons.insert import insert_drawn
from kvrl.clock import now
from kvrl.errors import KvrlError
from kvrl.learner import Scorer, completion_mask, sampler_logprobs
from kvrl.objectives.corrections import CorrectionConfig
from kvrl.objectives.losses import Metrics, mean_metrics, merge_metrics
from kvrl.objectives.sparse_rl import SparseRLConfig
from kvrl.sampler.types import Rollout
from kvrl.train.algorithms.base import Fixed, Views
from kvrl.train.batch import Batch, Cut, minibatches
from kvrl.train.diagnostics import check_parity, difference, spread
from kvrl.train.distiller import Distiller
from kvrl.train.micro_batch import fed_lengths, micro_batches
from kvrl.train.optimizer import CRITIC, POLICY, STUDENT, current_rate, held_rate, optimized
from kvrl.train.run import Run
from kvrl.views import View


@dataclass(frozen=True)
class Course:
    """Who learns what from a rollout batch."""

    rollouts: list[Rollout]
    """Under `breadcrumbs` with beacons between their tokens."""
    fixed: Fixed
    rl: bool
    """Whether the rewards teach. If not, the distillation does alone."""
    view: View
    """Of the policy's forward, which holds the objective, the distillation into the policy itself, or both."""
    distiller: Distiller | None
    """Of the policy. None where another model is taught, and while the policy waits for its critic."""
    taught: Tensor | None
    """bool [N, C]: the tokens that the distillation counts."""
    two_graphs: bool
    """Whether objective and distillation share no graph: what the distillation costs can be told."""


@dataclass
class Tally:
    """What the updates on a batch add up to."""

    losses: list[Tensor] = field(default_factory=list)  # of each micro-batch
    parts: list[Metrics] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)  # of each optimiser step
    weights: list[float] = field(default_factory=list)  # of the distillation, in each optimiser step that has one
    taught_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Means over optimiser steps and tokens; nothing where no step was taken."""
        metrics = mean_metrics(merge_metrics(self.parts)) if self.parts else {}
        if self.weights:
            metrics["distill/weight"] = sum(self.weights) / len(self.weights)
        if self.norms:
            metrics["loss"] = float(sum(self.losses)) / len(self.norms)
            metrics["grad_norm"] = float(sum(self.norms)) / len(self.norms)
            metrics["entropy"] = float(torch.cat(self.entropies).mean())
        return metrics


def update(run: Run, batch: Batch, step: int, *, check: bool = False) -> dict[str, float]:
    """Every optimiser step on one batch; returns their metrics.

    check: parity by the first one's forward, before it changes anything. Raises ParityError.
    """
    config, settings = run.config, run.config.settings
    course, tally = make_course(run, batch, step), Tally()
    rate = current_rate(run.optimizer, POLICY if run.pupil is None else STUDENT)  # before the schedule goes on
    correction = course.fixed.views.correction
    metrics = dict(course.fixed.metrics) | ({} if correction is None else correction.metrics)
    for iteration in range(settings.num_iterations if course.rl or run.pupil is None else 0):
        order = config.seed + 1009 * step + iteration
        for mini in minibatches(len(course.rollouts), settings.num_minibatches, settings.num_generations, order):
            if course.rl and not course.fixed.teaches(mini):  # every sample was dropped or rejected
                run.skipped += 1
                continue
            first = not tally.norms
            differences = accumulate(run, course, mini, step, tally, compare=check and first)
            if check and first:
                metrics |= spread(torch.cat(differences))
                check_parity(metrics, config.parity_tolerances)
            tally.norms.append(optimizer_step(run, course, step))
    if run.pupil is not None:
        with held_rate(run.optimizer, STUDENT, rate):
            teach(run, course, step, tally)
        if not course.rl:
            run.scheduler.step()
    metrics |= tally.metrics()
    if course.two_graphs:
        metrics["breadcrumbs/seconds"] = tally.taught_seconds
    learner = POLICY if course.rl or run.pupil is None else STUDENT
    return metrics | {"learning_rate": current_rate(run.optimizer, learner), "updates_skipped": float(run.skipped)}


def make_course(run: Run, batch: Batch, step: int) -> Course:
    """What no update of this batch changes."""
    config, distiller = run.config, run.distiller
    rollouts, view, rl, breadcrumbs = batch.rollouts, config.learner_view, True, config.method == "breadcrumbs"
    if breadcrumbs:  # the view `dense` is without the beacons, `sparse` is the policy that the distillation teaches
        rollouts = insert_drawn(rollouts, beacons_for(config.cache, run.model), config.seed, step)
        rl = config.breadcrumbs.rl
        view = "dense" if rl else "sparse"  # alone the student needs the gradient, the teacher none
    if rl:
        fixed = run.algorithm.prepare(batch, fixed_views(run, batch), step)
    else:  # whatever the rewards are
        fixed = Fixed(completion_mask(rollouts), Views(sampler_logprobs(rollouts)), step)
    taught: Tensor | None = None
    if run.pupil is not None:  # whatever the rewards are
        taught, distiller = completion_mask(rollouts), None
    elif rl and run.algorithm.critic_alone(step):
        distiller = None
    elif distiller is not None:
        taught = distiller.mask(fixed.mask, fixed.advantages)
    return Course(
        rollouts=rollouts,
        fixed=fixed,
        rl=rl,
        view=view,
        distiller=distiller,
        taught=taught,
        two_graphs=breadcrumbs and rl and taught is not None,
    )


def accumulate(run: Run, course: Course, mini: list[int], step: int, tally: Tally, *, compare: bool) -> list[Tensor]:
    """Forward and backward over one optimiser step's samples, in micro-batches.

    Returns the differences to the sampler's log-probs, if they are compared.
    """
    algorithm, distiller, fixed, differences = run.algorithm, course.distiller, course.fixed, []
    distillation = None if distiller is None else distiller.distillation
    if course.rl:
        units, normaliser = algorithm.units(fixed, mini), algorithm.normaliser(fixed, mini)
    else:
        units = [[row] for row in mini]
    if distiller is not None:
        tally.weights.append(distiller.weight_at(step))
    for micro in micro_batches(fed_lengths(course.rollouts), run.config.train.micro_batch_tokens, units):
        chosen = [course.rollouts[i] for i in micro]
        scored = run.scorer(chosen, view=course.view, distill=distillation)
        cut = Cut(micro, scored.logps)
        if compare:
            differences.append(difference(scored.logps.detach(), chosen))
        loss, part = algorithm.loss(scored, fixed, cut, normaliser) if course.rl else (torch.zeros(()), {})
        if distiller is not None:
            assert course.taught is not None
            term, more = distiller.term(scored, cut(course.taught), int(course.taught[mini].sum()))
            if distiller.settings.grad_ratio is not None:
                distiller.gather(loss, term)
            term, part = distiller.weight_at(step) * term, part | more
            if course.two_graphs:
                start = now(term.device)
                run.accelerator.backward(term)
                tally.taught_seconds += scored.distill_seconds + now(term.device) - start
                term = term.detach()
            loss = loss + term
        run.accelerator.backward(loss)
        tally.losses.append(loss.detach())
        tally.parts.append(part)
        tally.entropies.append(scored.entropy[cut(fixed.mask)])
    return differences


def teach(run: Run, course: Course, step: int, tally: Tally) -> None:
    """A separate student's optimiser steps on the batch, with the policy as its updates left it as the teacher.

    Without reinforcement learning they are the run's steps, and their loss and gradient norm its own.
    """
    assert run.distiller is not None and course.taught is not None
    distillation, weight = run.distiller.distillation, run.distiller.weight_at(step)
    start, order = now(run.accelerator.device), run.config.seed + 1009 * step
    for mini in minibatches(len(course.rollouts), run.config.breadcrumbs.num_minibatches, 1, order):
        units = [[i] for i in mini]
        for micro in micro_batches(fed_lengths(course.rollouts), run.config.train.micro_batch_tokens, units):
            scored = run.pupil([course.rollouts[i] for i in micro], view=distillation.student, distill=distillation)
            taught = Cut(micro, scored.logps)(course.taught)
            term, part = run.distiller.term(scored, taught, int(course.taught[mini].sum()))
            run.accelerator.backward(weight * term)
            tally.parts.append(part)
            if not course.rl:
                tally.losses.append(weight * term.detach())
                tally.entropies.append(scored.entropy[taught])
        norm = clip_gradient(run, optimized(run.optimizer, STUDENT), step)
        run.optimizer.step()  # of the student alone: nothing else has a gradient
        run.optimizer.zero_grad(set_to_none=True)
        tally.weights.append(weight)
        if not course.rl:
            tally.norms.append(norm)
    tally.taught_seconds += now(run.accelerator.device) - start


def optimizer_step(run: Run, course: Course, step: int) -> Tensor:
    """Clip the gradients of policy and critic apart, and step. Returns the norm of the policy's."""
    if course.rl and run.algorithm.critic_alone(step):
        for tensor in optimized(run.optimizer, POLICY):
            tensor.grad = None
    norm = clip_gradient(run, optimized(run.optimizer), step)
    if critic := optimized(run.optimizer, CRITIC):
        clip_gradient(run, critic, step)
    run.optimizer.step()
    run.scheduler.step()
    run.optimizer.zero_grad(set_to_none=True)
    if run.distiller is not None:
        run.distiller.after_update()  # the average follows, the controller moves the weight
    return norm


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
        with run.reference.active():
            reference, _ = score_all(run, run.reference_scorer, rollouts)
    return Views(sampler, old, reference, values, correction)


@torch.no_grad()
def score_all(run: Run, scorer: Scorer, rollouts: list[Rollout]) -> tuple[Tensor, Tensor | None]:
    """All rollouts' log-probs (and values, with a critic) in the learner's view, no gradient: f32 [N, C] on the CPU."""
    logps = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts))
    values = None if scorer.critic is None else torch.zeros_like(logps)
    for micro in micro_batches(fed_lengths(rollouts), run.config.train.micro_batch_tokens):
        scored = scorer([rollouts[i] for i in micro], view=run.config.learner_view)
        logps[micro, : scored.logps.shape[1]] = scored.logps.float().cpu()
        if values is not None:
            values[micro, : scored.logps.shape[1]] = scored.values.float().cpu()
    return logps, values
