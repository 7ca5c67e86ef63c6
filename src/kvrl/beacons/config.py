"""Which beacons a model has, which a rollout asks for, and what of the two may differ.

A model with beacons says so in its own config, `kvrl_beacons`, so that a trained folder decodes with them by itself.
The cache section (`cache.policy: beacon`) chooses among what the model was trained with.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from kvrl.beacons.plan import Beacons, Positions
from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.streams import fold, uniform

Schedule = Literal["constant", "random"] | tuple[int, ...]

FIELD = "kvrl_beacons"
"""The name under which a model's config holds its beacons."""
RATE_STREAM = -2  # of a request's stream; tokens take 0, 1, ...


def plain_integer(value: Any) -> int:
    """An integer of any kind as Python's. ValueError for anything else, a truth value too."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{value!r} is no whole number")
    return operator.index(value)


Whole = Annotated[int, BeforeValidator(plain_integer)]


class BeaconParams(BaseModel):
    """`cache.params` under `cache.policy: beacon`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    every: Whole | list[Whole] | None = None
    """Raw tokens that a beacon stands for (c), or several: each completion draws one. None: the model's own."""
    positions: Positions | None = None
    """`sequence`: a beacon takes the next position; `shared`: its window's last one. None: the model's own."""
    schedule: Literal["constant", "random"] | list[Whole] = "constant"
    """`constant`: all windows of a completion are of one c. `random`: each window draws its own. A list: c of the
    first window, the second and so on, the last being that of all further ones."""

    @property
    def rates(self) -> tuple[int, ...] | None:
        """The set of c, in order; None if it is the model's."""
        if self.every is None:
            return None
        return tuple(sorted(self.every if isinstance(self.every, list) else [self.every]))

    @property
    def ordered(self) -> Schedule:
        """The schedule, a list of windows as a tuple."""
        return self.schedule if isinstance(self.schedule, str) else tuple(self.schedule)


