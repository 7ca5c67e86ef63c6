"""What shows that a run is sound: parity of sampler and replay, the dense mismatch, repetition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.learner import Scorer, completion_mask, sampler_logprobs
from kvrl.sampler.routing import RoutingRecorder, flipped
from kvrl.sampler.types import Rollout


class ParityError(KvrlError):
    """The replay does not reproduce what the sampler saw; training on it would be silently wrong."""


def difference(scores: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    """|log-prob - the sampler's| of every sampled token, f32 [tokens]."""
    mask = completion_mask(rollouts, scores.device)
    return (scores - sampler_logprobs(rollouts, scores.device)).abs()[mask]


def spread(diff: Tensor) -> dict[str, float]:
    """The parity metrics of differences, f32 [tokens]."""
    return {
        "parity/mean": diff.mean().item(),
        "parity/p99": diff.sort().values[int(0.99 * (len(diff) - 1))].item(),
        "parity/max": diff.max().item(),
    }


@torch.no_grad()
def parity(scorer: Scorer, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """|logp sampler - logp replay| as mean, p99 and max; for mixtures of experts also the routings that flipped."""
    with RoutingRecorder.attached(scorer.model, batch_invariant=False) as recorder:
        metrics = spread(difference(scorer(rollouts, view="sparse")[0], rollouts))
        if recorder is not None:
            length = max(r.trace.num_tokens for r in rollouts)  # all that was fed
            learner = torch.stack([x.view(len(rollouts), length, -1) for x in recorder.newest], dim=1).cpu()
            shares = [
                flipped(r.routing, learner[i, :, : r.trace.num_tokens - 1].to(torch.int16))
                for i, r in enumerate(rollouts)
                if r.routing is not None
            ]
            metrics["parity/routing_flipped"] = sum(shares) / len(shares)
    return metrics


def check_parity(metrics: dict[str, float], tolerances: tuple[float, float]) -> None:
    """Raise ParityError if mean or p99 exceeds its tolerance (the maximum is only logged)."""
    for name, limit in zip(("mean", "p99"), tolerances, strict=True):
        value = metrics[f"parity/{name}"]
        if not value <= limit:
            raise ParityError(
                f"parity.{name}_tolerance: |logp sampler - logp replay| has {name} {value:.3g}, over {limit:.3g}: "
                "the learner does not see what the sampler saw, and training was stopped before any update; "
                "run `kvrl parity` on this model and report it, or raise the tolerance if the dtype explains it"
            )


@torch.no_grad()
def dense_mismatch(scorer: Scorer, rollouts: Sequence[Rollout]) -> float:
    """Mean |logp sampler - logp dense|: what a dense learner would be off by. Grows as the budget gets tight."""
    return difference(scorer(rollouts, view="dense")[0], rollouts).mean().item()


def repetition_rate(rollouts: Sequence[Rollout], n: int = 4) -> float:
    """Share of n-grams of a completion that occurred in it before, averaged over completions."""
    rates = []
    for r in rollouts:
        grams = [tuple(r.completion_ids[i : i + n]) for i in range(len(r.completion_ids) - n + 1)]
        rates.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return sum(rates) / len(rates)
