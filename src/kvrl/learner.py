"""Log-probs of rollouts under a view, in chunks: the logits of a whole sequence never exist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvrl.attention.probe import prepare
from kvrl.attention.replay import Backend
from kvrl.clock import now
from kvrl.critic import Critic
from kvrl.distill import Distillation
from kvrl.errors import KvrlError
from kvrl.head import Head, check_head, restrict
from kvrl.native.score import scorable, score_tokens
from kvrl.sampler.types import Rollout
from kvrl.views import View, hidden_states, seen


@dataclass(frozen=True)
class Targets:
    """Which tokens of a batch are scored, and from which hidden state: P scored tokens in all.

    Every predictor is explicit, as a token is not always predicted by the one before it (beacons).
    """

    row: Tensor  # int64 [P], row of the batch
    predictor: Tensor  # int64 [P], position whose hidden state predicts the token
    column: Tensor  # int64 [P], index in the completion
    token: Tensor  # int64 [P]
    support: Tensor | None  # int64 [P, max kept], -1 beyond; None if nothing was cut

    @property
    def at(self) -> tuple[Tensor, Tensor]:
        """Index of the predicting hidden states."""
        return self.row, self.predictor


def completion_mask(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Tensor:
    """bool [N, max C]: the tokens that the policy sampled."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts), dtype=torch.bool)
    for i, r in enumerate(rollouts):
        out[i, : len(r.loss_mask)] = r.loss_mask
    return out.to(device)


