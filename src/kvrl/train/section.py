"""What every section of the configuration is, the number types that they share, and the section that stands twice."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: unknown fields, infinities and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class WarmStart(Section):
    """Cross-entropy on the task's worked solutions before the first rollout."""

    steps: int = Field(200, ge=1)
    """Optimiser steps of supervised training before reinforcement learning; for none leave the section out (null)."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations of one step."""
    learning_rate: Positive = 3e-3
    """Peak learning rate of AdamW: a short warm-up, level, then down to 0."""
    demonstrations: int | None = Field(None, ge=1)
    """Demonstrations drawn from the task and passed over again when spent. Default: steps * batch_size."""
    seed: int | None = Field(None, ge=0)
    """Seed of the demonstrations and their order. Default: the run's seed."""
