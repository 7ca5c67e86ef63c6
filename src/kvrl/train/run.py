"""A run: everything that a training step needs, loaded, warm-started or resumed."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

from kvrl.beacons.config import beacons_for
from kvrl.critic import Critic
from kvrl.distill import Distillation, always
from kvrl.errors import KvrlError, RewardError
from kvrl.eval.benchmark import Fields, load_sets
from kvrl.eval.run_defaults import run_of
from kvrl.learner import Scorer
from kvrl.rewards.build import Rewards, build_rewards, pair_judge
from kvrl.rewards.call import Scores
from kvrl.rewards.pairs import Preferences
from kvrl.sampler.request import Progress
from kvrl.tasks import Task, get_task
from kvrl.tasks.math import MathProblems, math_scorer
from kvrl.train.algorithms import make_algorithm
from kvrl.train.algorithms.base import Algorithm
from kvrl.train.beacon_start import beacon_start
from kvrl.train.checkpoint import (
    MODEL,
    TEACHER,
    check_resume,
    find_checkpoint,
    load_state,
    load_training,
    save_model,
)
from kvrl.train.config import Config
from kvrl.train.data import PromptLimits, PromptStream, columns_of
from kvrl.train.distiller import Distiller
from kvrl.train.optimizer import MasterAdamW, make_optimizer, make_scheduler
from kvrl.train.preflight import preflight
from kvrl.train.section import WarmStart
from kvrl.train.setup import REFERENCE, Reference, adapters_of, load_policy
from kvrl.train.supervised import BETAS, check_demonstrations
from kvrl.train.warm_start import warm_start

Say = Callable[[str], object]


@dataclass
class Run:
    """Everything that a step needs. `model` learns, and samples unless `writer` says otherwise; `scorer` wraps it."""

    config: Config
    accelerator: Accelerator
    task: Task
    rewards: Rewards | Preferences
    tokenizer: Any
    model: nn.Module
    scorer: Any
    critic: Critic | None
    pupil: Any
    """The scorer of a student that is another model than the policy; None where the policy itself learns."""
    algorithm: Algorithm
    reference: Reference | None
    distiller: Distiller | None
    optimizer: Any
    scheduler: Any
    prompts: PromptStream
    benchmark: list[tuple[str, MathProblems]]
    """The sets of `eval.benchmark`."""
    skipped: int = 0
    on_step: Callable[[Progress], None] | None = None
    """Told of each decode step."""

    @property
    def student(self) -> nn.Module | None:
        """The model that reads beacons, where it is another one than the policy."""
        return None if self.pupil is None else self.accelerator.unwrap_model(self.pupil).model

    @property
    def models(self) -> dict[str, nn.Module]:
        """What is saved, by the folder's name: what was trained for, and a separate student's teacher."""
        return {MODEL: self.model} if self.student is None else {MODEL: self.student, TEACHER: self.model}

    def score(self, texts: list[str], columns: Mapping[str, list]) -> Scores:
        """The completions' rewards. RewardError if they cannot be had."""
        try:
            return self.rewards(texts, columns)
        except KvrlError as error:
            raise RewardError(str(error)) from error

    def state(self) -> dict[str, int]:
        """Where the run stands between two steps, beside what its models and optimiser hold."""
        prompts = self.prompts
        return {
            "position": prompts.position,
            "dropped": prompts.dropped,
            "block": prompts.block,
            "skipped": self.skipped,
        }

    @contextlib.contextmanager
    def writer(self) -> Iterator[nn.Module]:
        """The model that rollouts are sampled from: the policy, or the start where it teaches and no reward does.

        Weights that learn to read beacons from the start lose what they wrote without them.
        """
        breadcrumbs = self.config.method == "breadcrumbs" and self.pupil is None
        if breadcrumbs and not self.config.breadcrumbs.rl and self.config.breadcrumbs.teacher == "start":
            assert self.reference is not None
            with self.reference.active() as model:
                yield model
        else:
            yield self.model

    def scorer_of(self, model: nn.Module) -> Scorer:
        """The log-probs of a model that `writer` gives."""
        return self.accelerator.unwrap_model(self.scorer) if model is self.model else self.reference_scorer

    @cached_property
    def reference_scorer(self) -> Scorer:
        """The reference's log-probs; made once, as a scorer checks its model's head by forwards."""
        assert self.reference is not None
        return Scorer(self.reference.model, **scoring_of(self.config))

    def decoded(self) -> list[tuple[nn.Module, list[int | str]]]:
        """Models with the budgets under which they are evaluated."""
        budgets = self.config.eval_budgets
        if self.student is None:
            return [(self.model, budgets)]
        compressed, full = ([b for b in budgets if (b == "full") is flag] for flag in (False, True))
        return [(model, part) for model, part in ((self.student, compressed), (self.model, full)) if part]


