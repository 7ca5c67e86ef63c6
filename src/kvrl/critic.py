"""The critic: a value for every position, from what the policy sees there."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvrl.attention.probe import text_config
from kvrl.attention.replay import Backend
from kvrl.sampler.types import Rollout
from kvrl.views import View, hidden_states


class Critic(nn.Module):
    """A linear value head, on the policy's own hidden states or on those of a model of its own."""

    def __init__(self, model: nn.Module, *, own_model: bool) -> None:
        """own_model: start from a copy of `model`, which learns apart. Values are 0 at the start, in fp32."""
        super().__init__()
        self.model: nn.Module | None = copy.deepcopy(model) if own_model else None
        device = next(model.parameters()).device
        self.head = nn.Linear(text_config(model).hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, hidden: Tensor, rollouts: Sequence[Rollout], view: View, backend: Backend, *, native: bool = True
    ) -> Tensor:
        """Values f32 [N, T]; hidden [N, T, E] are the policy's, in the same view."""
        if self.model is not None:
            hidden = hidden_states(self.model, rollouts, view, backend, native=native)  # [N, T, E]
        return self.head(hidden.to(self.head.weight.dtype))[..., 0]
