"""Beacons in a run's configuration: their section, and what does not go together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrl.beacons.config import check_limit, params_of
from kvrl.errors import KvrlError
from kvrl.train.section import Section

if TYPE_CHECKING:
    from kvrl.train.config import Config


class BeaconSettings(Section):
    """The beacon that a model without one is given under `cache.policy: beacon`; it is saved with the model."""

    token: str | None = None
    """A reserved token of the tokenizer that becomes the beacon. None: a new token, with a new row of the embedding."""
    start: str = "mean"
    """Where its embedding starts: `mean` of all others, or a token whose embedding it takes."""


def check_beacons(config: Config) -> None:
    """Raise KvrlError for beacons that the rest of a configuration does not allow."""
    cache = config.cache
    if not cache.is_beacon:
        if given := sorted(config.beacons.model_fields_set):
            raise KvrlError(
                f"beacons.{given[0]}: cache.policy {cache.policy} has no beacons; set cache.policy to beacon, or leave "
                f"beacons.{given[0]} out"
            )
        return
    rates = params_of(cache).rates
    if given := sorted({"budget", "buffer", "protect_prompt"} & cache.model_fields_set):
        raise KvrlError(
            f"cache.{given[0]}: has no meaning under cache.policy beacon, whose dial is cache.params.every; leave "
            f"cache.{given[0]} out"
        )
    if rates is None:
        raise KvrlError(
            "cache.params.every: is missing; give the raw tokens that a beacon stands for, such as 4, or [2, 4, 8] to "
            "draw one for each completion"
        )
    check_limit(rates, config.sampling.max_completion_length)
    if config.method != "dense" and config.replay.backend == "segments":
        raise KvrlError(
            "replay.backend: segments replays evictions of a budget and buffer, and beacons have none; set "
            "replay.backend to mask (or to flex, on CUDA)"
        )