def build(config: Config, say: Say = print) -> tuple[Run, int]:
    """Load or resume everything; returns the run and the steps already done."""
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    output_dir = Path(config.output_dir)
    resumed = find_checkpoint(output_dir, config.checkpoint.resume)
    if resumed is not None:
        check_resume(resumed, config)
    torch.manual_seed(config.seed)
    # `accelerate launch` may set a number in the environment, which would divide every gradient once more
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))
    task = get_task(config.task.name, **config.task.params)
    # a missing column, a file too short or a judge that is down is told before a model is loaded
    rewards = make_rewards(config, task, accelerator.device)
    rewards.check(columns_of(task.rows("train", 1, config.seed)))
    if config.eval.n:
        held_out = columns_of(task.rows("eval", config.eval.n, config.eval.seed)[:1])
        if task.reward is None:
            check_scored_alone(config, rewards, held_out)
    benchmark = load_benchmark(config)
    for field, section in (
        ("warm_start", config.warm_start),
        ("breadcrumbs.warm_start", config.breadcrumbs.warm_start),
    ):
        if section is not None and resumed is None:
            check_demonstrations(task, field)
    apart = config.separate_student
    model, tokenizer = load_policy(config, task, resumed / (TEACHER if apart else MODEL) if resumed else None)
    model.to(accelerator.device)
    preflight(config, model, tokenizer, task, say)
    if resumed is not None:
        say(f"resumed from {resumed}")
    elif config.warm_start is not None:
        if run_of(config.model.path) is not None:
            say(
                f"warning: warm_start: {config.model.path} is the model of a run already; set warm_start to null to go "
                "on from it as it is"
            )
        supervise(config, model, tokenizer, task, say)
    reference = distiller = critic = student = pupil = None
    if apart:
        student = copy.deepcopy(model) if resumed is None else load_policy(config, task, resumed / MODEL)[0]
        student.to(accelerator.device)
    distillation = config.distillation
    taught_by_start = distillation is not None and distillation.teacher_weights == "start"
    if config.settings.beta > 0 or taught_by_start:
        kept = None if resumed is None else resumed.parent.parent / REFERENCE
        reference = starting_model(config, model, kept)
    if distillation is not None:
        distiller = Distiller(distillation, model, reference, apart=apart)
    if config.algorithm == "ppo":
        critic = Critic(model, own_model=config.ppo.critic == "model")
    scoring = scoring_of(config)
    scorer = Scorer(model, critic=critic, **scoring).train()
    if student is not None:
        pupil = Scorer(student, **scoring).train()
        if config.breadcrumbs.warm_start is not None and resumed is None:
            teach_beacons(config, pupil, model, tokenizer, task, say)
    optimizer = make_optimizer(
        model, config.train, None, critic, config.ppo.critic_learning_rate, student, config.breadcrumbs.learning_rate
    )
    scheduler = make_scheduler(optimizer, config.train, config.train.max_steps * config.updates)
    scorer, optimizer, scheduler = accelerator.prepare(scorer, optimizer, scheduler)
    if pupil is not None:
        pupil = accelerator.prepare(pupil)
    prompts = PromptStream(
        task, tokenizer, seed=config.seed, block=config.train.prompts_per_step * config.train.max_steps,
        limits=PromptLimits.of(config.rollout, config.rollout_cache),
    )  # fmt: skip
    run = Run(
        config, accelerator, task, rewards, tokenizer, model, scorer, critic, pupil, make_algorithm(config),
        reference, distiller, optimizer, scheduler, prompts, benchmark,
    )  # fmt: skip
    if resumed is None:
        return run, 0
    state = load_state(resumed)
    load_training(resumed, optimizer=optimizer, scheduler=scheduler, critic=critic, distiller=distiller)
    prompts.position, prompts.dropped, run.skipped = state["position"], state["dropped"], state["skipped"]
    prompts.block = state["block"]  # a longer run goes on with the order that the shorter one had
    return run, state["step"]


