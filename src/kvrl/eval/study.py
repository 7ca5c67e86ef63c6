"""A study: variants of one configuration, each tuned on its own seeds and then run on the seeds that are reported.

Every run is a process of its own with its configuration beside it, and a finished one is not repeated: a study that
was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvrl.errors import KvrlError
from kvrl.eval.curve import TRUNCATED
from kvrl.eval.curve_command import FIRST
from kvrl.eval.report import read_metrics
from kvrl.eval.run_defaults import check_start, taught_by_start, teacher_of, uncompressed_of
from kvrl.eval.starts import START, ensure_start, finished, shares_starts, start_folder
from kvrl.eval.study_file import CurveSettings, Score, Study, Values
from kvrl.quiet import quiet_models
from kvrl.train.config import Config, load_config
from kvrl.train.config_file import read_config


@dataclass(frozen=True)
class Outcome:
    """A finished run. Compressed: the mean over the windows, where it has beacons."""

    compressed: float
    full: float
    start_compressed: float
    start_full: float
    steps: list[dict]
    decoded: dict[str, float] = field(default_factory=dict)
    curve: dict[str, Any] | None = None
    """What `kvrl eval --curve` printed."""

    def score(self, kind: Score) -> float:
        """What tuning maximises."""
        return {"compressed": self.compressed, "full": self.full, "mean": (self.compressed + self.full) / 2}[kind]


@dataclass(frozen=True)
class Tried:
    """One setting in a variant's tuning."""

    values: Values
    score: float


def run_study(args: argparse.Namespace) -> None:
    """`kvrl study`: run what is missing, then write study.json, table.md and plot.png to the study's folder."""
    from kvrl.eval.study_report import publish, write_study
    from kvrl.train.output import make_output_dir

    runners = []
    for path in map(Path, args.studies):
        try:
            study = read_config(Study, path)
        except KvrlError as error:
            text = str(error)
            raise KvrlError(text if text.startswith(f"{path}:") else f"{path}: {text}") from None
        runners.append(Runner(study, path, Path(args.output_dir), args.jobs, Console(stderr=True)))
        runners[-1].check()
    if args.report is not None:
        prepare_report(Path(args.report), [runner.folder.name for runner in runners])
    make_output_dir(Path(args.output_dir), "--output_dir")
    for runner in runners:
        say = Console(stderr=args.json)
        write_study(runner.folder, runner.study, runner.run(), say.print)
        if args.report is not None:
            publish(Path(args.report), runner.folder)
        if args.json:
            print((runner.folder / "study.json").read_text())


def prepare_report(report: Path, names: list[str]) -> None:
    """Make the page with the studies' markers if there is none. KvrlError if it cannot be written or lacks them."""
    from kvrl.eval.study_report import find_place, markers

    try:
        if not report.exists():
            places = "\n".join(f"{begin}\n{end}\n" for begin, end in map(markers, names))
            report.write_text(f"# Results\n\n{places}")
        text = report.read_text()
        report.open("a").close()
    except OSError as error:
        raise KvrlError(f"--report: {report} cannot be written ({error.strerror}); give the path of a file") from None
    for name in names:
        find_place(report, text, name)


