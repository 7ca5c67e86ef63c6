"""The configuration of a training run: one pydantic model, read from a YAML file with flags over it.

Each default stands in one place, here or in the section's own module. A field that does not exist, a value
outside its limits or a combination that cannot work is refused when the file is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ByteSize, Field, model_validator

from kvrl.beacons.config import decodings, params_of
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.objectives.corrections import CorrectionConfig
from kvrl.objectives.sparse_rl import SparseRLConfig
from kvrl.rewards.config import RewardSettings
from kvrl.sampler.config import SamplingConfig
from kvrl.train.algorithms.settings import (
    AlgorithmSettings,
    GrpoSettings,
    OnlineDpoSettings,
    PpoSettings,
    RlooSettings,
)
from kvrl.train.beacons import BeaconSettings, BreadcrumbsSettings, check_beacons
from kvrl.train.distill_settings import DistillSettings
from kvrl.train.micro_batch import MAX_TOKENS
from kvrl.train.section import NonNegative, Positive, Section, WarmStart
from kvrl.views import View

Method = Literal["dense", "naive", "corrected", "sparse_rl", "shadow_mask", "breadcrumbs"]
AlgorithmName = Literal["grpo", "rloo", "ppo", "online_dpo"]
DType = Literal["float32", "bfloat16"]
Budget = Annotated[int, Field(ge=1)] | Literal["full"]

MAX_DEFAULT_SLOTS = 128

# |logp sampler - logp replay| per token: (mean, p99). float32 leaves room over kernel rounding (about 1e-6);
# bfloat16 over the noise between a cached and an uncached forward: 0.027 and 0.15 on SmolLM2's open text
# without any eviction (`kvrl parity --model smollm2-135m --dtype bfloat16`), where a dense learner is off by 0.13.
PARITY_TOLERANCES: dict[str, tuple[float, float]] = {"float32": (1e-5, 1e-4), "bfloat16": (0.05, 0.3)}


class ModelSettings(Section):
    path: str = "tiny"
    """A model folder, a hub name, or `tiny`: the small random model with the task's own vocabulary."""
    dtype: DType = "float32"
    """Type of the resident model. With bfloat16 the optimiser holds float32 masters."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class LoraSettings(Section):
    r: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """Scale: the adapters' output is multiplied by alpha / r."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules that get an adapter: `all-linear` (every linear layer but the head), or names."""
    modules_to_save: list[str] = []
    """Modules trained in full and saved with the adapters."""
    dropout: float = 0.0
    """Must stay 0: dropout noise would make the learner differ from the sampler."""

    @model_validator(mode="after")
    def _no_dropout(self) -> LoraSettings:
        if self.dropout != 0:
            raise KvrlError(
                f"lora.dropout: {self.dropout} is not 0, and its noise would make the learner differ "
                "from the sampler; set lora.dropout to 0"
            )
        return self


class RolloutSettings(Section):
    slots: int | None = Field(None, ge=1)
    """Sequences decoded at once. Default: prompts_per_step * num_generations, at most 128 (or what kv_memory holds)."""
    kv_memory: ByteSize | None = None
    """Most bytes for K and V of all slots, such as `2GiB`: the number of slots follows from it. None: no limit."""
    on_small_budget: Literal["stop", "drop"] = "stop"
    """A prompt, held out or not, whose protected entries exceed the budget stops the run, or is dropped and counted."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Most tokens of a prompt, held out or not; a longer one is never cut. None: no limit but the model's. If it is
    set, slots of the full cache are made for this length, whatever the prompts."""
    on_long_prompt: Literal["stop", "drop"] = "stop"
    """A prompt over max_prompt_length stops the run, or is dropped and counted."""
    native_kernels: bool = True
    """On a CPU, attend by a compiled kernel while decoding (needs g++)."""
    cuda_graphs: bool = False
    """On CUDA, launch decode steps and compactions as captured graphs (no mixtures of experts). Not yet run on one."""


class ReplaySettings(Section):
    backend: Literal["segments", "mask", "flex"] = "segments"
    """How the learner attends by lifetimes: equal in value. `mask` is the reference, `flex` needs CUDA."""
    logprob_chunk: int = Field(512, ge=1)
    """Positions whose logits exist at once when log-probs are computed."""
    native_kernels: bool = True
    """On a CPU, attention by segments and log-probs of bfloat16 models are compiled kernels (needs g++)."""


