"""The sampling section of a configuration, in the field's usual names."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvrl.errors import KvrlError

MIN_TEMPERATURE = 1e-3


class SamplingConfig(BaseModel):
    """How tokens are drawn. Every log-prob, the learner's too, is taken at this temperature and support."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    temperature: float = Field(1.0, ge=0.0)
    """Divides the logits. 0 takes the most likely token and records its log-prob at temperature 1."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Smallest set of most likely tokens whose mass reaches this (after `top_k`)."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens that stay; 0 keeps all."""
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    """Tokens below this share of the largest probability go; 0 keeps all."""
    max_completion_length: int = Field(256, ge=1)
    """Most tokens of a completion, inserted turns included."""
    num_generations: int = Field(1, ge=1)
    """Completions for each prompt; they share one prefill."""
    eos_token_ids: list[int] | None = None
    """Ids that end a completion. None: all of the model's generation config."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion (they stay in it); needs a tokenizer."""
    max_support: int = Field(1024, ge=1)
    """Most ids that a truncated distribution may keep at a token; more is an error, never a silent cut."""

    @model_validator(mode="after")
    def _can_sample(self) -> SamplingConfig:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise KvrlError(
                f"sampling.temperature: {self.temperature} is so small that logits overflow; use 0 (greedy) or at "
                f"least {MIN_TEMPERATURE}"
            )
        if "" in self.stop:
            raise KvrlError("sampling.stop: an empty string would end every completion at once; remove it")
        return self

    @property
    def truncates(self) -> bool:
        """Whether the sampler renormalises on a part of the vocabulary."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)
