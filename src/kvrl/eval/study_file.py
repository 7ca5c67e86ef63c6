"""A study file: variants of one configuration, how they are tuned, and what is measured of every trained model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvrl.eval.interval import T_QUANTILES
from kvrl.train.section import Section

Values = dict[str, Any]
"""Dotted field of the configuration -> value."""

Score = Literal["compressed", "full", "mean"]


class Tuning(Section):
    seeds: list[int] = Field(min_length=1)
    """Seeds of the tuning runs alone."""
    grid: dict[str, list[Any]]
    """Dotted field -> values that every variant tries."""
    score: Score = "compressed"
    """What is maximised, on average over the seeds: accuracy under compressed or full decoding, or their mean."""


class Variant(Section):
    overrides: Values = {}
    """Fields of this variant."""
    start: str | None = None
    """A variant whose trained model of the same seed this one starts from, in place of the warm start."""
    curve: bool = True
    """Whether its models get the study's curve, if the study has one."""
    grid: dict[str, list[Any]] = {}
    """Fields that it alone tunes, after those of the study and one after the other; the first value is the default."""


class Decoding(Section):
    policy: str
    """A policy, or `dense` for the full cache."""
    params: dict[Literal["budget", "buffer", "window", "sinks"], int | None] = {}
    """Fields of `cache` for it: those of the study's base that it does not name stay."""


class CurveSettings(Section):
    """What `kvrl eval --curve` compares every trained model with."""

    baselines: list[str] = Field(["tova", "streaming"], min_length=1)
    """Policies at matching sizes."""
    protect_prompt: bool = False
    """Whether they keep the prompt, as beacons do."""


class Study(Section):
    """A study file."""

    title: str
    """What the table is called."""
    base: str
    """The configuration that all runs start from; a path from the study file's folder."""
    overrides: Values = {}
    """Fields of all runs."""
    seeds: list[int] = Field(min_length=1, max_length=len(T_QUANTILES) + 1)
    """Seeds that are reported."""
    tuning: Tuning | None = None
    """None: every variant runs as it is set."""
    variants: dict[str, Variant] = Field(min_length=1)
    decodings: dict[str, Decoding] = {}
    """Name -> cache under which every trained model is evaluated, beside the budgets of `eval`."""
    curve: CurveSettings | None = None
    """Accuracy against cache size of every trained model with beacons. None: not measured."""
