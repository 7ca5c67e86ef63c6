"""`kvrl eval MODEL --curve`: what is compared on which model, and how it is shown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn

from kvrl.beacons.config import beacons_for
from kvrl.beacons.model import NAME
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import make_policy
from kvrl.errors import KvrlError
from kvrl.eval.curve import Curve, Decoder, Point, measure
from kvrl.eval.evaluate import held_out
from kvrl.eval.report import to_json, widened
from kvrl.eval.run_defaults import settings_of, teacher_of
from kvrl.progress import sampling_bar
from kvrl.sampler.config import SamplingConfig
from kvrl.tasks import get_task
from kvrl.train.data import PromptLimits

BASELINES = ["tova", "streaming", "rkv", "snapkv"]
BUFFER = 1
"""Entries that a baseline takes before it evicts: one at a time, as TOVA and StreamingLLM are published."""
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
    held = {name: getattr(args, name) for name in ("window", "sinks") if getattr(args, name) is not None}
    held |= {"buffer": args.buffer or BUFFER, "protect_prompt": args.protect_prompt}
    args.policy, args.buffer, args.window, args.sinks = "beacon", None, None, None
    cache, sampling, taken = settings_of(args)
    cache = CacheConfig(policy="beacon", params=cache.params)
    baselines = {name: baseline(name, held) for name in args.baselines or BASELINES}
    if args.task is None:
        raise KvrlError(f"--task: is missing, and {args.model} is not the model of a run; set --task")
    if taken is not None:
        print(taken, file=sys.stderr)
    curve = measured(args, cache, sampling, baselines)
    heading = f"{args.model} on {args.task}"
    if args.output is not None:
        draw(Path(args.output), curve, heading)
    if args.json:
        own = {"model": args.model, "task": args.task, "buffer": held["buffer"], "protect_prompt": args.protect_prompt}
        print(to_json({**own, **curve.as_json()}, indent=2))
    else:
        console = widened(Console())
        console.print(curve_table(curve, heading))
        console.print(memory_table(curve))
        console.print(text_table(curve))


def baseline(name: str, held: dict[str, Any]) -> CacheConfig:
    """A policy's section, whose budget will be matched. KvrlError unless it is a training-free policy."""
    if name in ("dense", "beacon"):
        raise KvrlError(f"--baselines: {name} is no training-free policy; choose among those of `kvrl policies`")
    cache = CacheConfig(policy=name, **held)
    try:
        make_policy(cache)
    except KvrlError as error:
        raise KvrlError(str(error).replace("cache.policy", "--baselines")) from None
    return cache


def measured(
    args: argparse.Namespace, cache: CacheConfig, sampling: SamplingConfig, baselines: dict[str, CacheConfig]
) -> Curve:
    """Load the models and decode everything."""
    n = 256 if args.n is None else args.n
    task = get_task(args.task, **args.task_params)
    model, tokenizer = load(args.model, args.dtype, "MODEL")
    windows = beacons_for(cache, model)
    path = args.teacher or teacher_of(args.model)
    teacher = model if path is None else load_other(path, args.dtype, "--teacher", tokenizer)
    beacons: dict[str, list[tuple[nn.Module, CacheConfig]]] = {FIRST: [(model, cache)]}
    for text in args.others or []:
        name, folder = named(text)
        other = load_other(folder, args.dtype, "--others", tokenizer)
        own = CacheConfig(policy="beacon")
        beacons_for(own, other)
        beacons.setdefault(name, []).append((other, own))
    rows, prompts = held_out(tokenizer, task, PromptLimits([]), n, args.seed)
    if windows.every[-1] > sampling.max_completion_length:
        raise KvrlError(
            f"--every: {windows.every[-1]} is over --max_completion_length ({sampling.max_completion_length}), so no "
            "window would ever close; raise that, or choose windows by --every"
        )
    with torch.no_grad(), sampling_bar(Console(stderr=True)) as on_step:
        decoder = Decoder(task, tokenizer, rows, prompts, sampling, args.seed, args.slots or min(128, n), on_step)
        return measure(decoder, beacons, teacher, baselines, args.limits)


def load(path: str, dtype: str, field: str) -> tuple[nn.Module, Any]:
    """A model on this machine's device, and its tokenizer."""
    from kvrl.train.setup import load_model

    model, tokenizer = load_model(path, dtype, field=field)
    return model.to(Accelerator().device), tokenizer


def load_other(path: str, dtype: str, field: str, tokenizer: Any) -> nn.Module:
    """A further model. KvrlError for one that reads other tokens."""
    model, own = load(path, dtype, field)
    ours, theirs = ({k: v for k, v in t.get_vocab().items() if k != NAME} for t in (tokenizer, own))
    if ours != theirs:
        raise KvrlError(f"{field}: {path} has other tokens than MODEL; compare models of one tokenizer")
    return model


def named(text: str) -> tuple[str, str]:
    """`single=runs/c4/model` as name and folder."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise KvrlError(f"--others: {text} is not NAME=FOLDER, such as single=runs/c4/model; write it so")
    if name == FIRST:
        raise KvrlError(f"--others: {name} is the curve of MODEL; give another name")
    return name, folder


def draw(path: Path, curve: Curve, heading: str) -> None:
    """Write the figure. KvrlError if the file cannot be written."""
    from kvrl.eval.curve_plot import plot

    try:
        plot(path, curve, heading)
    except (OSError, ValueError) as error:  # an unknown suffix is a ValueError of matplotlib's
        raise KvrlError(f"--output: {path} cannot be written ({error}); give a file such as curve.png") from None


def curve_table(curve: Curve, title: str) -> Table:
    """A row for each point, with the area under each method's curve."""
    table = Table(title=f"{title}: {curve.problems} problems")
    for name in ("method", "decoding", "entries, mean", "most", "accuracy", "of full", "tokens", "cut off", "AUAC"):
        table.add_column(name, justify="left" if name == "method" else "right")
    table.add_row("uncompressed", *cells(curve.full), "")
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
    for name, value in curve.text.items():
        table.add_row(name, f"{value:.4f}")
    return table
