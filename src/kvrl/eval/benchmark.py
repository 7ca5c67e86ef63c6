"""Benchmarks of several sets: `math7`, the seven sets of mathematics that Sparse-RL reports (arXiv 2601.10079)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import Evaluation, evaluate, idle_budgets, points, teacher_for
from kvrl.eval.models import load
from kvrl.eval.report import decoding_name, to_json
from kvrl.sampler.config import SamplingConfig
from kvrl.tasks import get_task
from kvrl.tasks.files import FileTask
from kvrl.tasks.math import MathProblems, math_scorer
from kvrl.tasks.source import FILES
from kvrl.train.config import RolloutSettings


class Fields(NamedTuple):
    """What messages call the benchmark and the folder of its files."""

    name: str
    folder: str


FLAGS = Fields("--benchmark", "--data_dir")


@dataclass(frozen=True)
class BenchmarkSet:
    """A set: the task that reads it, from a file by one of its names or from the hub."""

    name: str
    task: str = "math"
    params: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task for the file as it is passed on."""
    hub: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task for the hub's version."""
    aliases: tuple[str, ...] = ()
    """Other names that its file goes by."""

    def find(self, folder: Path, field: str) -> Path:
        """Its file in a folder: NAME_test or NAME, as .jsonl, .json or .parquet. KvrlError if there is none."""
        stems = [stem for name in (self.name, *self.aliases) for stem in (f"{name}_test", name)]
        for stem in stems:
            for suffix in FILES:
                if (folder / f"{stem}{suffix}").is_file():
                    return folder / f"{stem}{suffix}"
        names = ", ".join(f"{stem}.jsonl" for stem in stems)
        raise KvrlError(f"{field}: {folder} has no file of {self.name} ({names}); add it, or leave {field} out")

    def make_task(self, folder: Path | None, task_params: dict[str, Any], fields: Fields) -> MathProblems:
        """The task whose eval rows are the set. task_params: further parameters, such as the template."""
        source = self.hub if folder is None else {**self.params, "eval_path": str(self.find(folder, fields.folder))}
        task = get_task(self.task, **source, **task_params)
        assert isinstance(task, MathProblems)
        return task


QUESTION = {"problem": "question"}

# Two rows of gaokao2023en have their answer in the question and none beside it: they are left out.
BENCHMARKS: dict[str, list[BenchmarkSet]] = {
    "math7": [
        BenchmarkSet("gsm8k", "gsm8k"),
        BenchmarkSet("math500", hub={"eval_path": "HuggingFaceH4/MATH-500"}),
        BenchmarkSet(
            "gaokao2023en",
            params={"columns": QUESTION, "on_missing_answer": "drop"},
            hub={
                "eval_path": "MARIO-Math-Reasoning/Gaokao2023-Math-En",
                "eval_split": "train",
                "columns": QUESTION,
                "on_missing_answer": "drop",
            },
        ),
        BenchmarkSet(
            "minerva", hub={"eval_path": "math-ai/minervamath", "columns": QUESTION}, aliases=("minerva_math",)
        ),
        BenchmarkSet(
            "olympiadbench",
            params={"columns": {**QUESTION, "answer": "final_answer"}},
            hub={"eval_path": "math-ai/olympiadbench", "columns": {**QUESTION, "answer": "final_answer"}},
        ),
        BenchmarkSet("aime24", hub={"eval_path": "HuggingFaceH4/aime_2024", "eval_split": "train"}),
        BenchmarkSet("amc23", hub={"eval_path": "math-ai/amc23", "columns": QUESTION}),
    ],
}


@dataclass(frozen=True)
class SetResult:
    """A set's evaluation under every budget, on `problems` of its problems."""

    name: str
    problems: int
    evaluations: list[Evaluation]


