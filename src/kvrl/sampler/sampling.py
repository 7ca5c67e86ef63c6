"""Drawing tokens: truncation, inverse-CDF sampling from one uniform number, and the log-prob under both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.sampler.config import SamplingConfig

BLOCK = 128
BELOW_ONE = 1 - 2.0**-52
"""A number times it is below the number in f64."""


@dataclass(frozen=True)
class Draw:
    """One token for each slot. support_ids [S, max kept] and support_sizes [S] if the distribution was cut."""

    tokens: Tensor  # int64 [S]
    logprobs: Tensor  # f32 [S]
    support_ids: Tensor | None = None
    support_sizes: Tensor | None = None

    def cpu(self) -> Draw:
        """The draw in host memory: one copy for each tensor instead of one for each slot."""
        parts = (self.tokens, self.logprobs, self.support_ids, self.support_sizes)
        return Draw(*(None if part is None else part.cpu() for part in parts))  # type: ignore[arg-type]

    def support_of(self, slot: int) -> Tensor | None:
        """The kept ids of one slot, int32; None if nothing was cut."""
        if self.support_ids is None or self.support_sizes is None:
            return None
        return self.support_ids[slot, : int(self.support_sizes[slot])]


@dataclass(frozen=True)
class Drawn:
    """A drawn token of one request, in host memory."""

    token: int
    logprob: float
    support: Tensor | None


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> Draw:
    """Sample from fp32 logits [S, V] with uniforms f64 [S] in [0, 1).

    Raises KvrlError if truncation keeps more than `max_support` ids.
    """
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1)
        return Draw(best, pick(logits, best) - logits.logsumexp(dim=-1))
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.truncates:
        return draw_truncated(logits, uniforms, sampling)
    peak = logits.amax(dim=-1, keepdim=True)
    weights = (logits - peak).exp_()
    tokens, total = inverse_cdf(weights, uniforms)
    # Not by log_softmax: torch's on a CPU is 2e-5 off where 49,000 ids share little mass.
    return Draw(tokens, pick(logits, tokens) - (peak[:, 0] + total.log()))


def draw_truncated(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> Draw:
    """The same from what top-k, top-p and min-p keep of the distribution, which is recorded."""
    logps = logits - logits.logsumexp(dim=-1, keepdim=True)
    sorted_logps, ids = most_likely(logps, min(logits.shape[-1], sampling.top_k or sampling.max_support + 1))
    sizes = kept_sizes(sorted_logps, sampling)  # [S]
    most = int(sizes.max())
    if most > sampling.max_support:
        raise KvrlError(
            f"sampling.max_support: a token's truncated distribution keeps at least {most} ids, over "
            f"{sampling.max_support}; raise sampling.max_support, or cut more (top_k, top_p, min_p)"
        )
    sorted_logps, ids = sorted_logps[:, :most], ids[:, :most]
    outside = torch.arange(most, device=logits.device) >= sizes[:, None]
    kept = sorted_logps.masked_fill(outside, float("-inf"))
    rank, total = inverse_cdf(kept.exp(), uniforms)
    return Draw(pick(ids, rank), pick(kept, rank) - total.log(), ids.to(torch.int32), sizes)


def most_likely(logps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely ids and their log-probs, [S, count] each: in order, equals by id."""
    ids = logps.topk(count, dim=-1).indices.sort(dim=-1).values
    sorted_logps, order = logps.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return sorted_logps, ids.gather(-1, order)


def kept_sizes(sorted_logps: Tensor, sampling: SamplingConfig) -> Tensor:
    """How many of the most likely ids stay, int64 [S]: top-k, then top-p of what is left, then min-p.

    sorted_logps [S, n]: log-probs of the n most likely ids; n is at least top_k, where that is set.
    """
    count = sorted_logps.shape[-1]
    rank = torch.arange(count, device=sorted_logps.device)
    kept = torch.full_like(sorted_logps, count, dtype=torch.int64)[:, 0]
    if sampling.top_k > 0:
        kept = kept.clamp(max=sampling.top_k)
    probs = sorted_logps.exp()
    if sampling.top_p < 1.0:
        inside = probs.masked_fill(rank >= kept[:, None], 0.0)
        before = inside.cumsum(dim=-1) - inside  # mass of the more likely ids
        mass = inside.sum(dim=-1, keepdim=True) if sampling.top_k > 0 else 1.0
        enough = before >= sampling.top_p * mass
        kept = torch.minimum(kept, count - enough.sum(dim=-1))
    if sampling.min_p > 0.0:
        kept = torch.minimum(kept, (probs >= sampling.min_p * probs[:, :1]).sum(dim=-1))
    return kept.clamp(min=1)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """First index whose cumulated weight exceeds u times the total, int64 [S], and the total, f32 [S].

    weights f32 [S, V] are 0 or more, uniforms f64 [S] in [0, 1). Blocks are summed first and one of them is searched,
    so that the vocabulary is passed over once; the sums are cumulated in f64, or ids of a long tail could never be
    drawn. An id of weight 0 is never drawn.
    """
    rows, width = weights.shape
    if fill := -width % BLOCK:
        weights = F.pad(weights, (0, fill))
    blocks = weights.view(rows, -1, BLOCK)  # [S, blocks, BLOCK]
    sums = blocks.sum(dim=-1).double()
    cumulated = sums.cumsum(dim=-1)
    total = cumulated[:, -1:]
    target = uniforms[:, None].double() * total
    # Only NaN goes beyond the last one, here and below, and the engine names it.
    block = torch.searchsorted(cumulated, target, right=True).clamp(max=sums.shape[-1] - 1)  # [S, 1]
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)  # [S, BLOCK]
    # Rounding may put the rest of the target below 0 or at the block's end, where ids of weight 0 would be hit.
    rest = target - (cumulated.gather(1, block) - sums.gather(1, block))
    rest = torch.minimum(rest.clamp(min=0.0), inside[:, -1:] * BELOW_ONE)
    index = block * BLOCK + torch.searchsorted(inside, rest, right=True)
    return index[:, 0].clamp(max=width - 1), total[:, 0].float()


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values [S, V] at index [S] -> [S]."""
    return values.gather(-1, index[:, None])[:, 0]