class Runner:
    """Runs of a study, at most `jobs` at once."""

    def __init__(self, study: Study, path: Path, root: Path, jobs: int, console: Console) -> None:
        self.study, self.path, self.root, self.jobs, self.console = study, path, root, jobs, console
        self.folder = root / path.stem
        self.base = str(path.parent / study.base)

    def run(self) -> dict[str, dict[str, Any]]:
        """variant -> {values, tried, outcomes: seed -> Outcome}."""
        self.make_starts([*(self.study.tuning.seeds if self.study.tuning is not None else ()), *self.study.seeds])
        chosen, tried = self.tune()
        everything = [(name, chosen[name], seed) for seed in self.study.seeds for name in self.study.variants]
        outcomes = dict(zip([(n, s) for n, _, s in everything], self.all(everything), strict=True))
        return {
            name: {
                "values": chosen[name], "tried": tried[name],
                "outcomes": {seed: outcomes[name, seed] for seed in self.study.seeds},
            }
            for name in self.study.variants
        }  # fmt: skip

    def tune(self) -> tuple[dict[str, Values], dict[str, list[Tried]]]:
        """Every variant's best value of one field after the other, the others being the best so far or their first.

        A turn is one field of each variant: their runs go on at once.
        """
        tuning, variants = self.study.tuning, self.study.variants
        best: dict[str, Values] = {
            name: {key: values[0] for key, values in variant.grid.items()} for name, variant in variants.items()
        }
        tried: dict[str, list[Tried]] = {name: [] for name in variants}
        if tuning is None:
            return best, tried
        fields = {name: [*{**tuning.grid, **variant.grid}.items()] for name, variant in variants.items()}
        for turn in range(max(map(len, fields.values()))):
            turns = {name: own[turn] for name, own in fields.items() if turn < len(own)}
            asked = [(name, {**best[name], key: value}) for name, (key, values) in turns.items() for value in values]
            runs = [(name, setting, seed) for name, setting in asked for seed in tuning.seeds]
            scores = iter([outcome.score(tuning.score) for outcome in self.all(runs)])
            for name, setting in asked:
                tried[name].append(Tried(setting, statistics.mean(next(scores) for _ in tuning.seeds)))
            for name, (_, values) in turns.items():
                best[name] = max(tried[name][-len(values) :], key=lambda t: t.score).values
        return best, tried

    def all(self, runs: Iterable[tuple[str, Values, int]]) -> list[Outcome]:
        """Outcomes of (variant, values, seed), in order. A run that fails ends the study when those under way end."""
        given = list(runs)
        configs = [self.config(*run) for run in given]
        futures: dict[int, Future[Outcome]] = {}
        trained: dict[tuple[str, int], Future[Outcome]] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            for i in sorted(range(len(given)), key=lambda i: self.depth(given[i][0])):  # what others start from first
                name, _, seed = given[i]
                variant = self.study.variants[name]
                origin = None if variant.start is None else trained[variant.start, seed]
                futures[i] = pool.submit(self.outcome, configs[i], variant.curve, origin)
                trained[name, seed] = futures[i]
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            pool.shutdown(wait=False, cancel_futures=True)
            for future in done:
                future.result()
        return [futures[i].result() for i in range(len(given))]

    def depth(self, name: str) -> int:
        """How many variants must be trained before this one."""
        origin = self.study.variants[name].start
        return 0 if origin is None else 1 + self.depth(origin)

    def config(self, name: str, values: Values, seed: int) -> Config:
        """The configuration of one run; its folder's name tells its settings apart."""
        given = {**self.study.overrides, **self.study.variants[name].overrides, **values}
        digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:8]
        own = {"seed": seed, "output_dir": str(self.folder / name / f"{digest}-seed-{seed}"),
               "overwrite_output_dir": True}  # fmt: skip
        base = self.load({**self.study.overrides, "seed": seed})
        if shares_starts(base):
            own |= {"model.path": str(self.start_of(base)), "warm_start": None}
        if (origin := self.study.variants[name].start) is not None:
            trained = Path(self.config(origin, {}, seed).output_dir) / "model"
            own |= {"model.path": str(trained), "warm_start": None}
        try:
            return self.load({**given, **own})
        except KvrlError as error:
            raise KvrlError(f"{self.path}, variant {name}: {error}") from None

    def load(self, values: Values) -> Config:
        """The base with these fields."""
        return load_config(self.base, [(key, json.dumps(value)) for key, value in values.items()])

    def start_of(self, base: Config) -> Path:
        """Starts are shared by all studies whose runs begin alike."""
        fields = base.model_dump_json(include={"model", "task", "warm_start"})
        return start_folder(self.root / "starts" / hashlib.sha256(fields.encode()).hexdigest()[:8], base.seed)

    def make_starts(self, seeds: Iterable[int]) -> None:
        """Make the starts that are missing, each in a process of its own."""
        bases = [self.load({**self.study.overrides, "seed": seed}) for seed in seeds]
        bases = [base for base in bases if shares_starts(base)]
        if not bases:
            return
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.jobs, spawn, initializer=quiet_models) as pool:
            made = [pool.submit(ensure_start, base, self.start_of(base), partial(say, base.seed)) for base in bases]
            for start in made:
                start.result()

    def check(self) -> None:
        """Raise KvrlError for a setting that cannot run, before anything does."""
        tuning = self.study.tuning
        self.check_starts()
        for name, variant in self.study.variants.items():
            if variant.grid and tuning is None:
                raise KvrlError(f"variants.{name}.grid: is set and the study has no tuning; add tuning with its seeds")
            common = {} if tuning is None else tuning.grid
            for key, values in {**common, **variant.grid}.items():
                for value in values:
                    self.check_measures(name, {key: value})
            self.check_measures(name, {})
        for name, seeds in (("seeds", self.study.seeds), ("tuning.seeds", [] if tuning is None else tuning.seeds)):
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise KvrlError(f"{name}: {twice[0]} is named twice; name each seed once")
        if tuning is not None and (both := set(tuning.seeds) & set(self.study.seeds)):
            raise KvrlError(f"tuning.seeds: {min(both)} is also reported; tune on seeds that are not")

    def check_starts(self) -> None:
        """Raise KvrlError for a start that is no earlier variant, or whose settings would depend on tuning."""
        earlier: list[str] = []
        for name, variant in self.study.variants.items():
            if variant.start is not None and self.study.tuning is not None:
                raise KvrlError(f"variants.{name}.start: is set and the study tunes; leave one of the two out")
            if variant.start is not None and variant.start not in earlier:
                raise KvrlError(
                    f"variants.{name}.start: {variant.start} is none of the variants before it "
                    f"({', '.join(earlier) or 'there is none'}); name one of them"
                )
            earlier.append(name)

    def check_measures(self, name: str, values: Values) -> None:
        """Raise KvrlError for a run that the tables cannot show."""
        config = self.config(name, values, self.study.seeds[0])
        self.check_budgets(config)
        run = config.model_dump()
        if self.study.curve is not None and self.study.variants[name].curve and taught_by_start(run):
            check_start(run, f"variants.{name}.curve", "set curve to false for it")

    def check_budgets(self, config: Config) -> None:
        """A study's table has one compressed decoding, or those of beacons, and a full one for each run."""
        compressed = [budget for budget in config.eval_budgets if budget != "full"]
        several = len(compressed) > 1 and not config.cache.is_beacon
        if several or not compressed or "full" not in config.eval_budgets or config.eval.n == 0:
            raise KvrlError(
                f"eval.budgets: {config.eval_budgets} with eval.n {config.eval.n} is not one compressed budget and "
                "full; set eval.budgets to such a pair, and eval.n above 0"
            )

    def outcome(self, config: Config, curve: bool = True, origin: Future[Outcome] | None = None) -> Outcome:
        """Train unless it was done, evaluate under the study's decodings, and read what came out.

        origin: the run whose model this one starts from.
        """
        if origin is not None:
            origin.result()
        folder = Path(config.output_dir)
        if not finished(config):
            self.console.print(f"run {folder.relative_to(self.root)}")
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.json"):  # what was measured of another model
                old.unlink()
            given = config.model_dump(mode="json", exclude={"sampling": {"num_generations"}})
            (folder / "given.json").write_text(json.dumps(given, indent=2))
            self.kvrl(folder / "log.txt", "train", str(folder / "given.json"))
            if (start := Path(config.model.path) / START).is_file():
                shutil.copy(start, folder / START)
            (folder / "model" / START).write_text(json.dumps({"id": uuid.uuid4().hex}))  # for variants that start here
        steps, evaluations = read_metrics(folder)

        def at(step: int, full: bool) -> float:
            found = [e for e in evaluations if e["step"] == step and (e["budget"] == "full") == full]
            return statistics.mean(e["accuracy"] for e in found)

        end = config.train.max_steps
        return Outcome(
            compressed=at(end, False), full=at(end, True), start_compressed=at(0, False), start_full=at(0, True),
            steps=steps, decoded={name: self.decode(config, name) for name in self.study.decodings},
            curve=self.curve(config) if curve and self.study.curve is not None and config.cache.is_beacon else None,
        )  # fmt: skip

    def curve(self, config: Config) -> dict[str, Any]:
        """Accuracy against cache size of a trained model."""
        folder, settings = Path(config.output_dir), self.study.curve
        assert settings is not None
        file, model = folder / "curve.json", str(folder / "model")
        if not (file.is_file() and is_curve_of(json.loads(file.read_text()), settings, model)):
            flags = ["--baselines", ",".join(settings.baselines), "--n", str(config.eval.n), "--seed",
                     str(config.eval.seed), *(["--protect_prompt"] if settings.protect_prompt else []),
                     "--output", str(folder / "curve.png")]  # fmt: skip
            file.write_text(self.kvrl(folder / "log.txt", "eval", model, "--curve", *flags, "--json"))
        return json.loads(file.read_text())

    def decode(self, config: Config, name: str) -> float:
        """Accuracy of a trained model under one of the study's decodings."""
        folder, decoding = Path(config.output_dir), self.study.decodings[name]
        file = folder / f"decoded-{name}.json"
        cache: dict[str, Any] = config.cache.model_dump(exclude={"policy", "params"}) | decoding.params
        flags = {k: cache[k] for k in ("buffer", "window", "sinks") if cache[k] is not None}
        flags |= {"policy": decoding.policy, "budgets": "full" if decoding.policy == "dense" else cache["budget"],
                  "task": config.task.name, "task_params": json.dumps(config.task.params), "n": config.eval.n,
                  "seed": config.eval.seed, "temperature": config.sampling.temperature,
                  "max_completion_length": config.sampling.max_completion_length}  # fmt: skip
        found = json.loads(file.read_text()) if file.is_file() else {}
        if found.get("flags") != flags:
            listed = [text for key, value in flags.items() for text in (f"--{key}", str(value))]
            printed = self.kvrl(folder / "log.txt", "eval", str(folder / "model"), *listed, "--json")
            found = {"flags": flags, **json.loads(printed)}
            file.write_text(json.dumps(found, indent=2))
        return found["results"][0]["accuracy"]

    def kvrl(self, log: Path, *arguments: str) -> str:
        """One kvrl command in a process of its own, on one core; its stdout. KvrlError if it fails."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "kvrl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        with log.open("a") as file:
            file.write(done.stdout + done.stderr)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise KvrlError(f"study: `kvrl {' '.join(arguments[:2])}` failed ({last}); {log} has its output")
        return done.stdout


def is_curve_of(curve: dict[str, Any], settings: CurveSettings, model: str) -> bool:
    """Whether a curve of the model was measured under these settings, beside the uncompressed policy that is right."""
    # what an older file does not say was the teacher beside the model, else the model
    beside = curve.get("uncompressed", teacher_of(model) or model)
    return (
        curve["methods"].keys() - {FIRST, TRUNCATED} == set(settings.baselines)
        and curve["protect_prompt"] == settings.protect_prompt
        and beside == uncompressed_of(model)
    )


def say(seed: int, text: str) -> None:
    """Progress of a start, which is no result."""
    print(f"seed {seed}: {text}", file=sys.stderr)
