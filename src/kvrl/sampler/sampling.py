"""Drawing tokens: truncation, inverse-CDF sampling from one uniform number, and the log-prob under both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.sampler.config import SamplingConfig


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


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> Draw:
    """Sample from fp32 logits [S, V] with uniforms [S] in [0, 1).

    Raises KvrlError if truncation keeps more than `max_support` ids.
    """
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1)
        return Draw(best, log_softmax_at(logits, best))
    logits = logits / sampling.temperature
    logps = logits - logits.logsumexp(dim=-1, keepdim=True)
    if not sampling.truncates:
        tokens = inverse_cdf(logps.exp(), uniforms)
        return Draw(tokens, log_softmax_at(logits, tokens))
    sorted_logps, ids = logps.sort(dim=-1, descending=True, stable=True)
    sizes = kept_sizes(sorted_logps, sampling)  # [S]
    most = int(sizes.max())
    if most > sampling.max_support:
        raise KvrlError(
            f"sampling.max_support: a token's truncated distribution keeps {most} ids, over {sampling.max_support}; "
            "raise sampling.max_support, or cut more (top_k, top_p, min_p)"
        )
    sorted_logps, ids = sorted_logps[:, :most], ids[:, :most]
    outside = torch.arange(most, device=logits.device) >= sizes[:, None]
    sorted_logps = sorted_logps.masked_fill(outside, float("-inf"))
    kept = sorted_logps - sorted_logps.logsumexp(dim=-1, keepdim=True)
    rank = inverse_cdf(kept.exp(), uniforms)
    return Draw(pick(ids, rank), pick(kept, rank), ids.to(torch.int32), sizes)


def kept_sizes(sorted_logps: Tensor, sampling: SamplingConfig) -> Tensor:
    """How many of the most likely ids stay, int64 [S]: top-k, then top-p of what is left, then min-p."""
    vocab = sorted_logps.shape[-1]
    rank = torch.arange(vocab, device=sorted_logps.device)
    kept = torch.full_like(sorted_logps, vocab, dtype=torch.int64)[:, 0]
    if sampling.top_k > 0:
        kept = kept.clamp(max=sampling.top_k)
    probs = sorted_logps.exp()
    if sampling.top_p < 1.0:
        inside = probs.masked_fill(rank >= kept[:, None], 0.0)
        before = inside.cumsum(dim=-1) - inside  # mass of the more likely ids
        enough = before >= sampling.top_p * inside.sum(dim=-1, keepdim=True)
        kept = torch.minimum(kept, vocab - enough.sum(dim=-1))
    if sampling.min_p > 0.0:
        kept = torch.minimum(kept, (probs >= sampling.min_p * probs[:, :1]).sum(dim=-1))
    return kept.clamp(min=1)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """First index whose cumulated probability exceeds u times the total: probs [S, V], uniforms [S] -> int64 [S]."""
    cumulated = probs.cumsum(dim=-1)
    target = uniforms[:, None] * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return index.clamp(max=probs.shape[-1] - 1)  # only NaN goes beyond, and the engine names it


def log_softmax_at(logits: Tensor, index: Tensor) -> Tensor:
    """Log-probs f32 [S] at index [S] of logits [S, V], by logsumexp as in the learner.

    torch's own log_softmax on a CPU is up to 2e-5 off where 49,000 ids share little mass.
    """
    return pick(logits, index) - logits.logsumexp(dim=-1)


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values [S, V] at index [S] -> [S]."""
    return values.gather(-1, index[:, None])[:, 0]
