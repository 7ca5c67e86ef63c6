"""What this machine can do at best: memory bandwidth and matrix rate, measured."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from kvrl.attention.probe import ModelSpec
from kvrl.clock import now


@dataclass(frozen=True)
class Machine:
    """Measured limits, for products and reads of the dtype that is benchmarked."""

    bandwidth: float
    """Bytes a second that a large tensor is read with."""
    matrix_rate: float
    """Floating-point operations a second of a large matrix product."""

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device, *, floats: int = 128 << 20, side: int = 4096) -> Machine:
        """About a second. The defaults are beyond every cache: 512 MiB are read, and square matrices multiplied."""
        big = torch.ones(floats, dtype=torch.float32, device=device)
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        return cls(
            bandwidth=big.nbytes / median_seconds(lambda: big.sum(), 7, device),
            matrix_rate=2 * side**3 / median_seconds(lambda: a @ b, 5, device),
        )

    def decode_seconds(self, model: nn.Module, spec: ModelSpec, slots: int, entries: int) -> float:
        """The roofline of one decode step: every weight's product, then every held K and V read once."""
        weights = matrix_weights(model)
        itemsize = next(model.parameters()).element_size()
        kv = 2 * spec.num_layers * spec.kv_heads * spec.head_dim * entries * slots * itemsize
        products = max(2 * weights * slots / self.matrix_rate, weights * itemsize / self.bandwidth)
        return products + kv / self.bandwidth


def matrix_weights(model: nn.Module) -> int:
    """Weights that a token is multiplied with: every linear layer, a tied head once."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def median_seconds(func: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median wall time of a call, after one to warm up."""
    times = []
    for i in range(repeats + 1):
        start = now(device)
        func()
        if i:
            times.append(now(device) - start)
    return statistics.median(times)


def versions() -> dict[str, str]:
    """What was run: packages, processor or card, threads."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    found = {name: version(name) for name in ("kvrl", "torch", "transformers")}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found | {
        "python": platform.python_version(),
        "cpu": cpu,
        "gpu": card,
        "threads": str(torch.get_num_threads()),
    }
