"""What an engine is given, checked before anything is prefilled."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from kvrl.beacons.config import BeaconSet, check_without
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import Policy, check_budget
from kvrl.errors import KvrlError
from kvrl.sampler.request import Continue


def token_ids(what: str, ids: Any, vocab: int) -> list[int]:
    """ids as plain integers of the vocabulary; KvrlError for text and for anything else."""
    try:
        out = [operator.index(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]
    except TypeError:
        raise KvrlError(f"{what}: {str(ids)[:40]!r} is not a list of token ids; encode text by a tokenizer") from None
    if wrong := [i for i in out if not 0 <= i < vocab]:
        raise KvrlError(f"{what}: id {wrong[0]} is not in the vocabulary of {vocab}; use the model's own tokenizer")
    return out


def check_prompts(
    prompts: Sequence[Sequence[int]], longest: int, cache: CacheConfig, policy: Policy | None, beacon: int | None
) -> None:
    """Refuse prompts that do not fit, and those that hold the beacon's id."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise KvrlError(f"prompts[{i}]: is empty; a completion needs at least one token before it")
        if len(prompt) > longest:
            raise KvrlError(f"prompts[{i}]: {len(prompt)} tokens are over the engine's {longest}")
        check_without(beacon, prompt, f"prompts[{i}]")
        if policy is not None:
            try:
                check_budget(cache, policy, len(prompt))
            except KvrlError as error:
                raise KvrlError(f"prompts[{i}]: {error}") from None


def check_beacons(
    beacons: BeaconSet | None, prompts: int, every: Sequence[int | Sequence[int]] | None, on_turn: Continue | None
) -> None:
    """Refuse a choice of windows that is none, and inserted turns, which have no place between beacons."""
    if every is not None and beacons is None:
        raise KvrlError("every: chooses the beacons' windows, and this cache has none; set cache.policy to beacon")
    if every is not None and not hasattr(every, "__len__"):
        raise KvrlError(f"every: {every!r} is one value; give a list of one for each prompt")
    if every is not None and len(every) != prompts:
        raise KvrlError(f"every: {len(every)} for {prompts} prompts; give one for each")
    if on_turn is not None and beacons is not None:
        raise KvrlError("on_turn: tokens cannot be inserted where beacons close windows; use another cache.policy")
