"""The command line: what is called with what, exit codes, and one line for each mistake."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

import kvrl
from kvrl import cli
from kvrl.cli import main, parse_budgets, split_overrides
from kvrl.errors import KvrlError


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for the modules that the subcommands import, recording what they are called with."""
    seen = SimpleNamespace()

    def stand_in(module: str, function: str) -> None:
        fake = ModuleType(module)
        setattr(fake, function, lambda argument: setattr(seen, function, argument))
        monkeypatch.setitem(sys.modules, module, fake)

    stand_in("kvrl.train.trainer", "train")
    stand_in("kvrl.eval.evaluate", "run_eval")
    stand_in("kvrl.eval.parity", "run_parity")
    stand_in("kvrl.eval.compare", "run_compare")
    return seen


def mistake(capsys, *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("kvrl: error: ")
    return err.removeprefix("kvrl: error: ").strip()


def test_train_lays_flags_over_the_file(calls, tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1\ngrpo: {beta: 0.5}\n")
    flags = ["--grpo.beta", "0.1", "--output_dir=runs/a", "--train.learning_rate", "1e-3"]
    assert main(["train", *flags, str(tmp_path / "c.yaml"), "--seed", "7"]) == 0
    config = calls.train
    assert (config.seed, config.grpo.beta, config.output_dir) == (7, 0.1, "runs/a")
    assert config.train.learning_rate == 1e-3


def test_compare_takes_its_own_flags_and_fields(calls):
    own = ["--methods", "naive,shadow_mask", "--seeds=2", "--json"]
    assert main(["compare", "c.yaml", *own, "--train.max_steps", "5"]) == 0
    args = calls.run_compare
    assert (args.config, args.methods, args.seeds, args.first_seed, args.json) == (
        "c.yaml", ["naive", "shadow_mask"], 2, 0, True,
    )  # fmt: skip
    assert args.overrides == [("train.max_steps", "5")]


def test_eval_and_parity_flags(calls):
    assert main(["eval", "m", "--task", "recurrence", "--policy", "tova", "--budgets", "24,32,full"]) == 0
    args = calls.run_eval
    assert (args.model, args.task, args.policy, args.budgets) == ("m", "recurrence", "tova", [24, 32, "full"])
    assert main(["parity", "--dtype", "bfloat16", "--json"]) == 0
    args = calls.run_parity
    assert (args.model, args.policy, args.dtype, args.json) == ("tiny", "all", "bfloat16", True)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"kvrl {kvrl.__version__}\n"


@pytest.mark.parametrize(("flag", "value", "meant"), [
    ("--seed", "3", "did you mean --seeds NUMBER or --first_seed SEED?"),
    ("--method", "naive", "did you mean --methods NAME,NAME?"),
    ("--overwrite_output_dir", "true", "did you mean --output_dir FOLDER?"),
])  # fmt: skip
def test_compare_refuses_what_its_grid_sets(calls, capsys, flag, value, meant):
    assert meant in mistake(capsys, "compare", "c.yaml", flag, value)
    assert not hasattr(calls, "run_compare")


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("(default: the run's, else 128)", "(default: the run's, else 256)", "(default full)", "(default 0)"):
        assert part in text


def test_a_warning_of_kvrls_own_is_one_line(calls, monkeypatch, capsys):
    def warn(args):
        warnings.warn_explicit("a\n  b", UserWarning, cli.__file__, 7)
        warnings.warn_explicit("c", UserWarning, "/elsewhere.py", 7)

    monkeypatch.setattr(cli, "_policies", warn)
    assert main(["policies"]) == 0
    assert capsys.readouterr().err == "kvrl: warning: a b\n/elsewhere.py:7: UserWarning: c\n"


def test_messages_name_the_flag_that_was_typed(capsys):
    assert "--policy: 'rkvv' is not one of" in mistake(capsys, "eval", "m", "--task", "recurrence", "--policy", "rkvv")
    message = mistake(capsys, "eval", "m", "--task", "recurrence", "--budgets", "9")
    assert message.startswith("--budgets: 9 is below the") and "raise --budgets to" in message
    assert mistake(capsys, "eval", "m", "--task", "recurence").startswith("--task: recurence is not one of")
    params = ["--task_params", "{steps: 3}"]
    assert "--task_params.steps: task" in mistake(capsys, "eval", "m", "--task", "recurrence", *params)
    tiny = mistake(capsys, "eval", "tiny", "--task", "recurrence")
    assert tiny.startswith("MODEL: tiny is made anew") and "not one of" not in tiny
    assert mistake(capsys, "parity", "--model", "nowhere").startswith("--model: 'nowhere' is no folder")


def test_hub_models_need_no_fetch(capsys):
    message = mistake(capsys, "fetch", "Qwen/Qwen3-0.6B")
    assert "hub models need no fetch: use the id as model.path" in message


def test_wrong_flags(capsys):
    assert "COMMAND" in mistake(capsys)
    assert "invalid choice: 'trian'" in mistake(capsys, "trian")
    assert "required: CONFIG" in mistake(capsys, "train")
    assert mistake(capsys, "train", "c.yaml", "--seed") == "--seed: has no value; write --seed VALUE"
    assert "unrecognized arguments: --nope" in mistake(capsys, "parity", "--nope")
    assert "invalid choice: 'float16'" in mistake(capsys, "parity", "--dtype", "float16")
    assert "0 is below the minimum 1" in mistake(capsys, "eval", "m", "--task", "t", "--budgets", "0")
    assert "'x' is not a whole number" in mistake(capsys, "eval", "m", "--task", "t", "--budgets", "24,x")
    assert "'ppo' is not one of dense" in mistake(capsys, "compare", "c.yaml", "--methods", "ppo")
    assert "not a YAML mapping" in mistake(capsys, "eval", "m", "--task", "t", "--task_params", "3")


def test_wrong_file_and_field(capsys, tmp_path):
    assert "cannot be read" in mistake(capsys, "train", str(tmp_path / "none.yaml"))
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1")
    message = mistake(capsys, "train", str(file), "--grpo.betta", "1")
    assert message == "grpo.betta: is not a known field; did you mean grpo.beta?"


def test_an_error_of_several_lines_is_printed_as_one(monkeypatch, capsys):
    def fail(args):
        raise KvrlError("a: b;\n  c")

    monkeypatch.setattr(cli, "_policies", fail)
    assert mistake(capsys, "policies") == "a: b; c"


def test_interrupt_exits_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_policies", interrupt)
    assert main(["policies"]) == 130
    assert capsys.readouterr().err == "kvrl: interrupted\n"


def test_other_errors_are_not_swallowed(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_policies", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["policies"])


def test_overrides_are_parted_in_any_order():
    rest, pairs = split_overrides(["train", "--a.b", "-1", "c.yaml", "-h", "--d=--e", "--json"], {"--json"})
    assert rest == ["train", "c.yaml", "-h", "--json"]
    assert pairs == [("a.b", "-1"), ("d", "--e")]
    assert parse_budgets("full,1") == ["full", 1]


def test_methods_are_those_of_the_configuration():
    from typing import get_args

    from kvrl.train.config import DType, Method

    assert get_args(Method) == cli.METHODS
    assert get_args(DType) == cli.DTYPES


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "kvrl", "eval", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("kvrl: error: ") and not done.stdout
