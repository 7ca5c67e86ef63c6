"""Forwards of models without weights, on torch's meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def meta_forward() -> Iterator[None]:
    """Inside, a model on the meta device runs under transformers 5.2 and 5.3 too.

    They ask torch whether autocast is on for the input's device, which torch refuses to answer for meta. Later
    versions do not ask.
    """
    ask = torch.is_autocast_enabled

    def answer(*device: Any) -> bool:
        return False if device == ("meta",) else ask(*device)

    torch.is_autocast_enabled = answer  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.is_autocast_enabled = ask