class TaskSettings(Section):
    name: str = "recurrence"
    """What is trained on: a name of the task registry."""
    params: dict[str, Any] = {}
    """Parameters of the task, checked by the task."""


class TrainSettings(Section):
    max_steps: int = Field(100, ge=1)
    """Rollout batches. Each gives num_iterations * num_minibatches optimiser steps."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts of one rollout batch."""
    micro_batch_tokens: int = Field(MAX_TOKENS, ge=1)
    """Most padded tokens of one forward and backward pass, warm start included; a longer sequence goes alone. Like
    lengths go together, so passes may be smaller; the loss is the same."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, on matrices alone."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    num_threads: int | None = Field(None, ge=1)
    """Arithmetic threads on the CPU. Default: PyTorch's."""


class EvalSettings(Section):
    every: int = Field(0, ge=0)
    """Steps between evaluations. 0: at the start and at the end alone."""
    n: int = Field(256, ge=0)
    """Held-out problems. 0: no evaluation."""
    budgets: list[Budget] | None = Field(None, min_length=1)
    """Cache budgets evaluated, `full` for the whole cache. Default: cache.budget (unless the policy is dense), full."""
    seed: int = Field(0, ge=0)
    """Seed of the held-out problems and of their sampling: the same at each evaluation."""
    benchmark: str | None = None
    """A benchmark that the trained model meets at the end under the same budgets and sampling: `math7`."""
    benchmark_dir: str | None = None
    """The folder of the benchmark's files. Default: they come from the hub."""
    benchmark_n: int | None = Field(None, ge=1)
    """Most problems of each of its sets. Default: all."""
    benchmark_params: dict[str, Any] = {}
    """Parameters of its tasks: `template`, `system`, `chat`."""


class ParitySettings(Section):
    samples: int = Field(16, ge=1)
    """Completions of each step on which |logp sampler - logp replay| is measured before any update. Where the learner's
    view is the sampler's, the first update's own forward tells instead, on all of its completions (not for mixtures of
    experts)."""
    mean_tolerance: Positive | None = None
    """Mean above which the run stops. Default: 1e-5 in float32, 0.05 in bfloat16."""
    p99_tolerance: Positive | None = None
    """99th percentile above which the run stops. Default: 1e-4 in float32, 0.3 in bfloat16."""
    dense_every: int = Field(10, ge=0)
    """Steps between measurements of the dense-against-sparse mismatch and the repetition rate. 0: never."""


class CheckpointSettings(Section):
    every: int = Field(0, ge=0)
    """Steps between checkpoints. 0: only the model at the end."""
    resume: str | None = None
    """A checkpoint folder, or `latest`: the newest one under output_dir. The warm start is then skipped."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept on disk; older ones are deleted."""


