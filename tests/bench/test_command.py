"""`kvrl bench` from end to end with everything small: what it prints, and its mistakes. No figure is judged."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from dataclasses import asdict

import pytest

from helpers import cache, model
from kvrl.bench import learner, memory, peers, step
from kvrl.bench.machine import Machine
from kvrl.bench.peers import PEERS, Peer, ask
from kvrl.bench.process import last_json
from kvrl.bench.rollout import decode_speed
from kvrl.cli import main
from kvrl.errors import KvrlError
from kvrl.sampler.engine import Engine


@pytest.fixture
def in_process(monkeypatch):
    """What a process of its own would measure, without the seconds that its imports take."""

    def run(module: str, given: dict) -> dict:
        return json.loads(json.dumps(asdict(importlib.import_module(module).measure(given))))

    monkeypatch.setattr(learner, "in_new_process", run)
    monkeypatch.setattr(memory, "in_new_process", run)


def bench(capsys, *argv: str) -> dict:
    assert main(["bench", *argv, "--quick", "--threads", "1", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def figures_of(result: dict) -> dict[str, dict]:
    """By name. Far from the sizes that the bars are for, none is held to its bar."""
    assert all(figure["verdict"] is None for figure in result["figures"])
    assert any("--quick" in note for note in result["notes"])
    return {figure["name"]: figure for figure in result["figures"]}


def test_rollout(capsys, monkeypatch):
    monkeypatch.setitem(PEERS, "vllm", Peer("vllm", "vllm_rollout.py", own_environment=True))
    monkeypatch.setattr(peers, "ROOT", peers.ROOT / "nowhere")
    result = bench(capsys, "rollout", "--peers", "vllm")
    assert result["bench"] == "rollout" and result["settings"]["model"] == "tiny"
    assert result["versions"]["threads"] == "1" and {"kvrl", "torch", "cpu"} <= result["versions"].keys()
    rows = result["sections"]["kvrl, decode"]
    assert all(row["tokens_per_second"] > 0 and row["kv_bytes"] <= 1 << 20 for row in rows)
    assert {row["case"] for row in result["sections"]["runs"]} == {
        "equal memory", "fixed number", "check: integral", "check: full run", "nothing evicted",
    }  # fmt: skip
    found = figures_of(result)
    assert found["equal memory, 90 new tokens each: kvrl over vllm"]["value"] is None
    for name in ("kvrl: exponent of time against length, 32 to 72 new tokens", "tokens/s at 80 over tokens/s at 40",
                 "kvrl: integral against a full run, difference"):  # fmt: skip
        assert found[name]["value"] is not None and found[name]["bar"] is not None
    assert any("vllm: not measured" in note for note in result["notes"])


def test_no_engine_outlives_its_measurement():
    lm, limits = model(), Machine(1.0, 1.0)
    before = {id(x) for x in gc.get_objects() if isinstance(x, Engine)}
    decode_speed(lm, limits, cache(), slots=2, context=20, steps=10)
    assert not [x for x in gc.get_objects() if isinstance(x, Engine) and id(x) not in before]


def test_a_peers_figures_stand_beside_kvrls(capsys, monkeypatch):
    def answer(name: str, given: dict) -> peers.Answer:
        assert (given["budget"], given["buffer"], given["threads"]) == (24, 8, 1)
        assert len(given["prompt"]) >= max(p["context"] for p in given["points"])
        speeds = [{"tokens_per_second": [0.5, 0.25, 1e9]} for _ in given["points"]]
        return peers.Answer({"versions": {name: "1.2"}, "points": speeds})

    monkeypatch.setattr("kvrl.bench.run_rollout.ask", answer)
    result = bench(capsys, "rollout", "--peers", "generate,kvpress")
    assert result["versions"]["kvpress: kvpress"] == "1.2"
    assert {row["tokens_per_second"] for row in result["sections"]["generate, decode"]} == {0.5}  # the median
    figures = {f["name"]: f for f in result["figures"]}
    runs = {(r["case"], r["engine"]): r["tokens_per_second"] for r in result["sections"]["runs"]}
    for peer, bar in (("generate", 8.0), ("kvpress", 5.0)):
        figure = figures[f"equal memory, 90 new tokens each: kvrl over {peer}"]
        assert figure["bar"] == bar and runs["equal memory", peer] == pytest.approx(0.5)
        assert figure["value"] == pytest.approx(runs["equal memory", "kvrl"] / 0.5)
    assert not any("vllm" in name for name in figures)


def test_learner(capsys, in_process):
    result = bench(capsys, "learner")
    (rows,) = result["sections"].values()
    assert [row["tokens"] for row in rows] == [70, 140]
    assert all(row["replay_seconds"] > 0 and row["dense_seconds"] > 0 for row in rows)
    found = figures_of(result)
    assert found["replay: exponent of time against length"]["bar"] == 1.1
    assert found["dense: exponent of time against length"]["bar"] is None


def test_step(capsys, monkeypatch):
    def answer(name: str, given: dict) -> peers.Answer:
        assert name == "trl" and given["completions"] == 8 and given["completion_length"] == 40
        assert len(given["prompts"]) == 1
        return peers.Answer({"versions": {"trl": "1"}, "seconds": [1e6], "rollout_seconds": [5e5]})

    monkeypatch.setattr("kvrl.bench.run_step.ask", answer)
    result = bench(capsys, "step", "--peers", "trl")
    kvrl, trl = result["sections"]["GRPO step"]
    assert kvrl["trainer"] == "kvrl" and 0 < kvrl["rollout_seconds"] < kvrl["seconds"]
    assert trl["seconds"] == 1e6
    figure = figures_of(result)["one step, 8 completions of 40 tokens: kvrl faster than trl"]
    assert figure["value"] == pytest.approx(1e6 / kvrl["seconds"]) and figure["bar"] == 3.0


def test_memory(capsys, in_process):
    result = bench(capsys, "memory")
    full, small = result["sections"]["rollout of 2 sequences of 256 tokens"]
    # 3 rows (2 slots and the staging row), 3 layers x 2 heads x 32 numbers of 2 bytes, K and V
    assert full["kv_bytes"] == 3 * 256 * 3 * 2 * 32 * 2 * 2 and small["kv_bytes"] == full["kv_bytes"] // 8
    (trace,) = result["sections"]["trace of one sequence"]
    assert trace["evictions_bytes"] == 2 * trace["layers_x_heads_x_tokens"] == 2 * 3 * 2 * 256
    figures = figures_of(result)
    assert figures["KV bytes, budget over full cache"]["value"] == pytest.approx(1 / 8)
    assert figures["trace bytes for each layer, KV head and token"]["value"] == 2.0
    assert 0 < figures["recording and carrying the trace, share of a step"]["value"] < 1


def test_tables_name_what_was_run(capsys, in_process):
    assert main(["bench", "learner", "--quick", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kvrl bench learner: tiny, bfloat16, rkv, budget 24 + buffer 8, median of 1\n")
    assert "threads 1" in out
    assert "replay: exponent of time against length" in out and "bar: at most 1.1" in out


def test_the_trace_is_timed_and_left_as_it_was():
    before = [getattr(kind, name) for kind, name in step.TRACE_WORK]
    with step.timed(*step.TRACE_WORK) as found:
        assert [getattr(kind, name) for kind, name in step.TRACE_WORK] != before
        step.ReplayContext(None, 4)
    assert found.seconds > 0
    assert [getattr(kind, name) for kind, name in step.TRACE_WORK] == before


def test_what_a_process_prints_and_how_it_fails():
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    assert last_json(python("print('noise'); print('{\"a\": 1}')"), "peer") == {"a": 1}
    with pytest.raises(KvrlError, match=r"^peer: ended with code 1 and printed no result \(ValueError: no\)$"):
        last_json(python("raise ValueError('no')"), "peer")
    with pytest.raises(KvrlError, match="ended with code 0 and printed no result"):
        last_json(python("print('done')"), "peer")


def test_a_peer_that_is_not_set_up_says_how(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    assert "is in kvrl's repository, benchmarks/peers/trl_step.py" in str(ask("trl", {"threads": 1}).note)
    (tmp_path / "benchmarks/peers").mkdir(parents=True)
    (tmp_path / "benchmarks/peers/trl_step.py").touch()
    assert ask("trl", {"threads": 1}).note == "trl: not measured: not set up; run benchmarks/peers/setup.sh trl"


def test_drivers_are_there():
    for peer in PEERS.values():
        assert peer.path.exists()


@pytest.mark.parametrize(("argv", "message"), [
    (["nothing"], "invalid choice: 'nothing'"),
    ([], "WHAT"),
    (["rollout", "--kv_memory", "2"], "'2' is no size"),
    (["rollout", "--quick", "--policy", "lru"], "--policy: 'lru'"),
    (["rollout", "--quick", "--budget", "4"], "--budget: 4 is below"),
    (["step", "--quick", "--budget", "4"], "--budget: 4 is below"),
    (["memory", "--quick", "--tokens", "30"], "--tokens: 30 fit into"),
    (["step", "--quick", "--completions", "9"], "--completions: 9"),
    (["rollout", "--model", "no-such-model"], "is known here (tiny, smollm2-135m); give"),
    (["step", "--quick", "--policy", "dense"], "--policy: dense evicts nothing by a budget"),
    (["memory", "--quick", "--policy", "beacon"], "--policy: beacon evicts nothing by a budget"),
    (["rollout", "--quick", "--seed", str(2**63)], "is above the maximum"),
    (["rollout", "--quick", "--threads", "100000"], "--threads: 100000 is above 1024"),
    (["rollout", "--quick", "--peers="], "--peers: '' is not one of"),
    (["rollout", "--quick", "--contexts", "1,40"], "--contexts: 1 is below the prompt's 8 tokens"),
    (["learner", "--peers", "trl"], "unrecognized arguments: --peers"),
])  # fmt: skip
def test_mistakes_are_one_line(capsys, argv, message):
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("kvrl: error: ") and message in err
