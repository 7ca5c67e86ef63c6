"""Distillation between two views: full-vocabulary KL per token, its top-k form, and the weight of the term.

P = token positions, V = vocabulary. Natural log. Logits of either side may be -inf (a truncated support); narrower
types than float32 are computed in float32. The teacher never gets a gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kvrl.errors import KvrlError

KLKind = Literal["forward", "reverse", "js"]
LOWEST_WEIGHT, HIGHEST_WEIGHT = 1e-5, 1.0  # that the controller gives


def kl_divergence(
    student_logits: Tensor, teacher_logits: Tensor, kind: KLKind = "forward", top_k: int | None = None
) -> Tensor:
    """Divergence of the student's distribution from the teacher's at each position, [P, V] and [P, V] -> [P].

    - forward: KL(teacher || student): the student covers all that the teacher does.
    - reverse: KL(student || teacher): the student keeps to what the teacher does.
    - js: half KL(teacher || m) + half KL(student || m), m the mean of the two: symmetric, at most log 2.

    top_k: over the teacher's k most likely ids and one bucket for all others, on both sides. Merging outcomes
    never raises a divergence, so this is a lower bound, exact where the others' probabilities are proportional.

    Where one side gives probability to what the other excludes, forward or reverse is infinite: the value is inf
    and such a position gives no gradient. Raises KvrlError for an unknown kind.
    """
    student, teacher = _full(student_logits), _full(teacher_logits.detach())  # [P, V]
    if top_k is not None and top_k < teacher.shape[-1]:
        ids = teacher.topk(top_k, dim=-1).indices  # [P, k]
        student, teacher = _bucketed(student, ids), _bucketed(teacher, ids)  # [P, k + 1]
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    match kind:
        case "forward":
            return _kl(log_p, log_q)
        case "reverse":
            return _kl(log_q, log_p)
        case "js":
            # The mixture is held: its share of the gradient, sum of log m dm - sum of log m dm, is 0.
            log_m = torch.logaddexp(log_p, log_q.detach()) - math.log(2)
            return 0.5 * (_kl(log_p, log_m) + _kl(log_q, log_m))
        case _:
            raise KvrlError(f"distill.kl: {kind!r} is unknown; use one of forward, reverse, js")


@torch.no_grad()
def top_k_error(student_logits: Tensor, teacher_logits: Tensor, kind: KLKind, top_k: int) -> Tensor:
    """What `top_k` leaves out of the divergence, exact - approximate, without gradient: [P], 0 or more."""
    exact = kl_divergence(student_logits, teacher_logits, kind)  # [P]
    return exact - kl_divergence(student_logits, teacher_logits, kind, top_k)


def controlled_weight(
    weight: float,
    rl_norm: float,
    kl_norm: float,
    *,
    ratio: float,
    decay: float = 0.9,
    bounds: tuple[float, float] = (LOWEST_WEIGHT, HIGHEST_WEIGHT),
) -> float:
    """The distillation term's next weight: a controller that holds weight * |g_kl| at `ratio` * |g_rl|.

    weight: the last one; rl_norm, kl_norm: norms of the two terms' gradients at weight 1. Moves to
    decay * weight + (1 - decay) * ratio * rl_norm / kl_norm, with the target and so the weight inside `bounds`.
    Where kl_norm is 0 (teacher and student agree) there is nothing to balance and the weight stays.
    """
    if kl_norm == 0:
        return weight
    low, high = bounds
    # The target is clamped, not the average alone: one vanishing kl_norm must not set the weight for many steps.
    target = min(max(ratio * rl_norm / kl_norm, low), high)
    return decay * weight + (1 - decay) * target


def warmup(step: int, steps: int) -> float:
    """Factor that rises linearly to 1 over the first `steps` steps, counted from 1; 1 throughout for steps 0."""
    return min(step / steps, 1.0) if steps else 1.0


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _bucketed(logits: Tensor, ids: Tensor) -> Tensor:
    """Logits at `ids` [P, k] and, last, the logsumexp of all others: [P, k + 1], the same total."""
    others = logits.scatter(-1, ids, -torch.inf)  # [P, V]
    empty = others.isneginf().all(-1, keepdim=True)  # [P, 1]
    # logsumexp over nothing is -inf, but its gradient is NaN.
    rest = torch.where(empty, 0, others).logsumexp(-1, keepdim=True)  # [P, 1]
    return torch.cat([logits.gather(-1, ids), rest.masked_fill(empty, -torch.inf)], dim=-1)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) over the last dimension, 0 log 0 being 0; inf without gradient where b excludes what a has."""
    support = ~log_a.isneginf()  # [P, V]
    excluded = support & log_b.isneginf()  # [P, V]
    # Two log-probs of -inf differ by NaN, and one by inf, in the gradient too: neither may enter the product.
    both = support & ~excluded  # [P, V]
    log_a, log_b = torch.where(both, log_a, 0), torch.where(both, log_b, 0)  # [P, V]
    finite = (log_a.exp() * (log_a - log_b)).sum(-1)  # [P]; 0 where not both
    return torch.where(excluded.any(-1), torch.inf, finite)
