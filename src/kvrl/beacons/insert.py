"""Beacons put into rollouts that were sampled without: what they are distilled on (arXiv 2510.13797, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvrl.beacons.config import BeaconSet, check_without
from kvrl.beacons.plan import Beacons
from kvrl.errors import KvrlError
from kvrl.sampler.types import Rollout
from kvrl.streams import stream_key


def insert(r: Rollout, beacons: Beacons) -> Rollout:
    """The same tokens with beacons between them: its view `sparse` is the beacon policy's, `dense` stays as it was.

    Raises KvrlError for a rollout that lost entries in sampling: its tokens are not the uncompressed policy's; and for
    one that holds the beacon among them.
    """
    if r.trace.num_events or r.beacons is not None:
        raise KvrlError(
            "rollouts: beacons go into rollouts of the full cache, and this one lost entries; sample with cache.policy "
            "dense"
        )
    check_without(beacons.token_id, r.prompt_ids + r.completion_ids, "rollouts")
    layers, kv_heads, _ = r.trace.events.shape
    trace = beacons.trace(layers, kv_heads, len(r.prompt_ids), len(r.completion_ids))
    return replace(r, beacons=beacons, trace=replace(trace, windows=r.trace.windows))


def insert_drawn(
    rollouts: Sequence[Rollout], beacons: BeaconSet, *key: int, rows: Sequence[int] | None = None
) -> list[Rollout]:
    """Beacons in every rollout of a batch, each with windows drawn from the set by the stream (*key, its row).

    rows: those of rollouts that are a part of a batch, so that what they draw does not depend on how it is cut.
    """
    rows = range(len(rollouts)) if rows is None else rows
    return [
        insert(r, beacons.draw(stream_key(*key, row), len(r.completion_ids)))
        for row, r in zip(rows, rollouts, strict=True)
    ]
