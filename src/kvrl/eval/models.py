"""The models that `kvrl eval` decodes with."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from kvrl.beacons.model import NAME
from kvrl.errors import KvrlError


def load(path: str, dtype: str, field: str) -> tuple[nn.Module, Any]:
    """A model on this machine's device, and its tokenizer."""
    from kvrl.train.setup import load_model

    model, tokenizer = load_model(path, dtype, field=field)
    return model.to(Accelerator().device), tokenizer


def load_other(path: str, dtype: str, field: str, tokenizer: Any) -> nn.Module:
    """A further model. KvrlError for one that reads other tokens."""
    model, own = load(path, dtype, field)
    ours, theirs = ({k: v for k, v in t.get_vocab().items() if k != NAME} for t in (tokenizer, own))
    if ours != theirs:
        raise KvrlError(f"{field}: {path} has other tokens than MODEL; compare models of one tokenizer")
    return model