def evaluate_sets(
    model: torch.nn.Module,
    tokenizer: Any,
    sets: Sequence[tuple[str, MathProblems]],
    *,
    cache: CacheConfig,
    budgets: Sequence[int | str],
    sampling: SamplingConfig,
    n: int | None,
    seed: int,
    slots: int,
    say: Any = print,
    teacher: torch.nn.Module | None = None,
    rollout: RolloutSettings | None = None,
) -> list[SetResult]:
    """One set after the other, `n` problems of each at most (None: all), drawn by the seed.

    teacher, rollout: see `evaluate`.
    """
    results = []
    for name, task in sets:
        problems = len(task.eval_rows) if n is None else min(n, len(task.eval_rows))
        evaluations = evaluate(
            model, tokenizer, task, cache=cache, budgets=budgets, sampling=sampling, n=problems, seed=seed,
            slots=slots, teacher=teacher, rollout=rollout,
        )  # fmt: skip
        results.append(SetResult(name, problems, evaluations))
        accuracies = ", ".join(f"{e.budget} {e.accuracy:.3f}" for e in evaluations)
        say(f"{name}: {problems} problems, {accuracies}")
        if (warning := idle_budgets(evaluations)) is not None:
            say(warning)
    return results


def means(results: Sequence[SetResult]) -> dict[str, float]:
    """For each budget the mean of the sets' accuracies, every set counted alike, as the paper does."""
    by_budget = zip(*(r.evaluations for r in results), strict=True)
    return {column[0].budget: sum(e.accuracy for e in column) / len(column) for column in by_budget}


def benchmark_table(results: Sequence[SetResult], title: str) -> Table:
    """A row for each set and one for their mean, a column for each budget."""
    table = Table(title=title)
    table.add_column("set")
    table.add_column("problems", justify="right")
    for budget in means(results):
        table.add_column(budget if budget == "full" else decoding_name(budget), justify="right")
    for r in results:
        table.add_row(r.name, str(r.problems), *(f"{e.accuracy:.3f}" for e in r.evaluations))
    table.add_section()
    table.add_row("mean", "", *(f"{mean:.3f}" for mean in means(results).values()))
    return table


def as_json(results: Sequence[SetResult]) -> dict[str, Any]:
    """The sets' evaluations, and their mean for each budget."""
    sets = {r.name: {"problems": r.problems, "results": [asdict(e) for e in r.evaluations]} for r in results}
    return {"sets": sets, "mean": means(results)}


def load_sets(
    name: str, data_dir: str | None, task_params: dict[str, Any], *, fields: Fields = FLAGS
) -> list[tuple[str, MathProblems]]:
    """The tasks of a benchmark with their rows read, so that a missing file is told before a model is loaded.

    fields: what messages call name and folder.
    """
    if name not in BENCHMARKS:
        raise KvrlError(f"{fields.name}: {name} is not one of {', '.join(BENCHMARKS)}; choose one of them")
    folder = None if data_dir is None else Path(data_dir)
    if folder is not None and not folder.is_dir():
        raise KvrlError(f"{fields.folder}: {folder} is not a folder; give the folder of the files, or leave it out")
    own = {*FileTask.model_fields, *(param for one in BENCHMARKS[name] for param in (*one.params, *one.hub))}
    for param in task_params:
        if param in own:
            raise KvrlError(f"task.params.{param}: benchmark {name} says itself what its sets are; leave it out")
    sets = [(one.name, one.make_task(folder, task_params, fields)) for one in BENCHMARKS[name]]
    for _, task in sets:
        assert task.eval_rows
    return sets


def run_benchmark(
    args: argparse.Namespace, cache: CacheConfig, sampling: SamplingConfig, sets: Sequence[tuple[str, MathProblems]]
) -> None:
    """`kvrl eval MODEL --benchmark NAME`."""
    math_scorer()  # a missing package is told now
    model, tokenizer = load(args.model, args.dtype, "MODEL")
    teacher = teacher_for(args, cache, tokenizer)
    with torch.no_grad():
        results = evaluate_sets(
            model, tokenizer, sets, cache=cache, budgets=points(args.budgets, cache, model), sampling=sampling,
            n=args.n, seed=args.seed, slots=args.slots or 128, say=Console(stderr=True, highlight=False).print,
            teacher=teacher,
        )  # fmt: skip
    if args.json:
        about = {"model": args.model, "benchmark": args.benchmark, "policy": args.policy}
        print(to_json(about | as_json(results), indent=2))
    else:
        Console().print(benchmark_table(results, f"{args.model} on {args.benchmark}, policy {args.policy}"))
