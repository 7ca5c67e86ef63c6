"""One configuration under several methods and seeds: a table with mean and spread, and one plot."""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvrl.errors import KvrlError
from kvrl.eval.report import read_metrics, to_json, widened
from kvrl.eval.starts import START, ensure_start, finished, shares_starts, start_folder
from kvrl.train.config import Config, load_config

OUTPUT_DIR = "runs/compare"


def run_compare(args: argparse.Namespace) -> None:
    """`kvrl compare`: one run for each method and seed under output_dir/METHOD/seed-S; finished runs are not repeated.

    A warm start is made once for each seed, so that all methods start from the same model. Under LoRA each run
    makes it itself, alike for all methods by the seed: adapters do not go on from a folder.
    """
    configs = plan(args)
    base = base_of(args)
    root = Path(base.output_dir)
    from kvrl.train.output import check_output_dir, make_output_dir

    for config in configs:
        check_output_dir(config)
    make_output_dir(root)
    say = widened(Console(stderr=True))
    if shares_starts(base):
        for seed in sorted({config.seed for config in configs}):
            ensure_start(base.model_copy(update={"seed": seed}), start_folder(root, seed), say.print)
    for config in configs:
        if not finished(config):
            from kvrl.train.trainer import train

            say.rule(f"{config.method}, seed {config.seed}")
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the table's, or JSON alone
                train(config)
            if (start := Path(config.model.path) / START).is_file():
                shutil.copy(start, Path(config.output_dir) / START)
    result = collect(configs, args.methods)
    (root / "compare.json").write_text(to_json(result, indent=2))
    plot(root / "compare.png", configs, args.methods)
    if args.json:
        print(to_json(result, indent=2))
    else:
        console = widened(Console())
        console.print(table(result))
        console.print(f"plot: {root / 'compare.png'}")


def fields(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The fields given as flags. The folder is not the configuration's own, which holds one run."""
    return [("output_dir", OUTPUT_DIR), *args.overrides]


def base_of(args: argparse.Namespace) -> Config:
    """What all runs share; read under `breadcrumbs` if that is compared, as no other method may have its fields."""
    own = [("method", "breadcrumbs")] if "breadcrumbs" in args.methods else []
    return load_config(args.config, [*fields(args), *own])


def plan(args: argparse.Namespace) -> list[Config]:
    """The configuration of every run, all checked before the first starts."""
    base = base_of(args)
    check_table(base, args.methods)
    root = Path(base.output_dir)
    out = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):  # seeds first: a cut comparison is balanced
        for method in args.methods:
            own = [("method", method), ("seed", str(seed)), ("output_dir", str(root / method / f"seed-{seed}")),
                   ("overwrite_output_dir", "true")]  # fmt: skip
            if method != "breadcrumbs":  # its section has no meaning there
                own.append(("breadcrumbs", "{}"))
            if shares_starts(base):
                own += [("model.path", str(start_folder(root, seed))), ("warm_start", "null")]
            out.append(load_config(args.config, [*fields(args), *own]))
    return out


def check_table(base: Config, methods: list[str]) -> None:
    """Raise KvrlError for what the table cannot show: it has one compressed and one full decoding for each method."""
    for method in methods:
        if methods.count(method) > 1:
            raise KvrlError(f"--methods: {method} is named {methods.count(method)} times; name each method once")
    if base.eval.n == 0:
        raise KvrlError("eval.n: 0 evaluates nothing, and compare shows accuracies; raise eval.n to at least 1")
    compressed = [budget for budget in base.eval_budgets if budget != "full"]
    if len(compressed) != 1 or base.eval_budgets.count("full") != 1:
        remedy = f"eval.budgets to [{compressed[0] if compressed else base.cache.budget}, full]"
        if base.cache.is_beacon:
            remedy = "cache.params.every to one number, and leave eval.budgets out"
        raise KvrlError(
            f"eval.budgets: {base.eval_budgets} is not one compressed budget and full, which compare shows side by "
            f"side; set {remedy}"
        )


def collect(configs: list[Config], methods: list[str]) -> dict[str, Any]:
    """Accuracy of every method at the end, mean and sample standard deviation over seeds."""
    rows = []
    for method in methods:
        values: dict[str, list[float]] = {"compressed": [], "full": [], "start_compressed": [], "start_full": []}
        seeds, norms = [], []
        for config in (c for c in configs if c.method == method):
            steps, evaluations = read_metrics(Path(config.output_dir))
            seeds.append(config.seed)
            norms.append(max((s["grad_norm"] for s in steps if "grad_norm" in s), default=math.nan))
            for e in evaluations:
                kind = "full" if e["budget"] == "full" else "compressed"
                if e["step"] == config.train.max_steps:
                    values[kind].append(e["accuracy"])
                elif e["step"] == 0:
                    values[f"start_{kind}"].append(e["accuracy"])
        row: dict[str, Any] = {"method": method, "seeds": seeds, "max_grad_norm": max(norms)}
        for kind, given in values.items():
            row[f"{kind}_accuracy"] = given
            row[f"{kind}_accuracy_mean"] = statistics.mean(given)
            row[f"{kind}_accuracy_std"] = statistics.stdev(given) if len(given) > 1 else 0.0
        rows.append(row)
    return {"methods": rows}


def table(result: dict[str, Any]) -> Table:
    """Mean +- standard deviation over seeds under both decodings."""
    out = Table(title="held-out accuracy at the end, mean ± standard deviation over seeds")
    for name in ("method", "seeds", "compressed decoding", "full-cache decoding"):
        out.add_column(name)
    first = result["methods"][0]
    out.add_row(
        "(start)", "", f"{first['start_compressed_accuracy_mean']:.3f}", f"{first['start_full_accuracy_mean']:.3f}"
    )
    for row in result["methods"]:
        cells = [f"{row[f'{k}_accuracy_mean']:.3f} ± {row[f'{k}_accuracy_std']:.3f}" for k in ("compressed", "full")]
        out.add_row(row["method"], str(len(row["seeds"])), *cells)
    return out


def plot(path: Path, configs: list[Config], methods: list[str]) -> None:
    """The figure of all methods, from their runs' metrics."""
    from kvrl.eval import outcome_plot

    lines = []
    for method in methods:
        mine = [config for config in configs if config.method == method]
        runs = [read_metrics(Path(config.output_dir)) for config in mine]
        ends: dict[str, list[float]] = {"compressed": [], "full": []}
        for config, (_, evaluations) in zip(mine, runs, strict=True):
            for e in evaluations:
                if e["step"] == config.train.max_steps:
                    ends["full" if e["budget"] == "full" else "compressed"].append(e["accuracy"])
        rewards = [[s["reward"] for s in steps] for steps, _ in runs]
        lines.append(outcome_plot.Line(method, rewards, **ends, full_cache_rollouts=mine[0].rollout_cache.is_dense))
    outcome_plot.plot(path, lines)