def sampler_logprobs(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Tensor:
    """f32 [N, max C]: the log-probs that the sampler recorded, 0 beyond and at inserted tokens."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts))
    for i, r in enumerate(rollouts):
        out[i, : len(r.logprobs)] = r.logprobs
    return out.to(device)


def logprobs(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    *,
    view: View = "sparse",
    backend: Backend = "segments",
    chunk: int = 1024,
) -> Tensor:
    """Log-probs of the sampled tokens: f32 [N, max C], differentiable, 0 at padding and inserted tokens.

    view: `sparse` replays each rollout's trace, `dense` attends to the full context. All rollouts go through
    the model in one batch; chunk bounds the tokens whose logits exist at once.
    Raises KvrlError for a trace that does not fit its tokens or a model that cannot be replayed.
    """
    if isinstance(rollouts, Rollout):
        raise KvrlError("rollouts: is a single Rollout; give a list of them, as in [rollout]")
    return Scorer(model, backend=backend, chunk=chunk)(list(rollouts), view=view).logps


class Scored(NamedTuple):
    """What one forward of the learner gives for N rollouts: f32 [N, max C], 0 at padding and inserted tokens."""

    logps: Tensor
    """Log-probs of the sampled tokens, differentiable."""
    entropy: Tensor
    """Nats, without gradient."""
    values: Tensor | None = None
    """The critic's, differentiable."""
    divergence: Tensor | None = None
    """Nats, differentiable: the distillation's KL between the whole distributions of the two views."""
    top_k_error: Tensor | None = None
    """Nats, without gradient: what the divergence lacks because of `top_k`."""
    distill_seconds: float = 0.0
    """What the forward of student, teacher and divergence took, beside the rest."""


class Scorer(nn.Module):
    """The module that a trainer wraps (DDP, FSDP): trunk, chunked head and critic inside one forward."""

    def __init__(
        self,
        model: nn.Module,
        *,
        backend: Backend = "segments",
        chunk: int = 1024,
        critic: Critic | None = None,
        native_kernels: bool = True,
    ) -> None:
        super().__init__()
        if chunk < 1:
            raise KvrlError(f"replay.logprob_chunk: {chunk} is below 1; give the tokens whose logits may exist at once")
        self.model = prepare(model)
        check_head(model)
        self.backend, self.chunk, self.critic, self.native = backend, chunk, critic, native_kernels

    def forward(
        self, rollouts: Sequence[Rollout], *, view: View = "sparse", distill: Distillation | None = None
    ) -> Scored:
        """Everything that the objective needs of these rollouts, under a view; with `distill`, of both views."""
        hidden = hidden_states(self.model, rollouts, view, self.backend, native=self.native)  # [N, T, E]
        targets = make_targets(rollouts, hidden.device, view)
        temperature = torch.tensor([r.temperature for r in rollouts], device=hidden.device)[targets.row]  # [P]
        logps, entropy = self.score(hidden[targets.at], targets, temperature)
        values = divergence = error = None
        seconds = 0.0
        if self.critic is not None:
            values = self.critic(hidden, rollouts, view, self.backend, native=self.native)[targets.at]  # [P]
        if distill is not None:
            start = now(hidden.device)
            student, teacher = distill.hidden_states(
                self.model, rollouts, view, hidden, self.backend, native=self.native
            )
            learns = student[targets.row, predictors(rollouts, distill.student).to(hidden.device)]
            teaches = teacher[targets.row, predictors(rollouts, distill.teacher).to(hidden.device)]
            divergence, error = self.in_chunks(
                partial(distill.chunk, self.model), learns, teaches, temperature, targets.support
            )
            seconds = now(hidden.device) - start
        shape = (len(rollouts), max(len(r.completion_ids) for r in rollouts))

        def spread(x: Tensor | None) -> Any:
            index = (targets.row, targets.column)
            return None if x is None else x.new_zeros(shape).index_put(index, x)

        logps, entropy, values, divergence, error = map(spread, (logps, entropy, values, divergence, error))
        return Scored(logps, entropy, values, divergence, error, seconds)

    def score(self, hidden: Tensor, targets: Targets, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs, differentiable, and entropies of the targets [P], from their predictors' hidden states [P, E]."""
        head = Head(self.model)
        if self.native and targets.support is None and head.softcap is None and scorable(head.module, hidden):
            return score_tokens(
                head.module, hidden, targets.token, temperature * (head.divisor / head.scale), chunk=self.chunk,
                banned=head.banned,
            )  # fmt: skip
        logps, entropy = self.in_chunks(partial(score_chunk, head), hidden, targets.token, temperature, targets.support)
        return logps, entropy

    def in_chunks(self, func: Callable, first: Tensor, *more: Tensor | None) -> list[Tensor]:
        """func on slices of tensors [P, ...]: two results [P], differentiable.

        Each slice is recomputed in the backward pass, so that no chunk's logits outlive it; what has no gradient is
        left out there (`recomputed`).
        """
        given, parts = (first, *more), []
        for start in range(0, max(len(first), 1), self.chunk):  # once without tokens: zeros on the model's graph
            chunk = [None if x is None else x[start : start + self.chunk] for x in given]
            grad = torch.is_grad_enabled()
            parts.append(checkpoint(func, *chunk, use_reentrant=False, context_fn=_contexts) if grad else func(*chunk))
        return [torch.cat(x) for x in zip(*parts, strict=True)]


def predictors(rollouts: Sequence[Rollout], view: View) -> Tensor:
    """Positions whose hidden states predict the sampled tokens under a view: int64 [P].

    The raw token before it predicts a token, though under `sparse` a beacon may stand between them.
    """
    return torch.cat([seen(r, view).predictor[r.loss_mask] for r in rollouts])


def make_targets(rollouts: Sequence[Rollout], device: torch.device | str, view: View = "sparse") -> Targets:
    """The sampled tokens of a batch, rollout by rollout, as a view predicts them."""
    rows, columns, tokens, supports = [], [], [], []
    for i, r in enumerate(rollouts):
        column = r.loss_mask.nonzero()[:, 0]
        if not r.temperature > 0:
            raise KvrlError(f"rollouts[{i}].temperature: {r.temperature} is not above 0; greedy rollouts have 1.0")
        rows.append(torch.full_like(column, i))
        columns.append(column)
        tokens.append(torch.tensor(r.completion_ids)[column])
        if r.support is not None:
            offsets = r.support.offsets.tolist()
            kept = [r.support.ids[offsets[c] : offsets[c + 1]].long() for c in column.tolist()]
            for c, ids in zip(column.tolist(), kept, strict=True):
                if r.completion_ids[c] not in ids:
                    raise KvrlError(
                        f"rollouts[{i}].support: the kept ids of completion token {c} lack the sampled id "
                        f"{r.completion_ids[c]}; it belongs to other tokens"
                    )
            supports += kept
    support = None
    if supports:
        if any(r.support is None for r in rollouts):
            raise KvrlError("rollouts: some were sampled from a truncated distribution and some not; score them apart")
        support = nn.utils.rnn.pad_sequence(supports, batch_first=True, padding_value=-1).to(device)
    row, column, token = (torch.cat(x).to(device) for x in (rows, columns, tokens))
    return Targets(row, predictors(rollouts, view).to(device), column, token, support)


def score_chunk(
    head: Head, hidden: Tensor, tokens: Tensor, temperature: Tensor, support: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [P] and entropies [P] of tokens [P] from hidden states [P, E], over the recorded support."""
    logits = head(hidden) / temperature[:, None]  # [P, V]
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    logits = restrict(logits, support)
    total = logits.logsumexp(dim=-1)
    return chosen - total, torch.empty_like(total) if recomputed.get() else entropy(logits.detach(), total.detach())


def entropy(logits: Tensor, total: Tensor) -> Tensor:
    """Nats of a distribution: logits [P, V], -inf where nothing may be drawn, and their logsumexp [P] -> [P]."""
    logps = logits - total[:, None]
    probs = logps.exp()
    return -torch.linalg.vecdot(probs, logps.clamp_(min=torch.finfo(logps.dtype).min))  # 0 * -inf would be NaN


recomputed: ContextVar[bool] = ContextVar("recomputed", default=False)
"""Whether a chunk is made again, for the backward pass."""


class _Recomputing(contextlib.AbstractContextManager[None]):
    """Entered once for each backward pass, of which a graph may have several."""

    def __enter__(self) -> None:
        self.token = recomputed.set(True)

    def __exit__(self, *error: object) -> None:
        recomputed.reset(self.token)


def _contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """What surrounds a chunk's first computation and its second."""
    return contextlib.nullcontext(), _Recomputing()
