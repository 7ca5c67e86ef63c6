"""The distillation term of a run: its teacher's weights, its own weight, and what is added to a loss."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvrl.distill import Distillation, Weights, always
from kvrl.learner import Scored
from kvrl.objectives.distill import controlled_weight, warmup
from kvrl.objectives.losses import Metrics, total
from kvrl.train.distill_settings import DistillSettings
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

    def __init__(
        self, settings: DistillSettings, model: nn.Module, start: Reference | None, *, apart: bool = False
    ) -> None:
        """start: the starting model, if it is what teaches. apart: another model than the policy `model` is taught."""
        self.settings, self.model, self.weight = settings, model, settings.weight
        self.gradients: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})  # of objective and term, by parameter
        self.average = Average(model, settings.average_decay) if settings.teacher_weights == "average" else None
        source = start if settings.teacher_weights == "start" else self.average
        weights: Weights | None = None if source is None else source.active
        if apart and weights is None:
            weights = always(model)
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

    def gather(self, loss: Tensor, term: Tensor) -> None:
        """Add a micro-batch's gradients of the objective and of the unweighted term to those of the optimiser step."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for sums, what in zip(self.gradients, (loss, term), strict=True):
            gradients = torch.autograd.grad(what, parameters, retain_graph=True, allow_unused=True)
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    sums[i] = gradient.float() if i not in sums else sums[i].add_(gradient)

    def balance(self) -> None:
        """Move the weight so that the term's gradient is `grad_ratio` of the objective's, as the last step showed them.

        Whole steps, so that the weight does not depend on how they are cut. One without signal says nothing.
        """
        assert self.settings.grad_ratio is not None
        objective, divergence = map(norm_of, self.gradients)
        self.gradients = ({}, {})
        if objective > 0:
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
        """Let the average follow the policy, and the controller set the next step's weight."""
        if self.average is not None:
            self.average.follow(self.model)
        if self.settings.grad_ratio is not None:
            self.balance()


def norm_of(gradients: dict[int, Tensor]) -> float:
    """Norm of all gradients together."""
    return float(torch.stack([g.norm() for g in gradients.values()]).norm()) if gradients else 0.0
