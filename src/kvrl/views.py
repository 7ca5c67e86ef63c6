"""The trunk's hidden states of rollouts under a view: with the recorded trace, or with the full context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kvrl.attention.probe import check_length, prepare, rope_limit, text_config
from kvrl.attention.replay import Backend, ReplayContext
from kvrl.errors import KvrlError
from kvrl.head import decoder
from kvrl.sampler.types import Rollout

View = Literal["sparse", "dense"]


def hidden_states(model: nn.Module, rollouts: Sequence[Rollout], view: View, backend: Backend) -> Tensor:
    """The trunk's last hidden states, [N, T, E], right-padded.

    Raises KvrlError for a trace that does not fit its tokens or the model, and beyond the model's length.
    """
    prepare(model)  # an unprepared one would attend to everything, whatever the view
    if view not in get_args(View):
        raise KvrlError(f"view: {view!r} is not one of {', '.join(get_args(View))}")
    if not rollouts:
        raise KvrlError("rollouts: is empty; give at least one")
    device, config = next(model.parameters()).device, text_config(model)
    check_traces(rollouts, config)
    length = max(r.num_tokens for r in rollouts)
    check_length(rope_limit(config), length, "rollouts")
    ids = torch.zeros(len(rollouts), length, dtype=torch.long)
    for i, r in enumerate(rollouts):
        ids[i, : r.num_tokens] = torch.tensor(r.token_ids)
    traces = [r.trace for r in rollouts] if view == "sparse" else None
    context = ReplayContext(traces, length, backend=backend, device=device)
    positions = torch.arange(length, device=device).expand(len(rollouts), -1)
    trunk = decoder(model)
    return trunk(input_ids=ids.to(device), position_ids=positions, use_cache=False, kv=context).last_hidden_state


def check_traces(rollouts: Sequence[Rollout], config: Any) -> None:
    """Raise KvrlError for a trace that belongs to other tokens or to another model."""
    shape = (config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    for i, r in enumerate(rollouts):
        if r.trace.num_tokens != r.num_tokens:
            raise KvrlError(
                f"rollouts[{i}]: its trace covers {r.trace.num_tokens} tokens, the rollout has {r.num_tokens}; "
                "decisions and tokens of different samples were paired"
            )
        if tuple(r.trace.events.shape[:2]) != shape:
            raise KvrlError(
                f"rollouts[{i}]: its trace has {tuple(r.trace.events.shape[:2])} layers and KV heads, the model "
                f"{shape}; it was sampled from another model"
            )
