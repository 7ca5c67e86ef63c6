"""`math7`: seven files found by name, right answers out of each one's own form, and the table of accuracies."""

from __future__ import annotations

import json

import datasets
import pytest

from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.eval.benchmark import BENCHMARKS, SetResult, benchmark_table, load_sets, means
from kvrl.eval.evaluate import Evaluation
from kvrl.models.tiny import make_tiny
from kvrl.train.run import build
from kvrl.train.trainer import train
from runs import make_config

# name of the file -> its rows in that set's own form, and the right answers
FILES = {
    "gsm8k_test": ([{"question": "a", "answer": "b\n#### 1,800"}], ["1800"]),
    "math500": ([{"problem": "a", "solution": "\\boxed{0}", "answer": "90^\\circ", "level": 3}], ["90^\\circ"]),
    "gaokao2023en_test": (
        [{"question": "a", "answer": "$5$ or $9$"}, {"question": "b answers: $3$", "answer": ""}],
        ["5 or 9"],
    ),
    "minerva_math_test": (
        [{"problem": "a", "solution": "$\\boxed{4.5e33}$ erg", "type": "c"}],
        ["4.5 \\times 10^{33}"],
    ),
    "olympiadbench_test": (
        [{"question": "a", "solution": ["b"], "final_answer": ["$69$,$84$"], "is_multiple_answer": True}],
        ["69,84"],
    ),
    "aime24_test": ([{"problem": "a", "answer": "025", "solution": "\\boxed{25}"}], ["025"]),
    "amc23_test": ([{"problem": "a", "question": "a", "answer": 27.0}], ["27"]),
}
NAMES = ["gsm8k", "math500", "gaokao2023en", "minerva", "olympiadbench", "aime24", "amc23"]


@pytest.fixture
def folder(tmp_path):
    for name, (rows, _) in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_right_answers_of_the_seven_files(folder):
    sets = load_sets("math7", str(folder), {})
    assert [name for name, _ in sets] == NAMES
    assert [[row["answer"] for row in task.eval_rows] for _, task in sets] == [right for _, right in FILES.values()]
    instruction = "a\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert {task.eval_rows[0]["prompt"][0]["content"] for _, task in sets} == {instruction}
    plain = load_sets("math7", str(folder), {"chat": False, "template": "Q: {question}"})
    assert {task.eval_rows[0]["prompt"] for _, task in plain} == {"Q: a"}


