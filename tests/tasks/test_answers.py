"""Right answers out of the forms of the data sets, and what math-verify makes of them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest

from kvrl.errors import KvrlError
from kvrl.tasks.answers import after_hashes, last_boxed, to_latex


@pytest.mark.parametrize(("worked", "answer"), [
    ("48/2 = <<48/2=24>>24\n#### 24", "24"),
    ("a #### 1 b\n####  1,450,000 ", "1450000"),
    ("#### -5", "-5"),
    ("24", None),
    ("24 ####", None),
])  # fmt: skip
def test_what_follows_the_last_hashes(worked, answer):
    assert after_hashes(worked) == answer


@pytest.mark.parametrize(("worked", "answer"), [
    (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    (r"\boxed{1} and \boxed{ 2 }.", "2"),
    (r"\boxed{\left\{1\right\}}", r"\left\{1\right\}"),
    (r"\boxed{\left\{x\right.} or {}", r"\left\{x\right."),
    (r"\fbox{7}", "7"),
    (r"\boxed {8}", "8"),
    (r"\boxed{}", None),
    (r"\boxed{1", None),
    ("1", None),
])  # fmt: skip
def test_the_last_box(worked, answer):
    assert last_boxed(worked) == answer


FORMS = [
    (27.0, "27"),
    (3, "3"),
    (0.08, "0.08"),
    (141.5, "141.5"),
    (0.1666666667, r"\frac{1}{6}"),
    (3.33333, r"\frac{10}{3}"),
    (-3.33333, r"-\frac{10}{3}"),
    (3.14159, "3.14159"),
    (0.33333, r"\frac{1}{3}"),
    (0.3333, "0.3333"),
    (0.66666, "0.66666"),
    (0.99999, "0.99999"),
    (0.12345, "0.12345"),
    (0.333331, "0.333331"),
    (1e-06, r"1 \times 10^{-6}"),
    (-1.602e-19, r"-1.602 \times 10^{-19}"),
    (1.5e17, "150000000000000000"),
    (2**70, str(2**70)),
    (-0.0, "0"),
    (Decimal("1.50"), "1.50"),
    (Decimal("0.1666666667"), r"\frac{1}{6}"),
    ("025", "025"),
    ("$145$solution:", "145"),
    ("$69$,$84$", "69,84"),
    (["$69$", "84"], "69, 84"),
    (r"\$32,\!348", r"\$32,\!348"),
    ("4.5e33", r"4.5 \times 10^{33}"),
    ("1e-5", r"1 \times 10^{-5}"),
    ("1e-06", r"1 \times 10^{-6}"),
    ("2E+08", r"2 \times 10^{8}"),
    ("3e00", r"3 \times 10^{0}"),
    ("2.88e-19", r"2.88 \times 10^{-19}"),
    ("x1e5", "x1e5"),
    ("e^{2}", "e^{2}"),
    ("-1./3", "-1/3"),
    ("4.25", "4.25"),
    ("np.arcsin(10/13)", r"\arcsin(10/13)"),
    ("20 $cm^{2}$", "20"),
    (r"$36\sqrt{7}cm^{3}$", r"36\sqrt{7}"),
    (r"$576\pi\;m^{2}$", r"576\pi"),
    ("6m^2", "6m^2"),
    ("$Quadrant I$", r"\text{Quadrant I}"),
    ("D", "D"),
    ("abc d", "abc d"),
    ("", None),
    ("$ $", None),
    (None, None),
    ([None, ""], None),
]


@pytest.mark.parametrize(("given", "latex"), FORMS)
def test_answers_as_latex(given, latex):
    assert to_latex(given) == latex


@pytest.mark.parametrize("given", [
    float("nan"), float("-inf"), Decimal("nan"), True, {"v": 1}, date(2020, 1, 1), b"1", [1, {"v": 1}],
])  # fmt: skip
def test_what_is_no_answer_is_refused(given):
    with pytest.raises(KvrlError, match="^row 3: target is .*; give text, a finite number, or a list of them$"):
        to_latex(given, "row 3: target")


@pytest.mark.parametrize(("given", "right", "wrong"), [
    ("4.5e33", r"4.50 \times 10^{33}", r"4.5 \times 10^{32}"),
    ("7.4e-12", r"7.4\times10^{-12}\text{ m}", "0"),
    ("$69$,$84$", r"84 \text{ and } 69", "69"),
    (["1", "3"], r"\{3, 1\}", "1"),
    ("20 $cm^{2}$", r"20\text{ cm}^2", "21"),
    (0.1666666667, r"\frac16", "0.16"),
    (0.99999, "0.99999", "1"),
    (1e-06, r"10^{-6}", "0"),
    ("$2$ or $-2$", r"\pm 2", "2"),
    ("$Quadrant I$", r"\text{Quadrant I}", r"\text{Quadrant II}"),
    ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}", r"\arccos\frac{10}{13}"),
])  # fmt: skip
def test_math_verify_reads_them(given, right, wrong):
    from kvrl.tasks.math import math_scorer

    answer = to_latex(given)
    assert math_scorer()([rf"so \boxed{{{right}}}", rf"so \boxed{{{wrong}}}"], answer=[answer] * 2) == [1.0, 0.0]
