"""The `kvrl` command: flags in, one call of the library, exit code out.

Exit codes: 0 done, 1 a bar of `parity` missed, 2 a mistake of the user's (one line on stderr), 130
interrupted. Each subcommand imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from kvrl import __version__
from kvrl.arguments import (
    METHODS,
    natural,
    parse_budgets,
    parse_bytes,
    parse_lengths,
    parse_methods,
    parse_names,
    parse_schedule,
    positive,
    yaml_mapping,
)
from kvrl.bench.peers import PEERS_OF
from kvrl.errors import KvrlError

DTYPES = ("float32", "bfloat16")

# What is not a field of the configuration
TRAIN_FLAGS = {"--help"}
COMPARE_FLAGS = {"--help", "--methods", "--seeds", "--first_seed", "--json"}
COMPARE_GRID = {
    "seed": "--seeds NUMBER or --first_seed SEED",
    "method": "--methods NAME,NAME",
    "overwrite_output_dir": "--output_dir FOLDER",
}
PLAN_FLAGS = {"--help", "--memory", "--prompt_length", "--json"}


class _Parser(argparse.ArgumentParser):
    """Mistakes become KvrlError, so that a wrong flag reads like a wrong field."""

    def error(self, message: str) -> NoReturn:
        raise KvrlError(f"{message}; see `{self.prog} --help`")


class _Help(argparse.HelpFormatter):
    """Each flag with its default, where it has one and its text does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if not action.option_strings or default is None or isinstance(default, bool | dict) or "default" in text:
            return text
        if default == argparse.SUPPRESS:
            return text
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        return f"{text} (default {shown})".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        if args.command != "policies":
            from kvrl.quiet import quiet_models

            quiet_models()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = args.run(args)
    except KvrlError as error:
        print(f"kvrl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvrl: interrupted", file=sys.stderr)
        return 130
    return code or 0


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of kvrl's own is a line without file and code; others stay as Python writes them."""
    own = Path(filename).is_relative_to(Path(__file__).parent)
    text = f"kvrl: warning: {' '.join(str(message).split())}\n"
    (file or sys.stderr).write(text if own else warnings.formatwarning(message, category, filename, lineno, line))


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; the parsed `run` attribute is the subcommand's function."""
    parser = _Parser(prog="kvrl", description="Reinforcement learning with rollouts in a fixed KV-cache budget.")
    parser.add_argument("--version", action="version", version=f"kvrl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    _add_train(commands)
    _add_eval(commands)
    _add_parity(commands)
    _add_compare(commands)
    _add_study(commands)
    _add_variance(commands)
    _add_plan(commands)
    _add_bench(commands)
    _command(commands, "policies", _policies, "list the eviction policies with papers and parameters")
    fetch = _command(commands, "fetch", _fetch, "get a model into the user's cache and print its folder")
    fetch.add_argument("name", metavar="NAME", help="smollm2-135m")
    return parser


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = build_parser()
    flags = {"train": TRAIN_FLAGS, "compare": COMPARE_FLAGS, "plan": PLAN_FLAGS}
    own = flags.get(arguments[0]) if arguments else None
    if own is None:
        return parser.parse_args(arguments)
    rest, overrides = split_overrides(arguments, own)
    args = parser.parse_args(rest)
    args.overrides = overrides
    if args.command == "compare":
        _refuse_grid(overrides)
    return args


def _refuse_grid(overrides: list[tuple[str, str]]) -> None:
    """Raise KvrlError for a field that the grid itself sets."""
    for name, value in overrides:
        if name in COMPARE_GRID:
            raise KvrlError(f"--{name}: {value} would be overridden, as compare sets {name} for each run; did you mean "
                            f"{COMPARE_GRID[name]}?")  # fmt: skip


def split_overrides(arguments: Sequence[str], own: set[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Part `--section.field value` (or `=value`) from the command's `own` flags, in any order."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    items = iter(arguments)
    for item in items:
        name, equals, value = item.partition("=")
        if not name.startswith("--") or name in own:
            rest.append(item)
            continue
        if not equals:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise KvrlError(f"{name}: has no value; write {name} VALUE")
            value = following
        overrides.append((name[2:], value))
    return rest, overrides


def _command(commands: argparse._SubParsersAction, name: str, run, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False, formatter_class=_Help)
    parser.set_defaults(run=run)
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    text = "train as CONFIG says; any field can be given as a flag: --section.field VALUE, --output_dir FOLDER"
    parser = _command(commands, "train", _train, text)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")


def _add_eval(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "eval", _eval,
        "accuracy and KV bytes of a model under several cache budgets. The model of a run (runs/NAME/model) is "
        "evaluated with the run's task, cache and sampling, where no flag says otherwise",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="a model folder, a fetched name, or a hub name")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--task", help="a name of the task registry (default: the run's)")
    what.add_argument("--benchmark", help="math7: seven sets of mathematics, accuracy of each and their mean")
    parser.add_argument("--data_dir", default=None, help="the benchmark's files (default: the hub)")
    text = "e.g. '{max_steps: 20}' (default: the run's, if it has the same task)"
    parser.add_argument("--task_params", type=yaml_mapping, default=None, metavar="YAML", help=text)
    parser.add_argument("--budgets", type=parse_budgets, default=None, help="e.g. 24,32,48,full (default full)")
    _add_every(parser, "the model's own")
    text = "policy beacon: tokens of the first window, the second and so on, the last for the rest, e.g. 2,2,8"
    parser.add_argument("--schedule", type=parse_schedule, default=None, help=text)
    _add_cache_flags(parser, policy=None, of_run="the run's, else ")
    text = "held-out problems (default 256), or most of each set of a benchmark (default all)"
    parser.add_argument("--n", type=positive, default=None, help=text)
    parser.add_argument("--temperature", type=float, default=None, help="0 is greedy (default: the run's, else 1.0)")
    text = "most tokens of a completion (default: the run's, else 256)"
    parser.add_argument("--max_completion_length", type=positive, default=None, help=text)
    text = "sequences decoded at once (default: at most 128)"
    parser.add_argument("--slots", type=positive, default=None, help=text)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model")
    _add_curve(parser)
    _add_common(parser)


def _add_curve(parser: argparse.ArgumentParser) -> None:
    curve = parser.add_argument_group("accuracy against cache size")
    text = "beacons at each window beside policies at matching sizes: a curve of each, and accuracies at a fixed memory"
    curve.add_argument("--curve", action="store_true", help=text)
    text = "the uncompressed policy, on which the baselines run (default: MODEL, or what taught it in its run)"
    curve.add_argument("--teacher", default=None, metavar="FOLDER", help=text)
    text = "further models with beacons; those of one name are one curve"
    curve.add_argument("--others", nargs="+", default=None, metavar="NAME=FOLDER", help=text)
    text = "policies to compare with, one entry evicted at a time unless --buffer says otherwise (default "
    text += "tova,streaming,rkv,snapkv)"
    curve.add_argument("--baselines", type=parse_names, default=None, metavar="NAMES", help=text)
    curve.add_argument("--protect_prompt", action="store_true", help="let the baselines keep the prompt, as beacons do")
    text = "entries that may be held at most (default: what each window of MODEL held)"
    curve.add_argument("--limits", type=parse_lengths, default=None, help=text)
    curve.add_argument("--output", default=None, metavar="FILE.png", help="the figure")


def _add_parity(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "parity", _parity, "sample, replay, and print how far the log-probs are apart")
    parser.add_argument("--model", default="tiny", help="tiny, tiny:FAMILY, smollm2-135m, or a model folder")
    _add_cache_flags(parser, policy="all")
    parser.add_argument("--budget", type=positive, default=None, help="default: by model")
    _add_every(parser, "1, 3, 5, or the model's own")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model")
    parser.add_argument("--prompts", type=positive, default=None, help="default: by model")
    parser.add_argument("--max_completion_length", type=positive, default=None, help="default: by model")
    _add_common(parser)


def _add_compare(commands: argparse._SubParsersAction) -> None:
    text = "train CONFIG under each method and seed: table and plot. Fields can be flags, as in train"
    parser = _command(commands, "compare", _compare, text)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument(
        "--methods",
        type=parse_methods,
        default=["dense", "naive", "corrected", "shadow_mask"],
        help="of " + ",".join(METHODS),
    )
    parser.add_argument("--seeds", type=positive, default=3, help="how many seeds for each method")
    parser.add_argument("--first_seed", type=natural, default=0, help="seeds are first_seed, first_seed + 1, ...")
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")


def _add_study(commands: argparse._SubParsersAction) -> None:
    text = "tune and run the variants of study files, on all cores: tables with intervals, plots, and a page of results"
    parser = _command(commands, "study", _study, text)
    parser.add_argument("studies", metavar="STUDY", nargs="+", help="a YAML file, see examples/results")
    parser.add_argument("--output_dir", default="runs/results", metavar="FOLDER", help="runs, tables and plots")
    parser.add_argument("--jobs", type=positive, default=2, help="runs at once, each on one core")
    parser.add_argument(
        "--report",
        default=None,
        metavar="FILE.md",
        help="a page that takes the tables in, and the files that it links to",
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")


def _add_variance(commands: argparse._SubParsersAction) -> None:
    text = "the spread of the sequence log-ratio against length, for a dense learner and for replay: table and plot"
    parser = _command(commands, "variance", _variance, text)
    parser.add_argument("--model", default="tiny", help="tiny, tiny:FAMILY, smollm2-135m, or a model folder")
    parser.add_argument("--lengths", type=parse_lengths, default=[64, 128, 256, 512, 1024], help="e.g. 64,128,256")
    _add_cache_flags(parser, policy="rkv")
    parser.add_argument("--budget", type=positive, default=None, help="default: by model")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model")
    parser.add_argument("--n", type=positive, default=32, metavar="SAMPLES", help="sequences")
    parser.add_argument("--task", default=None, help="take the prompts from this task (for a trained model folder)")
    parser.add_argument("--task_params", type=yaml_mapping, default={}, metavar="YAML", help="e.g. '{max_steps: 20}'")
    parser.add_argument("--output", default="variance.png", metavar="FILE.png")
    _add_common(parser)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    text = "the memory that CONFIG needs, and how many sequences fit. Fields can be flags, as in train"
    parser = _command(commands, "plan", _plan, text)
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("--memory", type=parse_bytes, default=None, help="of the device, e.g. 24GiB")
    parser.add_argument("--prompt_length", type=positive, default=None, help="tokens of the longest prompt")
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")


def _add_bench(commands: argparse._SubParsersAction) -> None:
    text = "measure speed and memory on this machine, beside other libraries where asked for"
    parser = _command(commands, "bench", _bench, text)
    kinds = parser.add_subparsers(title="benchmarks", metavar="WHAT", dest="what", required=True)
    rollout = _bench_command(kinds, "rollout", "decoded tokens per second at equal KV memory, by length")
    rollout.add_argument("--kv_memory", type=parse_bytes, default=None, help="for K and V (default 2GiB)")
    text = "lengths at which speed is measured (default 64,1000,2000,4000,6000,8000)"
    rollout.add_argument("--contexts", type=parse_lengths, default=None, help=text)
    text = "of each sequence at equal memory (default 8000)"
    rollout.add_argument("--new_tokens", type=positive, default=None, help=text)
    text = "sequences of a full cache: as many as fit at the run's end, or anew at each context (default end)"
    rollout.add_argument("--fit", choices=("end", "each"), default=None, help=text)
    learner = _bench_command(kinds, "learner", "forward and backward under the trace and in the dense view, by length")
    learner.add_argument("--lengths", type=parse_lengths, default=None, help="default 2048,4096,8192")
    step = _bench_command(kinds, "step", "one GRPO step")
    step.add_argument("--completions", type=positive, default=None, help="of one step, 8 to a prompt (default 32)")
    step.add_argument("--completion_length", type=positive, default=None, help="tokens of each (default 1024)")
    memory = _bench_command(kinds, "memory", "KV bytes and peak memory of rollouts, bytes and time of the trace")
    memory.add_argument("--tokens", type=positive, default=None, help="of each sequence (default 8192)")
    memory.add_argument("--slots", type=positive, default=None, help="sequences (default 8)")
    for parser in (learner, step):
        text = "recompute activations in the backward pass"
        parser.add_argument("--gradient_checkpointing", action="store_true", default=None, help=text)


def _bench_command(kinds: argparse._SubParsersAction, name: str, text: str) -> argparse.ArgumentParser:
    parser = _command(kinds, name, _bench, text)
    parser.add_argument("--model", default=None, help="tiny, smollm2-135m, or a model folder (default smollm2-135m)")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="of the model (default bfloat16)")
    parser.add_argument("--threads", type=positive, default=None, help="arithmetic threads (default PyTorch's)")
    parser.add_argument("--policy", default=None, help="see `kvrl policies` (default rkv)")
    parser.add_argument("--budget", type=positive, default=None, help="KV entries kept (default 512)")
    text = "new entries between two compactions (default 128)"
    parser.add_argument("--buffer", type=positive, default=None, help=text)
    text = f"measurements whose median counts (default {1 if name in ('step', 'memory') else 3})"
    parser.add_argument("--repeats", type=positive, default=None, help=text)
    if name in ("rollout", "step"):
        text = f"measure other libraries too, by default all of {','.join(PEERS_OF[name])} (see benchmarks/peers)"
        parser.add_argument("--peers", nargs="?", const="all", default=None, metavar="NAMES", help=text)
    parser.add_argument("--quick", action="store_true", help="everything small: shows that it runs, in seconds")
    parser.add_argument("--seed", type=natural, default=None, help="of prompts and sampling (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")
    return parser


def _add_cache_flags(parser: argparse.ArgumentParser, policy: str | None, of_run: str = "") -> None:
    shown = policy or f"{of_run}rkv"
    parser.add_argument("--policy", default=policy, help=f"see `kvrl policies` (default {shown})")
    buffer = f"{of_run}128" if of_run else "128, and by model for tiny ones"
    text = f"new entries between two compactions, which run when budget + buffer are held (default: {buffer})"
    parser.add_argument("--buffer", type=positive, default=None, help=text)
    text = f"newest entries that always stay (default: {of_run}the policy's)"
    parser.add_argument("--window", type=natural, default=None, help=text)
    parser.add_argument("--sinks", type=natural, default=None, help=text.replace("newest", "first"))


def _add_every(parser: argparse.ArgumentParser, default: str) -> None:
    text = f"policy beacon: tokens that a beacon stands for, e.g. 2,4,8 (default: {default})"
    parser.add_argument("--every", type=parse_lengths, default=None, help=text)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=natural, default=0, help="of the problems and of the sampling")
    parser.add_argument("--json", action="store_true", help="print JSON alone on stdout")


FLAG_OF_FIELD = {
    r"cache\.(policy|buffer|window|sinks)\b": r"--\1",
    r"cache\.params\.(every|schedule)\b": r"--\1",
    r"sampling\.(temperature|max_completion_length)\b": r"--\1",
    r"task\.name\b": "--task",
    r"task\.params\b": "--task_params",
    r"eval\.n\b": "--n",
}


@contextlib.contextmanager
def _flags_for_fields(**more: str) -> Iterator[None]:
    """Messages name the flag that the user typed, not the configuration's field that it stands for.

    more: flags of one command only, and their fields.
    """
    fields = FLAG_OF_FIELD | {re.escape(field) + r"\b": f"--{flag}" for flag, field in more.items()}
    try:
        yield
    except KvrlError as error:
        text = str(error)
        for field, flag in fields.items():
            text = re.sub(rf"(?<![\w.]){field}", flag, text)
        raise KvrlError(text) from error


def _train(args: argparse.Namespace) -> None:
    from kvrl.train.config import load_config

    config = load_config(args.config, args.overrides)
    from kvrl.train.trainer import train

    train(config)


def _eval(args: argparse.Namespace) -> None:
    from kvrl.eval.evaluate import run_eval

    with _flags_for_fields():
        run_eval(args)


def _parity(args: argparse.Namespace) -> int:
    from kvrl.eval.parity import run_parity

    with _flags_for_fields():
        return run_parity(args)


def _compare(args: argparse.Namespace) -> None:
    from kvrl.eval.compare import run_compare

    run_compare(args)


def _study(args: argparse.Namespace) -> None:
    from kvrl.eval.study import run_study

    run_study(args)


def _variance(args: argparse.Namespace) -> None:
    from kvrl.eval.variance import run_variance

    with _flags_for_fields():
        run_variance(args)


def _plan(args: argparse.Namespace) -> None:
    from kvrl.plan import run_plan

    run_plan(args)


def _bench(args: argparse.Namespace) -> None:
    from kvrl.bench.command import run_bench

    with _flags_for_fields(budget="cache.budget"):
        run_bench(args)


def _policies(args: argparse.Namespace) -> None:
    from kvrl.cache.policies import describe

    print(describe())


def _fetch(args: argparse.Namespace) -> None:
    from kvrl.models.fetch import fetch

    print(fetch(args.name))
