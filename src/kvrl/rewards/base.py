"""What the rewards of the registry have in common: parameters, columns and checks before the first rollout."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from kvrl.errors import KvrlError


class Reward(BaseModel):
    """A reward with parameters. A subclass adds fields and `__call__(completions, **columns)`, which may be async."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
    name: ClassVar[str]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that it reads."""
        return ()

    def prepare(self, device: torch.device) -> None:
        """Import, load and reach what it needs, once, before the first rollout. Errors: KvrlError."""

    def check(self, columns: Mapping[str, list]) -> None:
        """Look at the first rows. Errors: KvrlError for rows that it cannot score."""

    def __call__(self, completions: list[str], **columns: list) -> Any:
        """One number, None or BadReward for each completion."""
        raise NotImplementedError


def require(package: str, extra: str, reward: str) -> ModuleType:
    """Import a package that an extra of kvrl brings. Errors: KvrlError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        top = package.partition(".")[0]
        if error.name != top:
            raise
        raise KvrlError(
            f"reward.funcs.{reward}: needs the package {top}, which is not installed; run pip install -e '.[{extra}]' "
            "in kvrl's folder"
        ) from None