def test_what_the_hub_is_asked_for(monkeypatch):
    asked = []

    def load(path, name=None, split=None):
        asked.append((path, name, split))
        row = {"question": "a", "problem": "a", "answer": "#### 1", "final_answer": ["1"]}
        return datasets.Dataset.from_list([row])

    monkeypatch.setattr("datasets.load_dataset", load)
    assert [name for name, _ in load_sets("math7", None, {})] == NAMES
    assert asked == [
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("MARIO-Math-Reasoning/Gaokao2023-Math-En", None, "train"),
        ("math-ai/minervamath", None, "test"),
        ("math-ai/olympiadbench", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/amc23", None, "test"),
    ]


def test_what_is_missing_is_told_before_a_model_is_loaded(folder, capsys):
    def mistake(*flags):
        assert main(["eval", "nowhere", *flags]) == 2
        return capsys.readouterr().err

    assert "set --task or --benchmark" in mistake()
    assert "not allowed with argument" in mistake("--task", "recurrence", "--benchmark", "math7")
    assert "--benchmark: math8 is not one of math7" in mistake("--benchmark", "math8")
    assert "none is not a folder" in mistake("--benchmark", "math7", "--data_dir", "none")
    assert "--data_dir: is the folder of a benchmark's files" in mistake("--task", "recurrence", "--data_dir", "x")
    assert "--n: 9999 is above" in mistake("--task", "recurrence", "--n", "9999")
    (folder / "minerva_math_test.jsonl").unlink()
    missing = mistake("--benchmark", "math7", "--data_dir", str(folder))
    assert "has no file of minerva (minerva_test.jsonl, minerva.jsonl, minerva_math_test.jsonl, minerva_math" in missing


def evaluation(budget, accuracy):
    return Evaluation(budget, accuracy, kv_bytes=1, kv_bytes_share=0.5, mean_length=1.0, truncated=0.0)


def test_every_set_counts_alike_in_the_mean():
    results = [
        SetResult("large", 1000, [evaluation("64", 0.5), evaluation("full", 0.9)]),
        SetResult("small", 10, [evaluation("64", 0.1), evaluation("full", 0.3)]),
    ]
    assert means(results) == pytest.approx({"64": 0.3, "full": 0.6})
    table = benchmark_table(results, "")
    assert [column.header for column in table.columns] == ["set", "problems", "budget 64", "full"]
    assert [list(column.cells) for column in table.columns] == [
        ["large", "small", "mean"], ["1000", "10", ""], ["0.500", "0.100", "0.300"], ["0.900", "0.300", "0.600"],
    ]  # fmt: skip


def test_the_command_prints_each_set_under_each_budget(folder, capsys, monkeypatch):
    pytest.importorskip("math_verify")
    make_tiny(folder / "model", ["a", "1"], 0)
    extra = [{"problem": f"a {i}", "answer": "1"} for i in range(3)]
    (folder / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in extra))
    monkeypatch.setattr("kvrl.eval.evaluate.completion_text", lambda tokenizer, rollout: "\\boxed{5, 9}")
    flags = ["--benchmark", "math7", "--data_dir", str(folder), "--task_params", "{chat: false}", "--n", "2", "--json"]
    cache = ["--policy", "recent", "--budgets", "8,full", "--buffer", "4", "--window", "4", "--sinks", "2"]
    assert main(["eval", str(folder / "model"), *flags, *cache, "--max_completion_length", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["sets"]) == [one.name for one in BENCHMARKS["math7"]] == NAMES
    assert [one["problems"] for one in result["sets"].values()] == [1, 2, 1, 1, 1, 1, 1]
    for name, one in result["sets"].items():  # only gaokao2023en asks for 5 and 9
        assert [(r["budget"], r["accuracy"]) for r in one["results"]] == [
            (b, name == "gaokao2023en") for b in ("8", "full")
        ]
    assert result["mean"] == pytest.approx({"8": 1 / 7, "full": 1 / 7})


@pytest.mark.parametrize(("params", "message"), [
    ({"levels": [3]}, "task.params.levels: task gsm8k has no such parameter"),
    ({"eval_path": "x"}, "task.params.eval_path: benchmark math7 says itself what its sets are; leave it out"),
    ({"path": "x"}, "task.params.path: benchmark math7"),
    ({"columns": {"problem": "q"}}, "task.params.columns: benchmark math7"),
    ({"on_missing_answer": "drop"}, "task.params.on_missing_answer: benchmark math7"),
])  # fmt: skip
def test_parameters_that_are_unknown_or_the_benchmark_s_own_are_refused(folder, params, message):
    for source in (str(folder), None):
        with pytest.raises(KvrlError, match=message):
            load_sets("math7", source, params)


def test_a_training_run_meets_the_sets_at_its_end(folder, monkeypatch):
    pytest.importorskip("math_verify")
    make_tiny(folder / "model", ["a", "1"], 0)
    monkeypatch.setattr("kvrl.eval.evaluate.completion_text", lambda tokenizer, rollout: "\\boxed{5, 9}")
    params = {"min_steps": 3, "max_steps": 4}
    settings = {"n": 0, "benchmark": "math7", "benchmark_dir": str(folder), "benchmark_n": 1,
                "benchmark_params": {"chat": False}}  # fmt: skip
    config = make_config(
        folder / "run", model={"path": str(folder / "model")}, warm_start=None, eval=settings,
        task={"name": "recurrence", "params": params}, train={"max_steps": 1}, sampling={"max_completion_length": 8},
    )  # fmt: skip
    train(config)
    result = json.loads((folder / "run" / "benchmark.json").read_text())
    assert list(result["sets"]) == NAMES and result["mean"] == pytest.approx({"12": 1 / 7, "full": 1 / 7})


def test_a_training_run_tells_what_its_benchmark_lacks(folder, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr("kvrl.train.run.load_policy", lambda *_: pytest.fail("a model was loaded"))
    (folder / "minerva_math_test.jsonl").unlink()
    for given, message in (
        ({"benchmark": "math8"}, "eval.benchmark: math8 is not one of math7"),
        (
            {"benchmark_dir": str(folder)},
            "eval.benchmark_dir: .* no file of minerva .* leave eval.benchmark_dir out",
        ),
        ({"benchmark_dir": str(folder), "benchmark_params": {"levels": [3]}}, "gsm8k has no such parameter"),
    ):
        with pytest.raises(KvrlError, match=message):
            build(make_config(folder / "run", eval={"benchmark": "math7", **given}), lambda _: None)
