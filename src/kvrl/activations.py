"""What a forward pass leaves for the backward pass, in bytes, from shapes alone.

Counted, not modelled: the trunk runs once on the meta device, under the attention of the view, and every tensor that
autograd saves counts once, by its storage; parameters do not count. An attention kernel saves queries, keys, values,
mask, output and one fp32 number for each query, as the fused kernels of CPU and CUDA do.

In the dense view a Llama-shaped layer keeps for each token, in bytes (hidden size E, feed-forward size F, h query heads
of A numbers together; keys and values are repeated to the query heads):

    fp32: 24 E + 16 A + 16 F + 4 h + 8        bf16: 16 E + 8 A + 8 F + 4 h + 8

Under a trace it keeps keys and values once, not repeated, and which of them each segment gathers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from kvrl.attention.probe import ModelSpec
from kvrl.attention.replay import Backend, ReplayContext
from kvrl.cache.trace import KVTrace, num_events
from kvrl.head import decoder
from kvrl.models.meta import meta_forward


@dataclass(frozen=True)
class Saved:
    """Bytes that one sequence's forward through the trunk keeps until the backward pass."""

    kept: int
    """Every saved tensor, and the replay's survivors."""
    inputs: int
    """With gradient checkpointing: each layer's input, and what is saved outside the layers."""
    layer: int
    """The largest layer's saved tensors: what checkpointing makes again for one layer at a time."""


def saved_bytes(model: nn.Module, length: int, trace: KVTrace | None, backend: Backend = "segments") -> Saved:
    """Of one sequence of `length` tokens, under a trace or (None) in the dense view; `model` prepared, on meta."""
    context = ReplayContext(None if trace is None else [trace], length, backend=backend, device="meta")
    survivors = None if context.plan is None else context.plan.survivors
    blocks = [t for block in context.blocks or () for t in (block.keys, block.visible)]
    replay = sum(t.nbytes for t in (survivors, context.evicted_at, *blocks) if t is not None)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    positions = torch.arange(length, device="meta")[None]
    with SavedTensors(model) as count, _FusedAttention(), meta_forward():
        # The mask is never built; without one transformers reads the positions' values, and meta has none
        decoder(model)(
            input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False, kv=context
        )
    outside = count.total - sum(count.layers) + replay
    return Saved(count.total + replay, outside + sum(count.inputs), max(count.layers))


def planned_trace(spec: ModelSpec, length: int, budget: int, buffer: int) -> KVTrace:
    """A trace with the evictions that a rollout of `length` tokens has; which entries go does not change a size."""
    events = num_events(length - 1, budget, buffer)
    evicted_by = torch.full((length,), -1, dtype=torch.int32)
    evicted_by[: events * buffer] = torch.arange(events * buffer, dtype=torch.int32) // buffer  # the oldest go
    at = budget + buffer + buffer * torch.arange(events, dtype=torch.int32)
    windows = torch.tensor([window or 0 for window in spec.windows])
    trace = KVTrace(torch.empty(0), at, budget, buffer, windows)
    table = torch.where(trace.managed[:, None, None], evicted_by, -1).expand(-1, spec.kv_heads, -1)
    return replace(trace, events=table.to(torch.int16).contiguous())


class SavedTensors(AbstractContextManager):
    """Inside the block, bytes of the storages that autograd saves: in all, and in each layer that can be recomputed."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = {
            id(p.untyped_storage()): p.untyped_storage() for p in model.parameters()
        }  # kept: no id comes twice
        self.total = 0
        self.layers: list[int] = []
        self.inputs: list[int] = []
        self.found = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]

    def __enter__(self) -> SavedTensors:
        self.handles = [m.register_forward_pre_hook(self._enter) for m in self.found]
        self.handles += [m.register_forward_hook(self._leave) for m in self.found]
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if id(storage) not in self.seen:
            self.seen[id(storage)] = storage
            self.total += storage.nbytes()
        return x

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.inputs.append(args[0].nbytes)
        self.layers.append(-self.total)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.layers[-1] += self.total


class _Kernel(torch.autograd.Function):
    """What a fused attention kernel saves, without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        bias = None if mask is None else mask.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("meta tensors have nothing to differentiate")


class _FusedAttention(TorchFunctionMode):
    """Inside the block SDPA saves what a fused kernel does: on meta it would unfold into T x T matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _Kernel.apply(*args, kwargs.get("attn_mask"))
        return func(*args, **kwargs)
