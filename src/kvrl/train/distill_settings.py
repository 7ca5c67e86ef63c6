"""The distillation between the views in a run's configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvrl.errors import KvrlError
from kvrl.objectives.distill import HIGHEST_WEIGHT, LOWEST_WEIGHT, KLKind
from kvrl.train.section import NonNegative, Positive, Section
from kvrl.views import View


class DistillSettings(Section):
    """Track 2 of Shadow Mask Distillation: a full-vocabulary KL between the two views, per response token."""

    preset: Literal["paper"] | None = None
    """`paper` is arXiv 2605.06850, section 3: 0.1 KL(dense || sparse), of which the sparse view has no gradient; fields
    given beside it override it."""
    weight: NonNegative = 0.0
    """Weight of the term, a mean over the tokens that the objective counts (under online_dpo those of the pairs). 0: no
    dense forward."""
    teacher: View = "sparse"
    """The view that teaches, without gradient; the other learns."""
    teacher_weights: Literal["live", "start", "average"] = "live"
    """Whose weights teach: the policy's as they are, the starting model's, or a moving average of the policy's."""
    average_decay: float = Field(0.99, ge=0, lt=1)
    """Decay of the average after each optimiser step."""
    kl: KLKind = "forward"
    """`forward` is KL(teacher || student), `reverse` KL(student || teacher), `js` Jensen-Shannon."""
    top_k: int | None = Field(None, ge=1)
    """Ids of the teacher's distribution that are told apart, the rest being one event; None, or over the vocabulary:
    all."""
    warmup_steps: int = Field(0, ge=0)
    """Rollout batches over which the weight rises from 0."""
    grad_ratio: Positive | None = None
    """Hold the gradient norm of the weighted term at this share of the objective's, by a weight that starts at
    `distill.weight` and is kept between 1e-5 and 1."""
    positive_only: bool = False
    """Only at tokens of completions with a positive advantage."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("preset") == "paper":
            return {"weight": 0.1, "teacher": "sparse", "kl": "reverse"} | data
        return data

    @model_validator(mode="after")
    def _has_a_weight(self) -> DistillSettings:
        given = sorted(self.model_fields_set - {"weight"})
        if given and "weight" not in self.model_fields_set:
            raise KvrlError(f"distill.{given[0]}: has no effect, as distill.weight is 0 by default; set distill.weight")
        if self.grad_ratio is not None and not LOWEST_WEIGHT <= self.weight <= HIGHEST_WEIGHT:
            raise KvrlError(
                f"distill.weight: {self.weight:g} is where the controller of distill.grad_ratio starts; give one from "
                f"{LOWEST_WEIGHT:g} to {HIGHEST_WEIGHT:g}"
            )
        return self
