"""What the figures say: whole steps, the same words in both, no legend entry without its line."""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from kvrl.eval import curve_plot, outcome_plot, report, variance_plot
from kvrl.eval.curve import Cell, Curve, Point
from kvrl.eval.outcome_plot import Line
from kvrl.eval.study import Outcome, Study
from kvrl.eval.study_report import line_of
from kvrl.eval.variance import Spread


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, kept open."""
    monkeypatch.setattr(plt, "close", lambda figure: None)
    yield lambda: [plt.figure(n) for n in plt.get_fignums()]
    monkeypatch.undo()
    plt.close("all")


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_full_cache_rollouts_are_dashed_and_said_to_be_so(tmp_path, figures):
    lines = [
        Line("dense", [[0.1, 0.2]], [0.3], [0.9], full_cache_rollouts=True),
        Line("naive", [[0.1, 0.2]], [0.3], [0.4]),
    ]
    outcome_plot.plot(tmp_path / "p.png", lines)
    left, right = figures()[0].axes
    below = [text.get_text() for text in figures()[0].legends[0].get_texts()]  # over no curve
    assert below == ["dense (full-cache rollouts)", "naive"] and left.get_legend() is None
    assert texts(right) == ["compressed decoding", "full-cache decoding"]
    assert {line.get_color(): line.get_linestyle() for line in left.lines} == {"C0": "--", "C1": "-"}
    means = [(line.get_xdata()[0], line.get_ydata()[0]) for line in right.lines if line.get_markersize() == 10]
    assert means == [(-0.12, 0.3), (0.12, 0.9), (0.88, 0.3), (1.12, 0.4)]
    figures()[0].canvas.draw()
    assert all(tick == int(tick) for tick in left.get_xticks())


@pytest.mark.parametrize(("names", "shown"), [(["dense", "naive"], True), (["online_dpo, shadow_mask"] * 2, False)])
def test_names_that_would_run_into_each_other_stand_in_the_legend_alone(tmp_path, figures, names, shown):
    outcome_plot.plot(tmp_path / "p.png", [Line(name, [[0.1, 0.2]], [0.3], [0.9]) for name in names])
    (figure,) = figures()
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == (names if shown else ["", ""])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names


def test_many_lines_have_a_colour_each_and_a_legend_of_their_own(tmp_path, figures):
    outcome_plot.plot(tmp_path / "p.png", [Line(f"variant {i}", [[0.1, 0.2]], [0.3], [0.9]) for i in range(18)])
    (figure,) = figures()
    left, _ = figure.axes
    assert len({tuple(line.get_color()) for line in left.lines}) == 18 and left.get_legend() is None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"variant {i}" for i in range(18)]


def test_short_runs_have_whole_steps(tmp_path, figures):
    evaluations = [{"budget": "8", "step": 0, "accuracy": 0.1}]
    report.plot_steps(tmp_path / "p.png", "reward", [0.1, 0.2], evaluations, top=1.02)
    (axes,) = figures()[0].axes
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert texts(axes) == ["reward (mean of 5 steps)", "held out, budget 8"] and axes.get_ylim() == (0, 1.02)


def test_a_run_that_distils_has_its_divergence_drawn(tmp_path, figures):
    parity = {f"parity/{name}": 0.0 for name in ("mean", "p99", "max")}
    steps = [{"step": i, "reward": 0.5, "seconds": 1.0, **parity} for i in (1, 2)]
    said: list[str] = []
    for records in (steps, [steps[0], steps[1] | {"distill/kl/mean": 1.5}]):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        report.write_report(tmp_path, said.append)
    assert sum("warning: no step changed the weights" in line for line in said) == 2
    assert [line.split(":")[0] for line in said if "curve" in line] == ["reward curve"] * 2 + ["distillation curve"]
    assert (tmp_path / "distill.png").stat().st_size > 5000
    (axes,) = figures()[2].axes
    assert axes.get_ylabel() == "distillation KL, nats a token" and axes.get_ylim()[0] == 0
    assert axes.lines[1].get_ydata().tolist()[1] == 1.5 and axes.get_ylim()[1] > 1.4


def test_a_study_knows_which_variant_keeps_everything():
    study = Study(
        title="t", base="b.yaml", seeds=[0], overrides={"method": "dense"},
        variants={"all": {}, "few": {"overrides": {"method": "naive"}}},
    )  # fmt: skip
    result = {"outcomes": {0: Outcome(0.1, 0.2, 0.3, 0.4, [{"reward": 0.5}])}}
    assert line_of(study, "all", result) == Line("all", [[0.5]], [0.1], [0.2], full_cache_rollouts=True)
    assert line_of(study, "few", result) == Line("few", [[0.5]], [0.1], [0.2], full_cache_rollouts=False)


@pytest.mark.parametrize(("bound", "drawn"), [(1.5, True), (None, False)])
def test_the_bound_is_in_the_legend_only_if_it_is_drawn(tmp_path, figures, bound, drawn):
    figure = {"length": 8, "mean": 0.0, "std": 1.0, "max_abs": 1.0, "ess_share": 0.5, "d": 0.1}
    rows = [Spread(learner=name, log10_bound=bound, **figure) for name in ("dense", "replay", "floor")]
    variance_plot.plot(tmp_path / "p.png", rows, "title", 4)
    assert any("(1+d)" in text for text in texts(figures()[0].axes[1])) == drawn


def test_curves_are_drawn_at_their_sizes_with_their_areas(tmp_path, figures):
    """Left: points by mean entries, windows named. Right: only limits that a policy can keep."""

    def at(name, held, accuracy):
        return Point(name, accuracy, held, int(held) + 2, 20.0, 0.0)

    methods = {
        "beacons": [at("c=4", 20, 0.4), at("c=2", 30, 0.8)],
        "tova": [at("budget 19", 20, 0.1), at("budget 29", 30, 0.3)],
        "truncated": [at("limit 22", 20, 0), at("x", 30, 0)],
    }
    memory = {
        "uncompressed": [Cell(0.0, 5), Cell(0.9, 9)],
        "beacons c=2": [Cell(0.2, 7), Cell(0.8, 9)],
        "tova": [None, Cell(0.5, 9)],
    }
    curve_plot.plot(tmp_path / "p.png", Curve(8, at("full", 44, 0.9), methods, [24, 48], memory), "model on task")
    left, right = figures()[0].axes
    assert texts(left) == [
        "uncompressed, 44 entries",
        "beacons (AUAC 0.60)",
        "tova (AUAC 0.20)",
        "truncated (AUAC 0.00)",
    ]
    assert [text.get_text() for text in left.texts] == ["c=4", "c=2"]
    assert list(left.lines[1].get_xdata()) == [20, 30] and list(left.lines[1].get_ydata()) == [0.4, 0.8]
    assert texts(right) == ["uncompressed", "beacons c=2", "tova"] and list(right.lines[2].get_xdata()) == [48]
    assert [line.get_color() for line in right.lines] == ["black", left.lines[1].get_color(), left.lines[2].get_color()]
