"""The cache section of a configuration: what a sequence may hold and who decides what goes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Granularity = Literal["per_head", "per_layer", "shared"]


class CacheConfig(BaseModel):
    """A sequence's KV cache. The one dial is `budget`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    policy: str = "rkv"
    """Which entries go: a name of `kvrl policies`, `beacon` for learned beacons, or `dense` for the full cache."""
    budget: int = Field(512, ge=1)
    """KV entries that a sequence keeps per layer and KV head after a compaction."""
    buffer: int = Field(128, ge=1)
    """New entries between two compactions; a compaction runs whenever `budget + buffer` entries are held."""
    window: int | None = Field(None, ge=0)
    """Newest entries that always stay. None: the policy's own (see `kvrl policies`)."""
    sinks: int | None = Field(None, ge=0)
    """First tokens that always stay. None: the policy's own (4 for most)."""
    protect_prompt: bool = False
    """Keep the whole prompt for the whole rollout."""
    granularity: Granularity | None = None
    """Whose scores choose together: each KV head, the heads of a layer, or all layers. None: the policy's own."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further parameters of the policy (see `kvrl policies`)."""

    @property
    def capacity(self) -> int:
        """Entries that a slot can hold: `budget + buffer`."""
        return self.budget + self.buffer

    @property
    def is_dense(self) -> bool:
        return self.policy == "dense"

    @property
    def is_beacon(self) -> bool:
        """Whether windows go when their beacon was read; budget and buffer have no meaning then."""
        return self.policy == "beacon"

    def at_budget(self, budget: int | str) -> CacheConfig:
        """The same section at a point of an evaluation: a budget, `full`, `c=4` for beacons of every 4 tokens, or
        `c=2,2,8` for windows of 2, 2 and then 8."""
        if budget == "full":
            return self.as_dense()
        if isinstance(budget, str):
            windows = [int(c) for c in budget.removeprefix("c=").split(",")]
            chosen = {"schedule": windows} if len(windows) > 1 else {"every": windows[0], "schedule": "constant"}
            return self.model_copy(update={"params": {**self.params, **chosen}})
        return self.model_copy(update={"budget": budget})

    def as_dense(self) -> CacheConfig:
        """The same section with the full cache."""
        return self.model_copy(update={"policy": "dense", "params": {}})
