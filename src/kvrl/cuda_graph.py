"""A step captured as one CUDA graph: its kernels are launched together instead of one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvrl.errors import KvrlError

WARM_UP = 2  # runs before the capture: libraries load and allocate then, which a capture must not see

Output = TypeVar("Output")


class Captured(Generic[Output]):
    """`step` captured at a fixed shape; a call copies its input in, replays it and returns the static output.

    step: takes int64 [shape], with no sync and no shape that depends on values. It runs on zeros before the capture:
    no slot may be in use yet. what: the step's name in an error. Raises KvrlError if it cannot be captured.
    """

    def __init__(
        self, step: Callable[[Tensor], Output], shape: tuple[int, ...], device: torch.device, what: str
    ) -> None:
        self.inputs = torch.zeros(shape, dtype=torch.int64, device=device)
        self.graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    step(self.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(self.graph):
                self.output = step(self.inputs)
        except RuntimeError as error:
            raise KvrlError(
                f"rollout.cuda_graphs: {what} cannot be captured ({str(error).splitlines()[0]}); "
                "set rollout.cuda_graphs to false"
            ) from error

    def __call__(self, inputs: Tensor) -> Output:
        """The output for these inputs, valid until the next call."""
        self.inputs.copy_(inputs)
        self.graph.replay()
        return self.output
