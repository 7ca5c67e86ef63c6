"""`kvrl eval --curve`: what is decoded at which size, what a limit cuts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvrl
from kvrl.cache.config import CacheConfig
from kvrl.cli import main
from kvrl.eval.curve import Cell, Curve, Decoder, Point, at_size, measure, under_limit
from kvrl.eval.curve_command import baseline
from kvrl.eval.report import check_figure
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.models.tiny_families import build_family
from kvrl.sampler.config import SamplingConfig
from kvrl.train.checkpoint import save_model

VOCAB = [str(i) for i in range(12)]
PROMPTS = ["<bos> 1 2 3", "<bos> 4 5", "<bos> 6 7 8 9"]
NEW = 21


class Long:
    """A completion scores 1 if it has at least `NEW` tokens."""

    name = "long"
    vocab = VOCAB

    def rows(self, split, n, seed):
        return [{"prompt": text} for text in PROMPTS][:n]

    def reward(self, completions, **_):
        return [float(len(text.split()) >= NEW) for text in completions]


def model(every=(2, 4, 8)):
    tokenizer = build_tiny_tokenizer(VOCAB)
    lm = build_tiny_model(tokenizer, 0)
    kvrl.add_beacon(lm, tokenizer, every=list(every))
    return lm, tokenizer


def decoder(tokenizer, sampling=None) -> Decoder:
    """Completions of exactly NEW tokens."""
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    config = sampling or SamplingConfig(max_completion_length=NEW, eos_token_ids=[])
    return Decoder(Long(), tokenizer, Long().rows("eval", 3, 0), prompts, config, seed=0, slots=4)


@pytest.fixture(scope="module")
def curve() -> Curve:
    lm, tokenizer = model()
    with torch.no_grad():
        return measure(
            decoder(tokenizer),
            {"beacons": [(lm, CacheConfig(policy="beacon"))]},
            lm,
            {"recent": CacheConfig(policy="recent", buffer=1, window=2, sinks=0)},
            limits=[4, 8, 12, 30],
        )


def test_every_size_is_matched(curve):
    beacons, recent, truncated = (curve.methods[name] for name in ("beacons", "recent", "truncated"))
    assert [p.decoding for p in beacons] == ["c=8", "c=4", "c=2"] or [p.decoding for p in beacons][-1] == "c=2"
    for ours, theirs, cut in zip(beacons, recent, truncated, strict=True):
        assert abs(theirs.held_entries - ours.held_entries) < 0.55  # budgets are whole numbers
        assert abs(cut.held_entries - ours.held_entries) < 0.55
        assert ours.tokens == theirs.tokens == NEW and cut.tokens < NEW and cut.truncated == 1
    assert curve.full.held_entries > max(p.held_entries for p in beacons)
    assert list(curve.methods) == ["beacons", "recent", "truncated"] and curve.problems == 3


def test_what_is_cut_short_loses_its_reward(curve):
    assert [p.accuracy for p in curve.methods["beacons"]] == [1, 1, 1] and curve.full.retained == 1
    assert [p.accuracy for p in curve.methods["truncated"]] == [0, 0, 0]
    assert curve.auac() == {"beacons": pytest.approx(1), "recent": pytest.approx(1), "truncated": 0}


def test_at_a_fixed_memory_beacons_go_on_for_longer(curve):
    """Prompts of 4, 3 and 5 tokens. With the full cache a limit L leaves L - prompt + 1 tokens."""
    full = curve.memory["uncompressed"]
    assert [c.tokens for c in full] == pytest.approx([(1 + 2 + 0) / 3, (5 + 6 + 4) / 3, (9 + 10 + 8) / 3, NEW])
    assert [c.accuracy for c in full] == [0, 0, 0, 1]
    at_8 = {name: cells[1].tokens for name, cells in curve.memory.items()}
    assert at_8["beacons c=4"] > at_8["beacons c=2"] - 5 and at_8["beacons c=2"] > at_8["uncompressed"]
    assert curve.memory["recent"] == [Cell(1, NEW)] * 4  # it never holds more than budget + buffer
    assert all(cells[3] == Cell(1, NEW) for cells in curve.memory.values())


def test_a_policy_has_at_least_what_must_stay():
    lm, tokenizer = model()
    made = decoder(tokenizer)
    _, rollouts = made(lm, CacheConfig(policy="beacon", params={"every": 8}), "c=8")
    tight = CacheConfig(policy="recent", buffer=1, window=2, sinks=0, protect_prompt=True)
    assert at_size(tight, 3.0, rollouts, made.prompts).budget == 5 + 2  # the longest prompt and the window
    assert under_limit(made, lm, tight, 7) is None and under_limit(made, lm, tight, 8) == Cell(1, NEW)


def test_curves_of_one_size_have_no_area():
    point = Point("c=4", 0.5, 10.0, 12, 20.0, 0.0)
    made = Curve(1, point, {"beacons": [point], "tova": [point]}, [])
    assert made.auac() == {"beacons": None, "tova": None}
    assert made.as_json()["methods"]["tova"]["auac"] is None


def test_a_point_is_decoded_once():
    lm, tokenizer = model()
    made = decoder(tokenizer)
    first, second = (made(lm, CacheConfig(policy="dense"), "full") for _ in range(2))
    assert first is second and made(lm, CacheConfig(policy="beacon"), "c=2") is not first


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """`two` has beacons of 2 and 4, `one` of 4 alone, `none` has none, `other` has other tokens.

    `long` has beacons of 20, and `deep` other layers.
    """
    from kvrl.tasks import get_task

    root = tmp_path_factory.mktemp("models")
    tokens = get_task("recurrence").vocab
    for name, every, vocab in (("two", [2, 4], tokens), ("one", [4], tokens), ("none", None, tokens),
                               ("long", [20], tokens), ("deep", [4], tokens), ("other", [4], VOCAB)):  # fmt: skip
        tokenizer = build_tiny_tokenizer(vocab)
        lm = build_tiny_model(tokenizer, 0) if name != "deep" else build_family("llama", vocab_size=len(tokenizer))
        if every:
            kvrl.add_beacon(lm, tokenizer, every=every)
        save_model(root / name, lm, tokenizer)
    return root


SHORT = ["--task", "recurrence", "--n", "3", "--max_completion_length", "12"]


def test_the_command(folders, capsys, tmp_path):
    two, one, none = (str(folders / name) for name in ("two", "one", "none"))
    flags = ["--curve", "--others", f"single={one}", "--teacher", none, "--baselines", "recent", "--window", "2",
             "--sinks", "1", "--json", "--output", str(tmp_path / "curve.png")]  # fmt: skip
    assert main(["eval", two, *SHORT, *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["methods"]) == ["beacons", "single", "recent", "truncated"] and printed["buffer"] == 1
    assert sorted(p["decoding"] for p in printed["methods"]["beacons"]["points"]) == ["c=2", "c=4"]
    assert [p["decoding"] for p in printed["methods"]["single"]["points"]] == ["c=4"]
    assert list(printed["memory"]["decodings"]) == [
        "uncompressed", "beacons c=2", "beacons c=4", "single c=4", "recent"
    ]  # fmt: skip
    assert list(printed["text"]) == [
        "uncompressed", "beacons c=2", "beacons c=4", "single c=4", "no beacons c=2", "no beacons c=4",
        *(f"recent {p['decoding'].split()[1]}" for p in reversed(printed["methods"]["recent"]["points"])),
    ]  # fmt: skip
    assert printed["full"]["decoding"] == "full" and printed["problems"] == 3 and printed["uncompressed"] == none
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert main(["eval", two, *SHORT, "--curve", "--every", "4", "--baselines", "recent", "--limits", "8,16"]) == 0
    shown, said = capsys.readouterr()
    assert "c=4" in shown and "c=2" not in shown and "uncompressed" in shown
    assert f"uncompressed: {two}" in said  # of no run: the model itself


@pytest.mark.parametrize(("name", "flags", "message"), [
    ("two", ["--teacher", "x"], "--teacher: has no meaning without --curve"),
    ("two", ["--curve", "--budgets", "24"], "--budgets: has no meaning under --curve"),
    ("two", ["--curve", "--policy", "tova"], "--policy: tova has no meaning under --curve"),
    ("two", ["--curve", "--baselines", "tovaa"], "'tovaa' is not one of"),
    ("two", ["--curve", "--baselines", "dense"], "--baselines: dense is no training-free policy"),
    ("two", ["--curve", "--every", "3"], "--every: 3 is not one of the 2, 4 that the model was trained with"),
    ("two", ["--curve", "--others", "x"], "--others: x is not NAME=FOLDER"),
    ("two", ["--curve", "--others", "beacons=x"], "--others: beacons names another curve (beacons, uncompressed, tru"),
    ("two", ["--curve", "--others", "truncated=x"], "--others: truncated names another curve"),
    ("two", ["--curve", "--others", "uncompressed=x"], "--others: uncompressed names another curve"),
    ("two", ["--curve", "--baselines", "recent", "--others", "recent=x"], "--others: recent names another curve"),
    ("two", ["--curve", "--others", "a={root}/one", "a={root}/two"], "--others: a has c=4 twice"),
    ("one", ["--curve", "--output", "{root}/no/such.png"], "such.png cannot be written (No such file or directory)"),
    ("one", ["--curve", "--output", "{root}"], "does not end in .png, .pdf, .svg"),
    ("one", ["--curve", "--output", "{root}/curve.xyz"], "curve.xyz does not end in .png, .pdf, .svg"),
    ("two", ["--curve", "--others", "x={root}/other"], "has other tokens than MODEL"),
    ("two", ["--curve", "--teacher", "{root}/other"], "has other tokens than MODEL"),
    ("two", ["--curve", "--baselines", ","], "argument --baselines: ',' names nothing"),
    ("two", ["--curve", "--others", "x={root}/long"], "long has beacons of every 20 tokens, over --max_completion_le"),
    ("two", ["--curve", "--others", "x={root}/deep"], "a curve is of models of one shape, as they replay one text"),
    ("two", ["--curve", "--teacher", "{root}/deep"], "--teacher: "),
    ("two", ["--curve", "--max_completion_length", "3"], "--every: 4 is over --max_completion_length (3)"),
    ("none", ["--curve"], "none has no beacon, and a curve is of beacons"),
])  # fmt: skip
def test_mistakes(folders, capsys, monkeypatch, name, flags, message):
    """Told before anything is decoded."""
    monkeypatch.setattr(Decoder, "__call__", lambda *_: pytest.fail("decoded"))
    flags = [flag.format(root=folders) for flag in flags]
    assert main(["eval", str(folders / name), *SHORT, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_baseline_may_keep_more_than_a_caches_default_holds():
    assert baseline("recent", {"window": 600, "buffer": 1}).window == 600  # its budget is matched later


def test_numbers_are_printed_before_the_figure_is_drawn(folders, capsys, monkeypatch, tmp_path):
    def full_disk(*_):
        raise OSError("no space")

    monkeypatch.setattr("kvrl.eval.curve_plot.plot", full_disk)
    flags = ["--curve", "--baselines", "recent", "--window", "2", "--sinks", "1", "--json"]
    with pytest.raises(OSError, match="no space"):
        main(["eval", str(folders / "one"), *SHORT, *flags, "--output", str(tmp_path / "curve.png")])
    assert json.loads(capsys.readouterr().out)["problems"] == 3


def test_a_file_that_is_there_is_left_until_the_figure_is(tmp_path):
    (tmp_path / "old.png").write_text("old")
    for name in ("old.png", "new.PDF"):
        check_figure(tmp_path / name)
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("old.png", "old")]
