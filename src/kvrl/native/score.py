"""Log-probs and entropies from hidden states on a CPU, head and softmax in one: bfloat16 products, float32 sums.

The gradient of the logits is rounded to bfloat16, as it is in a model that runs in bfloat16 throughout, and what it
gives the head's weight is summed over the chunks in float32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kvrl.native.build import load
from kvrl.native.head import PackedHead, arguments, packable

ROWS = 256
"""Rows whose float32 logits exist at once."""


def scorable(module: nn.Module, hidden: Tensor) -> bool:
    """Whether the kernels know such a head and such hidden states; compiles them."""
    return hidden.dtype == torch.bfloat16 and packable(module) and load("score") is not None


def score_tokens(
    head: nn.Module, hidden: Tensor, tokens: Tensor, temperature: Tensor, *, chunk: int, banned: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs [P] of tokens, int64 [P], differentiable, and entropies [P] in nats: f32, from hidden bfloat16 [P, E].

    head: a `scorable` module. temperature f32 [P]. chunk: tokens whose logits' gradient exists at once. banned: the
    token without probability (a beacon).
    """
    weight = cast(Tensor, head.weight)
    return cast(
        tuple[Tensor, Tensor],
        _Score.apply(hidden, weight, tokens, 1 / temperature.float(), chunk, -1 if banned is None else banned),
    )


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, inverse: Tensor, chunk: int, banned: int
    ) -> tuple[Tensor, Tensor]:
        tokens, inverse, library = tokens.contiguous(), inverse.contiguous(), load("score")
        assert library is not None
        head = PackedHead(weight)
        logps, entropies, totals = (torch.empty(len(tokens)) for _ in range(3))
        memory = _logits(tokens, weight)
        for part in _slices(len(tokens), ROWS):
            logits = head(hidden[part], memory)
            library.kvrl_score(*arguments(
                logits, tokens[part], inverse[part], logps[part], entropies[part], totals[part], *logits.shape, banned
            ))  # fmt: skip
        ctx.save_for_backward(hidden, weight, tokens, inverse, totals)
        ctx.head, ctx.chunk, ctx.banned = head, chunk, banned
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, inverse, totals = ctx.saved_tensors
        library, grad = load("score"), grad.contiguous()
        assert library is not None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape) if ctx.needs_input_grad[1] else None  # f32, over all chunks
        rows = torch.empty(min(ctx.chunk, len(tokens)), len(weight), dtype=weight.dtype)
        own, memory = (
            torch.empty(weight.shape, dtype=weight.dtype),
            _logits(tokens, weight),
        )  # contiguous, as the sum is
        for chunk in _slices(len(tokens), ctx.chunk):
            found = rows[: chunk.stop - chunk.start]  # [chunk, V]
            for inner in _slices(len(found), ROWS):
                part = slice(chunk.start + inner.start, chunk.start + inner.stop)
                logits = ctx.head(hidden[part], memory)
                library.kvrl_score_backward(*arguments(
                    logits, tokens[part], inverse[part], totals[part], grad[part], found[inner], *logits.shape,
                    ctx.banned,
                ))  # fmt: skip
            grad_hidden[chunk] = found @ weight
            if grad_weight is not None:  # torch would make a float32 copy of every chunk's part
                torch.mm(found.T, hidden[chunk], out=own)
                library.kvrl_score_add(*arguments(own, grad_weight, own.numel()))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Memory for the logits of the rows that exist at once, f32 [rows, V]."""
    return torch.empty(min(ROWS, len(tokens)), len(weight))


def _slices(count: int, each: int) -> list[slice]:
    return [slice(start, min(start + each, count)) for start in range(0, count, each)]
