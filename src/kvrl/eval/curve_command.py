"""`kvrl eval MODEL --curve`: what is compared on which model, and how it is shown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from kvrl.attention.probe import prepare, probe
from kvrl.beacons.config import BeaconSet, beacons_for, beacons_of, check_limit
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.eval.curve import TRUNCATED, UNCOMPRESSED, Curve, Decoder, Point, measure
from kvrl.eval.evaluate import held_out, scored_task
from kvrl.eval.models import load, load_other
from kvrl.eval.report import check_figure, to_json, widened
from kvrl.eval.run_defaults import settings_of, uncompressed_of, without_task
from kvrl.progress import sampling_bar
from kvrl.sampler.config import SamplingConfig
from kvrl.train.data import PromptLimits

BASELINES = ["tova", "streaming", "rkv", "snapkv"]
BUFFER = 1
"""Entries that a baseline takes before it evicts: one at a time, as TOVA and StreamingLLM are published."""
UNMATCHED = 2**20
"""Entries of a baseline before its size is matched: room for whatever the flags let it keep."""
FIRST = "beacons"
"""The curve of MODEL."""

ALONE = ("teacher", "others", "baselines", "limits", "protect_prompt", "output")
"""Flags that have no meaning without --curve."""


def check_flags(args: argparse.Namespace) -> None:
    """Raise KvrlError for flags of --curve without it, and for those that it does not go with."""
    if not args.curve:
        for name in ALONE:
            if getattr(args, name):
                raise KvrlError(f"--{name}: has no meaning without --curve; set --curve, or leave --{name} out")
        return
    if args.benchmark is not None:
        raise KvrlError(f"--benchmark: {args.benchmark} has no curve; set --task")
    if args.budgets is not None:
        raise KvrlError(
            "--budgets: has no meaning under --curve, which matches budgets to the beacons; choose windows by --every, "
            "or entries by --limits"
        )
    if args.schedule is not None:
        raise KvrlError("--schedule: has no meaning under --curve, a point of which is one window; choose by --every")
    if args.policy not in (None, "beacon"):
        raise KvrlError(f"--policy: {args.policy} has no meaning under --curve; name it in --baselines")


def run_curve(args: argparse.Namespace) -> None:
    """The whole command. Whatever can be wrong is told before anything is decoded."""
    if args.output is not None:
        check_figure(Path(args.output))
    held = {name: getattr(args, name) for name in ("window", "sinks") if getattr(args, name) is not None}
    held |= {"buffer": args.buffer or BUFFER, "protect_prompt": args.protect_prompt}
    args.policy, args.buffer, args.window, args.sinks = "beacon", None, None, None
    cache, sampling, taken = settings_of(args)
    cache = CacheConfig(policy="beacon", params=cache.params)
    baselines = {name: baseline(name, held) for name in args.baselines or BASELINES}
    others = [named(text, [FIRST, UNCOMPRESSED, TRUNCATED, *baselines]) for text in args.others or []]
    if args.task is None:
        raise without_task(args.model, "--task")
    args.teacher = args.teacher or uncompressed_of(args.model)
    if taken is not None:
        print(taken, file=sys.stderr)
    curve = measured(args, cache, sampling, baselines, others)
    heading = f"{args.model} on {args.task}"
    if args.json:
        own = {"model": args.model, UNCOMPRESSED: args.teacher, "task": args.task, "buffer": held["buffer"],
               "protect_prompt": args.protect_prompt}  # fmt: skip
        print(to_json({**own, **curve.as_json()}, indent=2))
    else:
        console = widened(Console())
        console.print(curve_table(curve, heading, args.teacher))
        console.print(memory_table(curve))
        console.print(text_table(curve))
    if args.output is not None:
        from kvrl.eval.curve_plot import plot

        plot(Path(args.output), curve, heading)
        print(f"figure: {args.output}", file=sys.stderr)


def baseline(name: str, held: dict[str, Any]) -> CacheConfig:
    """A policy's section, whose budget will be matched. KvrlError unless it is a training-free policy."""
    if name in ("dense", "beacon"):
        raise KvrlError(f"--baselines: {name} is no training-free policy; choose among those of `kvrl policies`")
    cache = CacheConfig(policy=name, budget=UNMATCHED, **held)
    try:
        make_policy(cache)
    except KvrlError as error:
        raise KvrlError(str(error).replace("cache.policy", "--baselines")) from None
    return cache


