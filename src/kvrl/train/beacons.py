"""Beacons in a run's configuration: their sections, and what does not go together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from kvrl.beacons.config import check_limit, params_of
from kvrl.errors import KvrlError
from kvrl.objectives.distill import KLKind
from kvrl.train.section import NonNegative, Positive, Section, WarmStart

if TYPE_CHECKING:
    from kvrl.train.config import Config


class BeaconSettings(Section):
    """The beacon that a model without one is given under `cache.policy: beacon`; it is saved with the model."""

    token: str | None = None
    """A special token of the tokenizer, kept free, that becomes the beacon. None: a new one, with a new embedding."""
    start: str = "mean"
    """Where its embedding starts: `mean` of all others, or a token whose embedding it takes."""


class BeaconWarmStart(WarmStart):
    """Before the first rollout the same distillation on the task's worked solutions, into a separate student: many more
    tokens than rollouts give in the time. The policy as its own warm start left it teaches."""


class BreadcrumbsSettings(Section):
    """Method `breadcrumbs`: the step's rollouts, sampled with the full cache, teach the beacon policy too."""

    rl: bool = True
    """The uncompressed policy learns from the rewards in the same steps (joint). false: distillation alone, for a model
    whose reinforcement learning is over (sequential)."""
    student: Literal["same", "separate"] = "same"
    """Which weights read beacons: the policy's own, or a second model, which starts as a copy of the policy and learns
    by the distillation alone. It is saved as `model`, the policy beside it as `teacher`."""
    learning_rate: Positive | None = None
    """Peak learning rate of a separate student. Default: train.learning_rate."""
    num_minibatches: int = Field(1, ge=1)
    """Parts of a rollout batch on each of which a separate student takes an optimiser step."""
    warm_start: BeaconWarmStart | None = None
    """None: a separate student starts as a copy that never saw a beacon."""
    weight: NonNegative = 1.0
    """Weight of the distillation, a mean KL over response tokens."""
    kl: KLKind = "forward"
    """`forward` is KL(teacher || student), `reverse` KL(student || teacher), `js` Jensen-Shannon; the beacon policy is
    the student."""
    teacher: Literal["live", "start", "average"] = "live"
    """Whose weights teach, without beacons: the policy's as they are, the starting model's, or a moving average of the
    policy's. Under LoRA `start` is the base without adapters (or with the warm start's), and they are the student."""
    average_decay: float = Field(0.99, ge=0, lt=1)
    """Decay of the average after each optimiser step."""
    top_k: int | None = Field(None, ge=1)
    """Ids of the teacher's distribution that are told apart, the rest being one event; None: all."""
    warmup_steps: int = Field(0, ge=0)
    """Rollout batches over which the weight rises from 0."""


def changed(section: BaseModel) -> list[str]:
    """The fields that differ from their defaults: a configuration written out in full must be readable again."""
    return sorted(name for name, info in type(section).model_fields.items() if getattr(section, name) != info.default)


def check_beacons(config: Config) -> None:
    """Raise KvrlError for beacons that the rest of a configuration does not allow."""
    cache, own = config.cache, config.breadcrumbs
    if config.method != "breadcrumbs":
        if given := changed(own):
            raise KvrlError(
                f"breadcrumbs.{given[0]}: has no meaning under method {config.method}; set method to breadcrumbs, or "
                f"leave breadcrumbs.{given[0]} out (`--breadcrumbs {{}}` leaves all of a file's section out)"
            )
    elif not cache.is_beacon:
        raise KvrlError(
            f"cache.policy: {cache.policy} has no beacons, which method breadcrumbs teaches; set cache.policy to beacon"
        )
    elif own.student == "separate" and config.lora is not None:
        raise KvrlError(
            "breadcrumbs.student: separate would copy the base under the adapters too; leave it out, and set "
            "breadcrumbs.teacher to start for adapters that the base teaches"
        )
    elif own.student == "same" and own.learning_rate is not None:
        raise KvrlError(
            "breadcrumbs.learning_rate: is that of a separate student, and the policy itself learns; set "
            "train.learning_rate, or breadcrumbs.student to separate"
        )
    elif own.student == "same" and own.num_minibatches > 1:
        raise KvrlError(
            "breadcrumbs.num_minibatches: is that of a separate student, and the policy itself learns with the "
            f"objective; set {config.algorithm}.num_minibatches, or breadcrumbs.student to separate"
        )
    elif own.num_minibatches > (batch := config.train.prompts_per_step * config.settings.num_generations):
        raise KvrlError(
            f"breadcrumbs.num_minibatches: {own.num_minibatches} is above the {batch} completions of a rollout batch; "
            "lower it"
        )
    elif own.student == "same" and own.warm_start is not None:
        raise KvrlError(
            "breadcrumbs.warm_start: is that of a separate student, and the policy's own weights would unlearn their "
            "task; set breadcrumbs.student to separate, or leave it out"
        )
    elif not own.weight:
        raise KvrlError(
            "breadcrumbs.weight: 0 teaches no beacon; raise it above 0, or set method to dense for the uncompressed "
            "policy alone"
        )
    if not cache.is_beacon:
        if given := changed(config.beacons):
            raise KvrlError(
                f"beacons.{given[0]}: cache.policy {cache.policy} has no beacons; set cache.policy to beacon, or leave "
                f"beacons.{given[0]} out"
            )
        return
    rates = params_of(cache).rates
    if rates is None:
        raise KvrlError(
            "cache.params.every: is missing; give the raw tokens that a beacon stands for, such as 4, or [2, 4, 8] to "
            "draw one for each completion"
        )
    check_limit(rates, config.sampling.max_completion_length)
