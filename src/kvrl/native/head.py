"""The head's product on a CPU with bfloat16 instructions: bfloat16 in, float32 out, at the speed of bfloat16."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from kvrl.native.build import load
from kvrl.native.gemm import multiplies, pack


def packable(module: nn.Module) -> bool:
    """Whether the head is a plain bfloat16 product on a CPU that has instructions for it; compiles the kernel."""
    if type(module) is not nn.Linear or module.bias is not None:
        return False
    weight = module.weight
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.shape[1] % 2:
        return False
    return multiplies(weight.dtype) and load("head") is not None


class PackedHead:
    """A head's weight [V, E] in the order in which the kernel reads it. A copy: made anew when the weight changes."""

    def __init__(self, weight: Tensor) -> None:
        self.library = load("head")
        self.n, self.k = weight.shape
        self.packed = pack(weight)

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """bfloat16 [..., E] -> f32 [..., V]. out: f32 [rows or more, V] whose first rows take it, made if not given."""
        flat = hidden.reshape(-1, self.k).contiguous()
        out = torch.empty(len(flat), self.n) if out is None else out[: len(flat)]
        assert self.library is not None and flat.dtype == torch.bfloat16
        self.library.kvrl_head(*arguments(flat, self.packed, out, len(flat), self.n, self.k))
        return out.view(*hidden.shape[:-1], self.n)


def arguments(*given: Tensor | int) -> list[ctypes._SimpleCData]:
    """Pointers of contiguous tensors and sizes as C types, and the number of threads."""
    return [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_int64(x)
        for x in (*given, torch.get_num_threads())
    ]
