"""The policies by name. To add one: a file here, a line in `POLICIES`, a line in the README's table."""

from __future__ import annotations

import difflib

from pydantic import ValidationError

from kvrl.beacons.config import BeaconParams, params_of
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies.base import Entries, Observation, Policy
from kvrl.cache.policies.h2o import H2O
from kvrl.cache.policies.keydiff import KeyDiff
from kvrl.cache.policies.knorm import KNorm
from kvrl.cache.policies.random import Random
from kvrl.cache.policies.recent import Recent
from kvrl.cache.policies.rkv import RKV
from kvrl.cache.policies.snapkv import SnapKV
from kvrl.cache.policies.streaming import Streaming
from kvrl.cache.policies.tova import TOVA
from kvrl.errors import KvrlError

__all__ = ["POLICIES", "Entries", "Observation", "Policy", "check_budget", "describe", "make_policy"]

POLICIES: dict[str, type[Policy]] = {
    p.name: p for p in (RKV, SnapKV, H2O, TOVA, Streaming, KeyDiff, KNorm, Recent, Random)
}


def make_policy(cache: CacheConfig) -> Policy | None:
    """The policy of a cache section, None for `dense` and for `beacon`, which score nothing.

    Raises KvrlError for an unknown policy or parameter, and for a budget below what always stays.
    """
    if cache.is_dense:
        return None
    if cache.is_beacon:
        params_of(cache)
        return None
    if cache.policy not in POLICIES:
        names = [*POLICIES, "beacon", "dense"]
        near = difflib.get_close_matches(cache.policy, names, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise KvrlError(f"cache.policy: '{cache.policy}' is not one of {', '.join(names)}{hint}")
    cls = POLICIES[cache.policy]
    common = {name: getattr(cache, name) for name in ("window", "sinks", "granularity")}
    given = {name: value for name, value in common.items() if value is not None}
    if clash := sorted(set(common) & set(cache.params)):
        raise KvrlError(f"cache.params.{clash[0]}: set it as cache.{clash[0]}, where every policy has it")
    try:
        policy = cls(**{**cls.defaults(cache.budget), **cache.params, **given})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        where = "cache" if field in common else "cache.params"
        known = sorted(set(cls.model_fields) - set(common))
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"leave it out (it has {', '.join(known) or 'none'})"
            raise KvrlError(f"{where}.{field}: is no parameter of {cls.name}; {hint}") from None
        what = first["msg"].removeprefix("Input should be ")
        raise KvrlError(f"{where}.{field}: {first['input']!r} is refused; it should be {what}") from None
    for name in ("kernel", "prompt_kernel"):
        if getattr(policy, name, 1) % 2 == 0:
            raise KvrlError(
                f"cache.params.{name}: {getattr(policy, name)} is even; pooling is centred, use an odd width"
            )
    check_budget(cache, policy, prompt_length=0)
    return policy


def check_budget(cache: CacheConfig, policy: Policy, prompt_length: int) -> None:
    """Raise KvrlError if the budget cannot hold what an eviction must keep (contract 5).

    prompt_length: tokens of the request's prompt, 0 to check what the configuration alone tells.
    """
    first = max(policy.sinks, prompt_length) if cache.protect_prompt else policy.sinks
    what = f"{first} prompt tokens" if cache.protect_prompt and prompt_length > policy.sinks else f"{first} sinks"
    window = policy.window_at(in_prompt=prompt_length >= cache.capacity)
    if cache.budget < first + window:
        raise KvrlError(
            f"cache.budget: {cache.budget} is below the {first + window} entries that must stay "
            f"({what} + {window} newest); raise cache.budget to at least {first + window}"
        )


def describe() -> str:
    """The policies with papers and parameters, for `kvrl policies`."""
    lines = []
    for name, cls in POLICIES.items():
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        lines.append(f"{name}  ({cls.paper})\n    {summary}")
        for field, info in cls.model_fields.items():
            computed = cls.defaults(budget=2)
            default = "half the budget" if field in computed else info.default
            where = "cache." if field in ("window", "sinks", "granularity") else "cache.params."
            lines.append(f"      {where}{field}: {default}  {info.description}")
    lines.append("beacon  (Breadcrumbs, arXiv 2510.13797)\n    Learned: a beacon's entry takes its window's place.")
    for field, info in BeaconParams.model_fields.items():
        lines.append(f"      cache.params.{field}: {info.default}  {info.description}")
    lines.append("dense\n    The full cache: nothing is evicted.")
    return "\n".join(lines)
