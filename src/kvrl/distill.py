"""Track 2 of Shadow Mask Distillation: the two views of one policy kept together (arXiv 2605.06850, section 3).

The teacher's hidden states are kept, never its logits: these exist for one chunk of tokens at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvrl.attention.replay import Backend
from kvrl.head import Head, restrict
from kvrl.objectives.distill import KLKind, kl_divergence
from kvrl.sampler.types import Rollout
from kvrl.views import View, hidden_states

Weights = Callable[[], AbstractContextManager[nn.Module]]


def always(model: nn.Module) -> Weights:
    """The teacher's model is this one, whatever the policy's."""

    def active() -> AbstractContextManager[nn.Module]:
        return contextlib.nullcontext(model)

    return active


@dataclass(frozen=True)
class Distillation:
    """Which view teaches, with which weights, and how far the other is from it."""

    teacher: View
    kl: KLKind = "forward"
    top_k: int | None = None
    """Ids of the teacher's distribution that are told apart; the rest is one event. None: all."""
    weights: Weights | None = None
    """A context that gives the teacher's model. None: the policy's own weights as they are now."""

    @property
    def student(self) -> View:
        """The view that learns."""
        return "dense" if self.teacher == "sparse" else "sparse"

    def hidden_states(
        self,
        model: nn.Module,
        rollouts: Sequence[Rollout],
        view: View,
        hidden: Tensor,
        backend: Backend,
        *,
        native: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Of student and teacher, [N, T, E] each; `hidden` are the policy's under `view`, which are not made again."""
        states = partial(hidden_states, rollouts=rollouts, backend=backend, native=native)
        student = hidden if self.student == view else states(model, view=self.student)
        if self.weights is None and self.teacher == view:
            return student, hidden.detach()
        with torch.no_grad(), self.taught_by(model) as teacher:
            return student, states(teacher, view=self.teacher)

    def chunk(
        self,
        model: nn.Module,
        student: Tensor,
        teacher: Tensor,
        temperature: Tensor,
        support: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Divergence and what `top_k` cuts off it, f32 [P] each, from hidden states [P, E]."""
        logits = restrict(Head(model)(student) / temperature[:, None], support)  # [P, V]
        with torch.no_grad(), self.taught_by(model) as weights:
            target = restrict(Head(weights)(teacher) / temperature[:, None], support)  # [P, V]
        divergence = kl_divergence(logits, target, self.kl, self.top_k)
        with torch.no_grad():
            exact = divergence if self.top_k is None else kl_divergence(logits, target, self.kl)
        return divergence, exact.detach() - divergence.detach()

    def taught_by(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """The teacher's model, for the length of the context."""
        return contextlib.nullcontext(model) if self.weights is None else self.weights()