class Config(Section):
    """Everything that a training run depends on."""

    method: Method = "shadow_mask"
    """Which cache the rollouts use, in which view the learner computes, and what it does about a mismatch."""
    algorithm: AlgorithmName = "grpo"
    """The reinforcement learning algorithm; its settings stand in the section of its name."""
    output_dir: str = "runs/default"
    """Where metrics, checkpoints, table and plot go."""
    overwrite_output_dir: bool = False
    """Start anew in a folder that holds another run; without it such a folder is refused."""
    seed: int = Field(0, ge=0)
    """Seed of the model's random start, the data order and the sampler's random streams."""
    model: ModelSettings = ModelSettings()
    lora: LoraSettings | None = None
    cache: CacheConfig = CacheConfig()
    beacons: BeaconSettings = BeaconSettings()
    grpo: GrpoSettings = GrpoSettings()
    rloo: RlooSettings = RlooSettings()
    ppo: PpoSettings = PpoSettings()
    online_dpo: OnlineDpoSettings = OnlineDpoSettings()
    correction: CorrectionConfig = CorrectionConfig()
    sparse_rl: SparseRLConfig = SparseRLConfig()
    distill: DistillSettings = DistillSettings()
    breadcrumbs: BreadcrumbsSettings = BreadcrumbsSettings()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutSettings = RolloutSettings()
    replay: ReplaySettings = ReplaySettings()
    task: TaskSettings = TaskSettings()
    reward: RewardSettings = RewardSettings()
    train: TrainSettings = TrainSettings()
    warm_start: WarmStart | None = None
    eval: EvalSettings = EvalSettings()
    parity: ParitySettings = ParitySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()

    @property
    def settings(self) -> AlgorithmSettings:
        """The section of the algorithm in use."""
        return getattr(self, self.algorithm)

    @property
    def updates(self) -> int:
        """Optimiser steps of one rollout batch, as the learning rate's course counts them."""
        if self.separate_student and not self.breadcrumbs.rl:
            return 1  # of the student's, as many as they are
        return self.settings.num_iterations * self.settings.num_minibatches

    @property
    def distillation(self) -> DistillSettings | None:
        """The distillation between the views, if there is one: of `distill`, or the beacon policy's."""
        if self.method == "breadcrumbs":
            own = self.breadcrumbs
            return DistillSettings(
                weight=own.weight, teacher="dense", teacher_weights=own.teacher, average_decay=own.average_decay,
                kl=own.kl, top_k=own.top_k, warmup_steps=own.warmup_steps,
            )  # fmt: skip
        return self.distill if self.method == "shadow_mask" and self.distill.weight > 0 else None

    @property
    def separate_student(self) -> bool:
        """Whether beacons are read by another model than the policy, which is then kept beside it as the teacher."""
        return self.method == "breadcrumbs" and self.breadcrumbs.student == "separate"

    @property
    def learner_view(self) -> View:
        """The view of every log-prob in the objective: learner, old and reference."""
        return "sparse" if self.method == "shadow_mask" else "dense"

    @property
    def sampler_view(self) -> View:
        """The view that the sampler's own log-probs are in."""
        return "dense" if self.rollout_cache.is_dense else "sparse"

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the sampler's log-probs are the learner's before an update, up to fp32 rounding."""
        return self.learner_view == self.sampler_view and self.model.dtype == "float32"

    @property
    def rollout_cache(self) -> CacheConfig:
        """The rollouts' cache: under dense and breadcrumbs the full one, `cache` being what is evaluated or taught."""
        return self.cache.as_dense() if self.method in ("dense", "breadcrumbs") else self.cache

    @property
    def replayed_cache(self) -> CacheConfig:
        """The cache whose trace the view `sparse` replays: the rollouts', or the one that breadcrumbs teaches."""
        return self.cache if self.method == "breadcrumbs" else self.rollout_cache

    @property
    def slots(self) -> int:
        """Sequences decoded at once, if `rollout.kv_memory` holds them."""
        batch = self.train.prompts_per_step * self.settings.num_generations
        most = batch if self.rollout.kv_memory is not None else min(batch, MAX_DEFAULT_SLOTS)
        return self.rollout.slots or most

    @property
    def parity_tolerances(self) -> tuple[float, float]:
        """(mean, p99) of |logp sampler - logp replay| above which the run stops."""
        mean, p99 = PARITY_TOLERANCES[self.model.dtype]
        return self.parity.mean_tolerance or mean, self.parity.p99_tolerance or p99

    @property
    def eval_budgets(self) -> list[int | str]:
        """Cache budgets of the evaluation, `full` for the whole cache, `c=4` for beacons of every 4 tokens."""
        if self.eval.budgets is not None:
            return list(self.eval.budgets)
        if self.cache.is_beacon:
            params = params_of(self.cache)
            return [*decodings(params.rates or (), params.ordered), "full"]
        return ["full"] if self.cache.is_dense else [self.cache.budget, "full"]

    @model_validator(mode="after")
    def _group_size_has_one_place(self) -> Config:
        wanted = self.settings.num_generations
        if "num_generations" in self.sampling.model_fields_set and self.sampling.num_generations != wanted:
            raise KvrlError(
                f"sampling.num_generations: {self.sampling.num_generations} differs from "
                f"{self.algorithm}.num_generations ({wanted}), which it follows; set {self.algorithm}.num_generations "
                "alone"
            )
        self.sampling = self.sampling.model_copy(update={"num_generations": wanted})
        return self

    @model_validator(mode="after")
    def _method_fits_the_cache(self) -> Config:
        if self.method != "dense" and self.cache.policy == "dense":
            raise KvrlError(
                f"cache.policy: dense keeps every entry, so method {self.method} has nothing to compress; "
                "set method to dense, or cache.policy to one that `kvrl policies` lists"
            )
        if self.settings.old_logprobs == "sampler" and self.learner_view != self.sampler_view:
            raise KvrlError(
                f"{self.algorithm}.old_logprobs: sampler gives log-probs in the {self.sampler_view} view, and the "
                f"learner of method {self.method} is in the {self.learner_view} view; "
                f"set {self.algorithm}.old_logprobs to recompute"
            )
        return self

    @model_validator(mode="after")
    def _method_fits_the_algorithm(self) -> Config:
        if self.algorithm != "online_dpo":
            return self
        if self.method == "sparse_rl":
            raise KvrlError(
                "method: sparse_rl weighs the tokens of a policy gradient, and online_dpo's loss has no such term; "
                "set method to corrected with correction.action reject, or algorithm to grpo, rloo or ppo"
            )
        if self.method == "corrected" and self.correction.action != "reject":
            raise KvrlError(
                f"correction.action: {self.correction.action} weighs the terms of a policy gradient, and online_dpo's "
                "loss has none; set correction.action to reject, which leaves completions out of the pairs"
            )
        return self

    @model_validator(mode="after")
    def _distillation_fits_the_algorithm(self) -> Config:
        if self.distillation and self.distillation.positive_only and self.algorithm == "online_dpo":
            raise KvrlError("distill.positive_only: online_dpo compares pairs and has no advantages; set it to false")
        return self

    @model_validator(mode="after")
    def _policy_fits_its_budgets(self) -> Config:
        make_policy(self.cache)  # raises where parameters are wrong or the budget is too small
        for budget in self.eval_budgets:
            if isinstance(budget, str):
                continue
            if self.cache.is_beacon:
                raise KvrlError(
                    f"eval.budgets: {budget} has no meaning under cache.policy beacon, whose dial is "
                    "cache.params.every; set eval.budgets to [full], or leave it out for each window and full"
                )
            if self.cache.is_dense:
                raise KvrlError(
                    f"eval.budgets: {budget} has no meaning under cache.policy dense, which keeps every entry; "
                    "set eval.budgets to [full], or cache.policy to one that `kvrl policies` lists"
                )
            try:
                make_policy(self.cache.model_copy(update={"budget": budget}))
            except KvrlError as error:
                raise KvrlError(f"eval.budgets: {budget} is refused: {error}") from None
        return self

    @model_validator(mode="after")
    def _beacons_fit(self) -> Config:
        check_beacons(self)
        return self

    @model_validator(mode="after")
    def _sampler_explores(self) -> Config:
        if self.sampling.temperature == 0:
            raise KvrlError(
                "sampling.temperature: 0 is greedy, so all completions of a prompt are equal and nothing can "
                "be learned; set sampling.temperature above 0"
            )
        penalty, limit = self.settings.overlong_penalty, self.sampling.max_completion_length
        if penalty is not None and penalty.cache_length > limit:
            raise KvrlError(
                f"{self.algorithm}.overlong_penalty.cache_length: {penalty.cache_length} is above "
                f"sampling.max_completion_length ({limit}); lower it to at most {limit}"
            )
        return self

    @model_validator(mode="after")
    def _batch_and_schedule(self) -> Config:
        settings = self.settings
        if settings.num_minibatches > self.train.prompts_per_step:
            raise KvrlError(
                f"{self.algorithm}.num_minibatches: {settings.num_minibatches} is above train.prompts_per_step "
                f"({self.train.prompts_per_step}); lower it or raise train.prompts_per_step"
            )
        updates = self.train.max_steps * self.updates
        if self.train.warmup_steps >= updates:
            raise KvrlError(
                f"train.warmup_steps: {self.train.warmup_steps} is not below the run's {updates} optimiser "
                f"steps; lower it to at most {updates - 1}"
            )
        return self

    @model_validator(mode="after")
    def _replay_backend_exists_here(self) -> Config:
        if self.replay.backend == "flex" and not torch.cuda.is_available():
            raise KvrlError(
                "replay.backend: flex needs CUDA (it has no backward pass on the CPU) and none is available; "
                "set replay.backend to segments"
            )
        return self

    @model_validator(mode="after")
    def _resume_exists(self) -> Config:
        resume = self.checkpoint.resume
        if resume not in (None, "latest") and not Path(resume).is_dir():
            raise KvrlError(
                f"checkpoint.resume: {resume} is not a folder; give a checkpoint folder or `latest`, or leave it out"
            )
        return self


def load_config(path: str | Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Read a YAML file, lay `(dotted.path, YAML text)` flags over it, and check the whole.

    Errors: KvrlError, one line, for a file that cannot be read, and for the first wrong field.
    """
    from kvrl.train.config_file import read_config

    return read_config(Config, path, overrides)
