"""The reward section of a configuration: which functions score a completion, and what their mistakes do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvrl.errors import KvrlError
from kvrl.train.section import Positive, Section


class RewardEntry(Section):
    """One function. A text alone is its `func`."""

    func: str = Field(min_length=1)
    """A name of the reward registry, `path/to/file.py:function` or `package.module:function`."""
    weight: float | None = None
    """What the function's rewards are multiplied by in the sum. Default: 1."""
    params: dict[str, Any] = {}
    """Its parameters: fields of a reward of the registry, keyword arguments of a function."""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, value: Any) -> Any:
        return {"func": value} if isinstance(value, str) else value


class RewardSettings(Section):
    """The section."""

    funcs: list[RewardEntry] = Field([RewardEntry(func="task")], min_length=1)
    """Functions whose weighted rewards are summed; `task` is the task's own scorer."""
    weights: list[float] | None = None
    """One weight for each function, in place of the entries' own."""
    on_error: Literal["stop", "drop"] = "stop"
    """A NaN, an exception or a time limit passed stops the run with the sample named, or drops the sample."""
    timeout: Positive | None = None
    """Seconds that one function may take for one batch. None: no limit."""

    @model_validator(mode="after")
    def _weights_have_one_place(self) -> RewardSettings:
        if self.weights is None:
            return self
        if len(self.weights) != len(self.funcs):
            raise KvrlError(f"reward.weights: {len(self.weights)} weights for {len(self.funcs)} functions in "
                            "reward.funcs; give one each")  # fmt: skip
        for entry in self.funcs:
            if entry.weight is not None:
                raise KvrlError(f"reward.weights: is given, and so is the weight of {entry.func} in reward.funcs; "
                                "keep one of the two")  # fmt: skip
        return self

    @property
    def all_weights(self) -> list[float]:
        """One weight for each function."""
        if self.weights is not None:
            return self.weights
        return [1.0 if entry.weight is None else entry.weight for entry in self.funcs]