def scoring_of(config: Config) -> dict[str, Any]:
    """What the replay section says to a scorer."""
    replay = config.replay
    return {"backend": replay.backend, "chunk": replay.logprob_chunk, "native_kernels": replay.native_kernels}


def make_rewards(config: Config, task: Task, device: torch.device) -> Rewards | Preferences:
    """The reward section's functions, or for Online DPO a judge that compares completions."""
    judge = pair_judge(config.reward) if config.algorithm == "online_dpo" else None
    return (
        build_rewards(config.reward, task, device)
        if judge is None
        else Preferences(judge, config.sampling.num_generations)
    )


def load_benchmark(config: Config) -> list[tuple[str, MathProblems]]:
    """The sets that the trained model meets at the end, if there are any."""
    if config.eval.benchmark is None:
        return []
    math_scorer()  # a missing package is told now
    fields = Fields("eval.benchmark", "eval.benchmark_dir")
    return load_sets(config.eval.benchmark, config.eval.benchmark_dir, config.eval.benchmark_params, fields=fields)


def check_scored_alone(config: Config, rewards: Rewards | Preferences, columns: Mapping[str, list]) -> None:
    """Raise KvrlError if the run's rewards cannot score held-out completions of a task that has no scorer."""
    if isinstance(rewards, Preferences):
        raise KvrlError(
            f"eval.n: {config.eval.n} held-out completions, one to a problem, and neither the task, which has no "
            "answers, nor a pairwise judge can score one alone; set eval.n to 0"
        )
    rewards.check(columns)


def supervise(config: Config, model: Any, tokenizer: Any, task: Task, say: Say) -> None:
    """The supervised warm start."""
    assert config.warm_start is not None
    steps = partial(
        warm_start, model, tokenizer, task, config.warm_start, config.seed, max_tokens=config.train.micro_batch_tokens
    )
    on_demonstrations(config, config.warm_start, model, "warm start", steps, say)


def teach_beacons(config: Config, pupil: Scorer, teacher: Any, tokenizer: Any, task: Task, say: Say) -> None:
    """A separate student's own start; the policy as it is teaches."""
    own = config.breadcrumbs
    assert own.warm_start is not None
    distillation = Distillation("dense", own.kl, own.top_k, always(teacher))
    beacons, temperature = beacons_for(config.cache, pupil.model), config.sampling.temperature or 1.0
    steps = partial(
        beacon_start, pupil, distillation, beacons, tokenizer, task, own.warm_start, config.seed, temperature,
        max_tokens=config.train.micro_batch_tokens,
    )  # fmt: skip
    on_demonstrations(config, own.warm_start, pupil.model, "beacons' warm start", steps, say)


def on_demonstrations(
    config: Config, settings: WarmStart, model: Any, name: str, steps: Callable[[Any], dict[str, float]], say: Say
) -> None:
    """Take steps on demonstrations with an optimiser of their own, and tell what they did."""
    betas = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "weight_decay": 0.0}
    optimizer = make_optimizer(model, config.train.model_copy(update=betas), settings.learning_rate)
    say(f"{name}: {settings.steps} steps of {settings.batch_size} demonstrations ...")
    start = time.perf_counter()
    done = steps(optimizer)
    if isinstance(optimizer, MasterAdamW):
        optimizer.release()
    say(
        f"{name}: {settings.steps} steps, loss {done['first_loss']:.3f} -> {done['last_loss']:.3f} nats, "
        f"{time.perf_counter() - start:.0f} s"
    )


def make_start(config: Config, folder: Path, say: Say) -> None:
    """Warm-start a model and write its folder: what several runs can start from."""
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    torch.manual_seed(config.seed)
    task = get_task(config.task.name, **config.task.params)
    model, tokenizer = load_policy(config, task, None)
    preflight(config, model, tokenizer, task, say)
    supervise(config, model, tokenizer, task, say)
    save_model(folder, model, tokenizer)


def starting_model(config: Config, model: Any, folder: Path | None) -> Reference:
    """The model that KL and distillation refer to: as it is now, or as the resumed run kept it in `folder`."""
    lora = config.lora is not None
    if lora and config.warm_start is None:
        return Reference(model, lora=True)
    if folder is None:
        started = {name: tensor.clone() for name, tensor in adapters_of(model).items()} if lora else None
        return Reference(model, lora=lora, adapters=started)
    if not folder.is_dir():
        raise KvrlError(
            f"checkpoint.resume: {folder} is missing, the model that the run started from; restore it or start anew"
        )
    return Reference.load(folder, model, lora=lora)
