"""Tiny models with a beacon, their rollouts, and what was fed in them, worked out the slow way."""

from __future__ import annotations

import functools
import itertools

import torch

import helpers
import kvrl
from kvrl.cache.trace import NEVER
from kvrl.eval.oracle import beacon_logprobs
from kvrl.models.tiny_families import VOCAB, build_family

BEACON = VOCAB - 1
RATES = (1, 2, 3, 5)


@functools.cache
def model(name: str = "llama", window: int = 8, dtype: torch.dtype = torch.float32, positions: str = "sequence"):
    """The family's tiny model with a beacon. Shared between tests: leave weights and mode as they are."""
    lm = helpers._with_experts(build_family(name, window=window, dtype=dtype), "batched_mm")
    lm.config.kvrl_beacons = {"token_id": BEACON, "every": list(RATES), "positions": positions}
    return lm


def make_prompts(lengths=helpers.LENGTHS, seed: int = 1) -> list[list[int]]:
    """As the other tests have them, without the beacon's id."""
    return [[min(i, BEACON - 1) for i in prompt] for prompt in helpers.make_prompts(lengths, seed)]


def cache(every=None, schedule="constant") -> kvrl.CacheConfig:
    chosen = {"schedule": schedule} if every is None else {"every": every, "schedule": schedule}
    return kvrl.CacheConfig(policy="beacon", params=chosen)


def sample(
    lm=None, prompts=None, every=None, *, schedule="constant", new: int = 23, seed: int = 0, **kwargs
) -> list[kvrl.Rollout]:
    """Rollouts of the tiny llama with its beacons, or of what is given. every: c, or the set of them."""
    fields = kwargs.pop("sampling_fields", {})
    return kvrl.rollout(
        model() if lm is None else lm, make_prompts() if prompts is None else prompts, cache=cache(every, schedule),
        sampling=helpers.sampling(new, **fields), seed=seed, **kwargs,
    )  # fmt: skip


def by_hand(r: kvrl.Rollout, windows, positions: str = "sequence") -> tuple[list[int], list[int], list[int]]:
    """Fed ids, positions, and the first query that does not see each entry, token by token.

    windows: raw tokens of each in turn, the last for the rest.
    """
    sizes = itertools.chain(windows, itertools.repeat(windows[-1]))
    every = next(sizes)
    ids, where = list(r.prompt_ids), list(range(len(r.prompt_ids)))
    gone = [NEVER] * len(ids)
    window: list[int] = []
    following = len(ids)
    for n, token in enumerate(r.completion_ids):
        if len(window) == every and n < len(r.completion_ids) - 1:
            if positions == "sequence":
                where.append(following)
                following += 1
            else:
                where.append(following - 1)
            ids.append(BEACON)
            gone.append(NEVER)
            for entry in window:
                gone[entry] = len(ids)
            window, every = [], next(sizes)
        window.append(len(ids))
        ids.append(token)
        where.append(following)
        gone.append(NEVER)
        following += 1
    return ids, where, gone


def oracle(twin, rollouts, positions: str = "sequence", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The stock model's log-probs of every completion token, [N, max C], 0 beyond."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts), dtype=dtype)
    for i, r in enumerate(rollouts):
        ids, where, gone = by_hand(r, r.beacons.windows, positions)
        evicted_at = torch.tensor(gone).expand(*r.trace.events.shape[:2], -1)
        logps = beacon_logprobs(
            twin, ids, where, evicted_at, BEACON, len(r.prompt_ids), temperature=r.temperature
        )  # fmt: skip
        out[i, : len(logps)] = logps
    return out
