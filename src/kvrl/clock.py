"""Time as the device sees it: a GPU goes on while Python has moved on."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds on a clock, read when the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
