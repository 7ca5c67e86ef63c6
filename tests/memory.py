"""What tensors really take, counted apart from kvrl: what autograd keeps, and the most that lives at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def saved_by_autograd(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that a forward's saved tensors keep alive, parameters left out: each address once."""
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


class PeakMemory(TorchDispatchMode):
    """Inside the block: `peak`, the most bytes that storages made inside held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        for t in tree_iter(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                key = id(storage)  # a storage keeps its Python object: the id lives as long as the memory
                if key not in given and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key)
        self.peak = max(self.peak, sum(self.live.values()))
        return out
