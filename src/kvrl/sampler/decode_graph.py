"""The decode step as one CUDA graph: its kernels are launched together instead of one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvrl.errors import KvrlError

WARM_UP = 2  # runs before the capture: libraries load and allocate then, which a capture must not see


class DecodeGraph:
    """`step` captured at fixed shapes; a call copies its inputs in, replays it and returns the static output.

    step: input_ids, positions and storage slots, int64 [3, S], to logits f32 [S, V], with no sync and no shape
    that depends on values. It runs on zeros before the capture: no slot may be in use yet.
    Raises KvrlError if it cannot be captured.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], num_slots: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3, num_slots, dtype=torch.int64, device=device)
        self.graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    step(self.inputs)
            torch.cuda.current_stream(device).wait_stream(side)
            with torch.cuda.graph(self.graph):
                self.logits = step(self.inputs)
        except RuntimeError as error:
            raise KvrlError(
                f"rollout.cuda_graphs: the model's decode step cannot be captured ({str(error).splitlines()[0]}); "
                "set rollout.cuda_graphs to false"
            ) from error

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits f32 [S, V], valid until the next call."""
        self.inputs.copy_(inputs)
        self.graph.replay()
        return self.logits
