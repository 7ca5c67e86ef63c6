"""The distillation term of a run: its teacher's weights, its own weight, and what is added to a loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvrl.distill import Distillation
from kvrl.learner import Scored
from kvrl.objectives.distill import controlled_weight, warmup
from kvrl.objectives.losses import Metrics, total
from kvrl.train.config import DistillSettings
from kvrl.train.setup import Reference


class Average:
    """A moving average of the policy's weights, kept in fp32: a bf16 one would round small moves away."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay
        self.masters = [p.detach().float().clone() for p in self.model.parameters()]

    def follow(self, model: nn.Module) -> None:
        """Move towards the policy: after each optimiser step."""
        moved = zip(self.masters, model.parameters(), strict=True)
        self.load([master.lerp(policy.detach().float(), 1 - self.decay) for master, policy in moved])

    @torch.no_grad()
    def load(self, masters: Sequence[Tensor]) -> None:
        """Take these fp32 weights and round them into the model."""
        for master, mine, new in zip(self.masters, self.model.parameters(), masters, strict=True):
            master.copy_(new)
            mine.copy_(master)

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The averaged model inside the block."""
        yield self.model


class Distiller:
    """lambda * KL between the views, a mean over response tokens (arXiv 2605.06850, section 3)."""

    def __init__(self, settings: DistillSettings, model: nn.Module, start: Reference | None) -> None:
        """start: the starting model, if it is what teaches."""
        self.settings, self.model, self.weight = settings, model, settings.weight
        self.average = Average(model, settings.average_decay) if settings.teacher_weights == "average" else None
        source = start if settings.teacher_weights == "start" else self.average
        weights = None if source is None else source.active
        self.distillation = Distillation(settings.teacher, settings.kl, settings.top_k, weights)

    def mask(self, mask: Tensor, advantages: Tensor | None) -> Tensor:
        """bool [N, C]: the tokens that teach; advantages [N] or [N, C]."""
        if not self.settings.positive_only:
            return mask
        assert advantages is not None
        return mask & (advantages if advantages.ndim == 2 else advantages[:, None]).gt(0)

    def term(self, scored: Scored, mask: Tensor, tokens: int) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the unweighted KL, and its metrics. mask [n, c]; tokens: the optimiser step's."""
        assert scored.divergence is not None and scored.top_k_error is not None
        share = torch.where(mask, scored.divergence, 0).sum() / max(tokens, 1)
        metrics = total("distill/kl", scored.divergence, mask)
        if self.settings.top_k is not None:
            metrics |= total("distill/top_k_error", scored.top_k_error, mask)
        return share, metrics

    def weight_at(self, step: int) -> float:
        """The term's weight at a rollout batch, counted from 1."""
        return self.weight * warmup(step, self.settings.warmup_steps)

    def balance(self, loss: Tensor, term: Tensor) -> None:
        """Move the weight so that the term's gradient is `grad_ratio` of the loss's, as this micro-batch shows them.

        A micro-batch without signal says nothing of the ratio.
        """
        assert self.settings.grad_ratio is not None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        objective = gradient_norm(loss, parameters)
        if objective > 0:
            divergence = gradient_norm(term, parameters)
            self.weight = controlled_weight(self.weight, objective, divergence, ratio=self.settings.grad_ratio)

    def state_dict(self) -> dict[str, Any]:
        """The weight as the controller left it, and the averaged weights."""
        return {"weight": self.weight, "masters": None if self.average is None else self.average.masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.weight = state["weight"]
        if self.average is not None:
            self.average.load(state["masters"])

    def after_update(self) -> None:
        """Let the average follow the policy."""
        if self.average is not None:
            self.average.follow(self.model)


def gradient_norm(loss: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Norm of the loss's gradient; the graph stays for the backward pass."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    norms = [g.float().norm() for g in gradients if g is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0