@dataclass(frozen=True)
class BeaconSet:
    """The beacon of a model: its token, the windows that it was trained with, and how it is placed."""

    token_id: int
    every: tuple[int, ...]
    """The set of c, in order."""
    positions: Positions = "sequence"
    schedule: Schedule = "constant"
    """How the windows of a completion follow one another, unless a request says so. Not kept with a model."""

    def plan(self, every: int | Sequence[int]) -> Beacons:
        """The beacons of a completion whose windows all have `every` raw tokens, or such a list of windows.

        Raises KvrlError unless they are of the set.
        """
        windows = whole_numbers(every, "every")
        if not windows:
            raise KvrlError("every: an empty list of windows; give one c at least, or leave it out")
        if strange := [c for c in windows if c not in self.every]:
            raise KvrlError(
                f"every: {strange[0]} is not one of the {listed(self.every)} that this rollout's beacons have; choose "
                "among them, or leave it out"
            )
        return Beacons(self.token_id, windows, self.positions)

    def draw(self, stream: int, raw: int) -> Beacons:
        """The beacons of a request of at most `raw` tokens. What the schedule leaves open its own random stream draws.

        A window's draw does not depend on `raw`.
        """
        if not isinstance(self.schedule, str):
            return self.plan(self.schedule)
        draws = 1 if self.schedule == "constant" else -(-raw // self.every[0])
        key = fold(torch.tensor(stream), RATE_STREAM)
        keys = torch.cat([key[None], fold(key, torch.arange(1, draws))])  # [draws]
        return self.plan([self.every[int(number * len(self.every))] for number in uniform(keys).tolist()])

    def slots(self, prompt: int, max_completion_length: int) -> int:
        """Entries of a slot that holds a request with any windows of the set: |prompt| + ceil(n / c) + c + 1 for one c.

        The most are held when the longest window closes after nothing but the shortest.
        """
        shortest, longest = self.every[0], self.every[-1]
        return prompt + -(-max(0, max_completion_length - longest) // shortest) + longest + 2

    def positions_taken(self, max_completion_length: int) -> int:
        """Positions that beacons take in a completion, at most."""
        return 0 if self.positions == "shared" else self.plan(self.every[0]).count(max_completion_length)

    def as_config(self) -> dict[str, Any]:
        """What the model's config holds, as JSON has it."""
        return {"token_id": self.token_id, "every": list(self.every), "positions": self.positions}


def whole_numbers(given: Any, field: str) -> tuple[int, ...]:
    """A window or several as plain integers, NumPy's and PyTorch's too. KvrlError for anything else."""
    given = given.tolist() if hasattr(given, "tolist") else given
    several = isinstance(given, Iterable) and not isinstance(given, str)
    try:
        return tuple(plain_integer(c) for c in (given if several else [given]))
    except ValueError:
        raise KvrlError(f"{field}: {given!r} is refused; it should be a whole number or a list of them") from None


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
    for name in ("budget", "buffer", "protect_prompt"):
        if getattr(cache, name) != CacheConfig.model_fields[name].default:
            raise KvrlError(
                f"cache.{name}: has no meaning under cache.policy beacon, whose dial is cache.params.every; leave "
                f"cache.{name} out"
            )
    try:
        params = BeaconParams(**cache.params)
    except ValidationError as error:
        first = error.errors()[0]
        field, known = str(first["loc"][0]), sorted(BeaconParams.model_fields)
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"leave it out (it has {', '.join(known)})"
            raise KvrlError(f"cache.params.{field}: is no parameter of beacon; {hint}") from None
        wanted = {
            "every": "a whole number or a list of them", "positions": "'sequence' or 'shared'",
            "schedule": "'constant', 'random', or a list of whole numbers",
        }[field]  # fmt: skip
        raise KvrlError(f"cache.params.{field}: {cache.params[field]!r} is refused; it should be {wanted}") from None
    if params.rates is not None:
        check_rates(params.rates, "cache.params.every")
        check_schedule(params.ordered, params.rates, "of cache.params.every")
    return params


def check_rates(every: tuple[int, ...], field: str) -> None:
    """Raise KvrlError unless `every` is a set of c that windows can have."""
    if not every:
        raise KvrlError(f"{field}: is empty; give the raw tokens of a window, such as 4, or [2, 4, 8]")
    if every[0] < 1:
        raise KvrlError(f"{field}: {every[0]} is below 1; a beacon stands for one raw token at least")
    if len(set(every)) < len(every):
        raise KvrlError(f"{field}: {listed(every)} names a window twice; name each once")


def decodings(every: tuple[int, ...], schedule: Schedule) -> list[str]:
    """Under which windows a model with beacons is evaluated: `c=4` for each of a set, `c=2,2,8` for a list of them."""
    if isinstance(schedule, str):
        return [f"c={c}" for c in every]
    return [f"c={','.join(map(str, schedule))}"]


def check_schedule(schedule: Schedule, every: tuple[int, ...], source: str) -> None:
    """Raise KvrlError for a list of windows that has none, or one that is not of the set."""
    if isinstance(schedule, str):
        return
    if not schedule:
        raise KvrlError("cache.params.schedule: is empty; list c of each window, or set it to constant or random")
    if strange := [c for c in schedule if c not in every]:
        raise KvrlError(
            f"cache.params.schedule: {strange[0]} is not one of the {listed(every)} {source}; choose among them"
        )


def check_limit(every: tuple[int, ...], max_completion_length: int) -> None:
    """Raise KvrlError for windows that no completion can fill."""
    if every[-1] > max_completion_length:
        raise KvrlError(
            f"cache.params.every: {every[-1]} is over sampling.max_completion_length ({max_completion_length}), so no "
            f"window would ever close; {closing(every[-1], max_completion_length)}"
        )


def closing(c: int, max_completion_length: int) -> str:
    """What to do about a window that never closes: its beacon needs two more tokens, of which the last is not fed."""
    longer = f"raise sampling.max_completion_length to at least {c + 2}"
    most = max_completion_length - 2
    return longer if most < 1 else f"lower it to at most {most}, or {longer}"


def check_without(beacon: int | None, ids: Sequence[int], what: str) -> None:
    """Raise KvrlError for a text that holds the model's beacon."""
    if beacon in ids:
        raise KvrlError(
            f"{what}: holds the beacon's id {beacon}, which only the engine feeds; take it out, or give the model "
            "another beacon (beacons.token)"
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
        every = tuple(sorted(map(plain_integer, held["every"])))
        found = BeaconSet(plain_integer(held["token_id"]), every, held["positions"])
    except (KeyError, TypeError, ValueError):
        raise KvrlError(
            f"model.config.{FIELD}: {held!r} is not token_id, every and positions; keep what was saved"
        ) from None
    check_rates(found.every, f"model.config.{FIELD}.every")
    if not 0 <= found.token_id < config.vocab_size:
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
    check_schedule(params.ordered, every, "that the model was trained with")
    return BeaconSet(own.token_id, every, own.positions, params.ordered)
