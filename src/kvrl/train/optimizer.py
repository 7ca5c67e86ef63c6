"""AdamW, with fp32 masters where the resident model is bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from kvrl.train.config import TrainSettings


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose state and weights are fp32 while the model that samples and learns stays bf16.

    Pure bf16 AdamW at a learning rate of 1e-6 loses most updates to rounding. Gradients move into the
    masters as soon as they exist, so that they accumulate in fp32 and the bf16 ones are freed.
    """

    def __init__(self, groups: list[dict[str, Any]], **kwargs: Any) -> None:
        self.resident: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self.masters: list[Tensor] = [p.detach().float().clone().requires_grad_() for p in self.resident]
        masters = iter(self.masters)
        super().__init__([{**group, "params": [next(masters) for _ in group["params"]]} for group in groups], **kwargs)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_mover(master))
            for parameter, master in zip(self.resident, self.masters, strict=True)
        ]

    def release(self) -> None:
        """Stop taking the model's gradients, so that another optimiser can."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters and round them into the resident model."""
        super().step()
        for parameter, master in zip(self.resident, self.masters, strict=True):
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state and the masters, which the bf16 weights cannot give back."""
        return {**super().state_dict(), "masters": [m.detach() for m in self.masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`; the resident model follows the masters."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        for parameter, master, saved in zip(self.resident, self.masters, state_dict["masters"], strict=True):
            master.copy_(saved)
            parameter.copy_(master)


def _mover(master: Tensor):
    def move(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move


POLICY, CRITIC, STUDENT = "policy", "critic", "student"


def make_optimizer(
    model: nn.Module,
    settings: TrainSettings,
    learning_rate: float | None = None,
    critic: nn.Module | None = None,
    critic_learning_rate: float | None = None,
    student: nn.Module | None = None,
    student_learning_rate: float | None = None,
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, weight decay on matrices alone; fp32 masters if any of them is not fp32.

    The learning rates are those of the settings unless given. The critic and a student apart from the policy have
    parameter groups of their own.
    """
    groups = _groups(model, POLICY, settings, learning_rate)
    if critic is not None:
        groups += _groups(critic, CRITIC, settings, critic_learning_rate)
    if student is not None:
        groups += _groups(student, STUDENT, settings, student_learning_rate)
    reduced = any(p.dtype in (torch.bfloat16, torch.float16) for g in groups for p in g["params"])
    kind = MasterAdamW if reduced else torch.optim.AdamW
    return kind(groups, betas=(settings.adam_beta1, settings.adam_beta2))


def _groups(model: nn.Module, role: str, settings: TrainSettings, learning_rate: float | None) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    shared = {"role": role, "lr": settings.learning_rate if learning_rate is None else learning_rate}
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay, **shared},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, **shared},
    ]
    return [g for g in groups if g["params"]]


def make_scheduler(optimizer: torch.optim.Optimizer, settings: TrainSettings, total_steps: int) -> Any:
    """The learning rate's course over `total_steps` optimiser steps."""
    name = "constant_with_warmup" if settings.lr_scheduler == "constant" else settings.lr_scheduler
    return get_scheduler(name, optimizer, num_warmup_steps=settings.warmup_steps, num_training_steps=total_steps)


def optimized(optimizer: torch.optim.Optimizer, role: str = POLICY) -> list[Tensor]:
    """The tensors of policy, critic or student that the optimiser updates (the masters under bf16)."""
    return [p for group in groups_of(optimizer, role) for p in group["params"]]


def groups_of(optimizer: torch.optim.Optimizer, role: str) -> list[dict[str, Any]]:
    """The parameter groups of policy, critic or student."""
    return [group for group in optimizer.param_groups if group.get("role", POLICY) == role]


def current_rate(optimizer: torch.optim.Optimizer, role: str = POLICY) -> float:
    """What the schedule has come to for policy, critic or student."""
    return float(groups_of(optimizer, role)[0]["lr"])


@contextlib.contextmanager
def held_rate(optimizer: torch.optim.Optimizer, role: str, rate: float) -> Iterator[None]:
    """Let policy, critic or student take steps at another rate than the schedule has come to."""
    groups = groups_of(optimizer, role)
    scheduled = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = rate
    yield
    for group, own in zip(groups, scheduled, strict=True):
        group["lr"] = own
