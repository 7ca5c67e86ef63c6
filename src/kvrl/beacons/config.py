"""Which beacons a model has, which a rollout asks for, and what of the two may differ.

A model with beacons says so in its own config, `kvrl_beacons`, so that a trained folder decodes with them by itself.
The cache section (`cache.policy: beacon`) chooses among what the model was trained with.
"""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from kvrl.beacons.plan import Beacons, Positions
from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.streams import fold, uniform

FIELD = "kvrl_beacons"
"""The name under which a model's config holds its beacons."""
RATE_STREAM = -2  # of a request's stream; tokens take 0, 1, ...


class BeaconParams(BaseModel):
    """`cache.params` under `cache.policy: beacon`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    every: int | list[int] | None = None
    """Raw tokens that a beacon stands for (c), or several: each completion draws one. None: the model's own."""
    positions: Positions | None = None
    """`sequence`: a beacon takes the next position; `shared`: its window's last one. None: the model's own."""

    @property
    def rates(self) -> tuple[int, ...] | None:
        """The set of c, in order; None if it is the model's."""
        if self.every is None:
            return None
        return tuple(sorted(self.every if isinstance(self.every, list) else [self.every]))


@dataclass(frozen=True)
class BeaconSet:
    """The beacon of a model: its token, the windows that it was trained with, and how it is placed."""

    token_id: int
    every: tuple[int, ...]
    """The set of c, in order."""
    positions: Positions = "sequence"

    def plan(self, every: int) -> Beacons:
        """The beacons of a completion whose windows have `every` raw tokens. KvrlError unless it is of the set."""
        if every not in self.every:
            raise KvrlError(
                f"every: {every} is not one of the {listed(self.every)} that this rollout's beacons have; choose among "
                "them, or leave it out"
            )
        return Beacons(self.token_id, every, self.positions)

    def draw(self, stream: int) -> Beacons:
        """The beacons of a request: c is drawn from the set by the request's own random stream."""
        number = float(uniform(fold(torch.tensor(stream), RATE_STREAM)))
        return self.plan(self.every[int(number * len(self.every))])

    def slots(self, prompt: int, max_completion_length: int) -> int:
        """Entries of a slot that holds a request at any c of the set."""
        return max(self.plan(c).slots(prompt, max_completion_length) for c in self.every)

    def positions_taken(self, max_completion_length: int) -> int:
        """Positions that beacons take in a completion, at most."""
        if self.positions == "shared":
            return 0
        return max(self.plan(c).count(max_completion_length) for c in self.every)

    def as_config(self) -> dict[str, Any]:
        """What the model's config holds, as JSON has it."""
        return {**asdict(self), "every": list(self.every)}


def listed(every: tuple[int, ...]) -> str:
    """`2, 4, 8`."""
    return ", ".join(map(str, every))


def params_of(cache: CacheConfig) -> BeaconParams:
    """The parameters of a cache section of policy `beacon`. KvrlError for an unknown or impossible one."""
    for name in ("window", "sinks", "granularity"):
        if (given := getattr(cache, name)) is not None:
            raise KvrlError(
                f"cache.{name}: {given} has no meaning under policy beacon, where a window goes as a whole when its "
                f"beacon was read; leave cache.{name} out"
            )
    try:
        params = BeaconParams(**cache.params)
    except ValidationError as error:
        first = error.errors()[0]
        field, known = str(first["loc"][0]), sorted(BeaconParams.model_fields)
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise KvrlError(f"cache.params.{field}: is no parameter of beacon; {hint}") from None
        wanted = "a whole number or a list of them" if field == "every" else "'sequence' or 'shared'"
        raise KvrlError(f"cache.params.{field}: {cache.params[field]!r} is refused; it should be {wanted}") from None
    if params.rates is not None:
        check_rates(params.rates, "cache.params.every")
    return params


def check_rates(every: tuple[int, ...], field: str) -> None:
    """Raise KvrlError unless `every` is a set of c that windows can have."""
    if not every:
        raise KvrlError(f"{field}: is empty; give the raw tokens of a window, such as 4, or [2, 4, 8]")
    if every[0] < 1:
        raise KvrlError(f"{field}: {every[0]} is below 1; a beacon stands for one raw token at least")
    if len(set(every)) < len(every):
        raise KvrlError(f"{field}: {listed(every)} names a window twice; name each once")


def check_limit(every: tuple[int, ...], max_completion_length: int) -> None:
    """Raise KvrlError for windows that no completion can fill."""
    if every[-1] > max_completion_length:
        raise KvrlError(
            f"cache.params.every: {every[-1]} is over sampling.max_completion_length ({max_completion_length}), so no "
            f"window would ever close; lower it to at most {max_completion_length}"
        )


def beacons_of(model: Any) -> BeaconSet | None:
    """The beacons that a model's config names, None for a model without."""
    config = model.config.get_text_config()
    held = getattr(config, FIELD, None)
    if held is None:
        return None
    try:
        if held["positions"] not in get_args(Positions):
            raise ValueError(held["positions"])
        found = BeaconSet(int(held["token_id"]), tuple(sorted(map(int, held["every"]))), held["positions"])
    except (KeyError, TypeError, ValueError):
        raise KvrlError(
            f"model.config.{FIELD}: {held!r} is not token_id, every and positions; keep what was saved"
        ) from None
    check_rates(found.every, f"model.config.{FIELD}.every")
    if found.token_id >= config.vocab_size:
        raise KvrlError(
            f"model.config.{FIELD}: token {found.token_id} is not in the vocabulary of "
            f"{config.vocab_size}; add the beacon to this model (kvrl.add_beacon)"
        )
    return found


def beacons_for(cache: CacheConfig, model: Any) -> BeaconSet:
    """What a cache section of policy `beacon` asks of a model's beacons. KvrlError for what it was not trained with."""
    params, own = params_of(cache), beacons_of(model)
    if own is None:
        raise KvrlError(
            "cache.policy: beacon needs a model that has a beacon; train one with it, add it by kvrl.add_beacon, or "
            "choose another policy"
        )
    every = own.every if params.rates is None else params.rates
    if strange := [c for c in every if c not in own.every]:
        raise KvrlError(
            f"cache.params.every: {strange[0]} is not one of the {listed(own.every)} that the model was trained with; "
            "choose among them, or train for it"
        )
    if params.positions not in (None, own.positions):
        raise KvrlError(
            f"cache.params.positions: {params.positions} is not the {own.positions} that the model was trained with; "
            "leave it out"
        )
    return BeaconSet(own.token_id, every, own.positions)