def measured(
    args: argparse.Namespace, cache: CacheConfig, sampling: SamplingConfig, baselines: dict[str, CacheConfig],
    others: list[tuple[str, str]],
) -> Curve:  # fmt: skip
    """Load the models and decode everything."""
    n = 256 if args.n is None else args.n
    task = scored_task(args)
    model, tokenizer = load(args.model, args.dtype, "MODEL")
    windows = windows_of(cache, model, "MODEL", args.model)
    check_limit(windows.every, sampling.max_completion_length)
    teacher = model
    if args.teacher != args.model:
        teacher = load_other(args.teacher, args.dtype, "--teacher", tokenizer)
        check_shape(model, teacher, "--teacher", args.teacher)
    beacons: dict[str, list[tuple[nn.Module, CacheConfig]]] = {FIRST: [(model, cache)]}
    drawn: set[tuple[str, int]] = set()
    for name, folder in others:
        other = load_other(folder, args.dtype, "--others", tokenizer)
        check_shape(model, other, "--others", folder)
        own = CacheConfig(policy="beacon")
        theirs = windows_of(own, other, "--others", folder).every
        if theirs[-1] > sampling.max_completion_length:
            raise KvrlError(
                f"--others: {folder} has beacons of every {theirs[-1]} tokens, over --max_completion_length "
                f"({sampling.max_completion_length}); raise it to at least {theirs[-1] + 2}, or leave that model out"
            )
        for c in theirs:
            if (name, c) in drawn:
                raise KvrlError(f"--others: {name} has c={c} twice, again of {folder}; give that model another name")
            drawn.add((name, c))
        beacons.setdefault(name, []).append((other, own))
    rows, prompts = held_out(tokenizer, task, PromptLimits([]), n, args.seed)
    print(f"{UNCOMPRESSED}: {args.teacher}", file=sys.stderr)
    with torch.no_grad(), sampling_bar(Console(stderr=True)) as on_step:
        decoder = Decoder(task, tokenizer, rows, prompts, sampling, args.seed, args.slots or min(128, n), on_step)
        return measure(decoder, beacons, teacher, baselines, args.limits)


def windows_of(cache: CacheConfig, model: nn.Module, field: str, folder: str) -> BeaconSet:
    """The beacons of a curve. KvrlError for a model without."""
    if beacons_of(model) is None:
        raise KvrlError(f"{field}: {folder} has no beacon, and a curve is of beacons; give a model that has one")
    return beacons_for(cache, model)


def check_shape(model: nn.Module, other: nn.Module, field: str, folder: str) -> None:
    """Raise KvrlError for a model whose traces are of another shape: a text of one is replayed by all."""
    shapes = [(s.num_layers, s.kv_heads, s.windows) for s in (probe(prepare(model)), probe(prepare(other)))]
    if shapes[0] != shapes[1]:
        ours, theirs = (f"{layers} layers of {heads} KV heads" for layers, heads, _ in shapes)
        windows = "" if ours != theirs else ", with other sliding windows"
        raise KvrlError(
            f"{field}: {folder} has {theirs}{windows}, and MODEL {ours}; a curve is of models of one shape, as they "
            "replay one text"
        )


def named(text: str, taken: list[str]) -> tuple[str, str]:
    """`single=runs/c4/model` as name and folder. KvrlError for a name that another curve has."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise KvrlError(f"--others: {text} is not NAME=FOLDER, such as single=runs/c4/model; write it so")
    if name in taken:
        raise KvrlError(f"--others: {name} names another curve ({', '.join(taken)}); give another name")
    return name, folder


def curve_table(curve: Curve, title: str, uncompressed: str) -> Table:
    """A row for each point, with the area under each method's curve."""
    table = Table(title=f"{title}: {curve.problems} problems", caption=f"{UNCOMPRESSED}: {uncompressed}")
    for name in ("method", "decoding", "entries, mean", "most", "accuracy", "of full", "tokens", "cut off", "AUAC"):
        table.add_column(name, justify="left" if name == "method" else "right")
    table.add_row(UNCOMPRESSED, *cells(curve.full), "")
    areas = curve.auac()
    for name, points in curve.methods.items():
        table.add_section()
        for i, p in enumerate(points):
            area = areas[name]
            table.add_row(name, *cells(p), f"{area:.3f}" if area is not None and i == len(points) - 1 else "")
    return table


def cells(p: Point) -> list[str]:
    """What a point's row shows."""
    retained = "" if p.retained is None else f"{p.retained:.0%}"
    return [p.decoding, f"{p.held_entries:.1f}", str(p.held_entries_max), f"{p.accuracy:.3f}", retained,
            f"{p.tokens:.0f}", f"{p.truncated:.0%}"]  # fmt: skip


def memory_table(curve: Curve) -> Table:
    """Accuracy and tokens of each decoding where no more than so many entries may be held."""
    table = Table(title="accuracy (tokens) if no more entries may be held: a completion that needs more ends there")
    table.add_column("entries")
    for limit in curve.limits:
        table.add_column(str(limit), justify="right")
    for name, row in curve.memory.items():
        table.add_row(name, *("-" if c is None else f"{c.accuracy:.3f} ({c.tokens:.0f})" for c in row))
    return table


def text_table(curve: Curve) -> Table:
    """Negative log-prob of one text under each decoding that has a trace without sampling."""
    table = Table(title="the uncompressed model's completions under each cache: -log-prob, nats a token")
    table.add_column("decoding")
    table.add_column("nats", justify="right")
    for name, value in sorted(curve.text.items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:.4f}")
    return table
