"""The trunk's hidden states of rollouts under a view: with the recorded trace, or with the full context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from kvrl.attention.probe import check_length, prepare, rope_limit, text_config
from kvrl.attention.replay import Backend, ReplayContext
from kvrl.beacons.config import BeaconSet, beacons_of, listed
from kvrl.beacons.plan import Fed
from kvrl.errors import KvrlError
from kvrl.head import decoder
from kvrl.sampler.types import Rollout

View = Literal["sparse", "dense"]


def hidden_states(
    model: nn.Module, rollouts: Sequence[Rollout], view: View, backend: Backend, *, native: bool = True
) -> Tensor:
    """The trunk's last hidden states, [N, T, E], right-padded; native: by compiled CPU kernels, where they are.

    Raises KvrlError for a trace that does not fit its tokens or the model, and beyond the model's length.
    """
    prepare(model)  # an unprepared one would attend to everything, whatever the view
    if view not in get_args(View):
        raise KvrlError(f"view: {view!r} is not one of {', '.join(get_args(View))}")
    if not rollouts:
        raise KvrlError("rollouts: is empty; give at least one")
    device, config = next(model.parameters()).device, text_config(model)
    check_traces(rollouts, config)
    check_beacons(rollouts, beacons_of(model))
    fed = [seen(r, view) for r in rollouts]
    length = max(len(f.ids) for f in fed)
    farthest = max(fed, key=lambda f: int(f.positions[-1]))
    longest = int(farthest.positions[-1]) + 1
    taken = longest - (len(farthest.ids) - len(farthest.beacons))  # 0 where beacons share positions
    check_length(rope_limit(config), longest, "rollouts", taken)
    ids = torch.zeros(len(fed), length, dtype=torch.long)
    positions = torch.arange(length).clamp(max=longest - 1).repeat(len(fed), 1)  # no padding beyond what is real
    for i, f in enumerate(fed):
        ids[i, : len(f.ids)], positions[i, : len(f.ids)] = f.ids, f.positions
    shared = not torch.equal(positions, torch.arange(length).expand_as(positions))  # else places serve as well
    ids, positions = ids.to(device), positions.to(device)
    traces = [r.trace for r in rollouts] if view == "sparse" else None
    context = ReplayContext(
        traces, length, backend=backend, device=device, positions=positions if shared else None, native=native
    )  # fmt: skip
    trunk = decoder(model)
    return trunk(input_ids=ids, position_ids=positions, use_cache=False, kv=context).last_hidden_state


def seen(r: Rollout, view: View) -> Fed:
    """What goes through the model under a view: in `sparse` what the sampler fed, in `dense` the raw tokens alone."""
    return r.fed if view == "sparse" or r.beacons is None else Fed.raw(r.prompt_ids, r.completion_ids)


def check_traces(rollouts: Sequence[Rollout], config: Any) -> None:
    """Raise KvrlError for a trace that belongs to other tokens or to another model."""
    shape = (config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    for i, r in enumerate(rollouts):
        if r.trace.num_tokens != len(r.fed.ids):
            raise KvrlError(
                f"rollouts[{i}]: its trace covers {r.trace.num_tokens} tokens, the rollout has {len(r.fed.ids)}; "
                "decisions and tokens of different samples were paired"
            )
        if tuple(r.trace.events.shape[:2]) != shape:
            raise KvrlError(
                f"rollouts[{i}]: its trace has {tuple(r.trace.events.shape[:2])} layers and KV heads, the model "
                f"{shape}; it was sampled from another model"
            )


def check_beacons(rollouts: Sequence[Rollout], own: BeaconSet | None) -> None:
    """Raise KvrlError for beacons that are not the model's, or whose trace is not theirs."""
    for i, r in enumerate(rollouts):
        if r.beacons is None:
            continue
        if own is None or own.token_id != r.beacons.token_id:
            raise KvrlError(
                f"rollouts[{i}]: token {r.beacons.token_id} was its beacon, and the model has "
                f"{'none' if own is None else own.token_id}; replay it on the model that it was sampled from"
            )
        if not r.keeps_to_beacons:
            raise KvrlError(
                f"rollouts[{i}]: its trace evicts other entries than its beacons of every {listed(r.beacons.windows)} "
                "tokens do; it was changed after it was recorded"
            )
