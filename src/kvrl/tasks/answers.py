"""Where the answer is in a completion, and right answers out of the forms in which data sets write them."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from kvrl.errors import KvrlError

AnswerFormat = Literal["marker", "tags", "last_line"]

INSTRUCTIONS: dict[AnswerFormat, str] = {
    "marker": 'Work step by step, then write "Answer:" and the answer.',
    "tags": "Work step by step, then write the answer between <answer> and </answer>.",
    "last_line": "Work step by step, then write the answer alone on the last line.",
}


def extract_answer(completion: str, answer_format: AnswerFormat) -> str | None:
    """The answer's text in a completion, or None: `marker`, `tags` or `last_line` (see `answer_format`).

    Control tokens at the end, such as `<|im_end|>`, are no part of the text.
    """
    text = re.sub(r"(\s*<\|[^<>|]*\|>)+\s*$", "", completion)
    if answer_format == "tags":
        found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    elif answer_format == "marker":
        found = re.split(r"answer:", text, flags=re.IGNORECASE)[1:]
    else:
        found = text.strip().splitlines()
    return (found[-1].strip() or None) if found else None


def format_answer(answer: str, answer_format: AnswerFormat) -> str:
    """The line that `extract_answer` reads back."""
    return {"marker": f"Answer: {answer}", "tags": f"<answer>{answer}</answer>", "last_line": answer}[answer_format]


def after_hashes(worked: str) -> str | None:
    """GSM8K's answer: what follows the last `####`, without commas; None where there is none."""
    _, hashes, value = worked.rpartition("####")
    return value.strip().replace(",", "") or None if hashes else None


def last_boxed(worked: str) -> str | None:
    r"""MATH's answer: what the last `\boxed{...}` (or `\fbox{...}`) holds, braces matched; None where there is none."""
    starts = list(re.finditer(r"\\f?box(?:ed)?\s*\{", worked))
    if not starts:
        return None
    begin, depth = starts[-1].end(), 1
    for at in range(begin, len(worked)):
        depth += {"{": 1, "}": -1}.get(worked[at], 0) if worked[at - 1] != "\\" else 0
        if depth == 0:
            return worked[begin:at].strip() or None
    return None


def to_latex(answer: Any, where: str = "answer") -> str | None:
    r"""A right answer as LaTeX without delimiters, in the forms that math-verify reads; None where there is none.

    A number loses a needless `.0`, and one whose five decimals or more are those of a fraction, rounded, is written
    as the fraction (`0.1666666667`); a list of answers is joined by commas, which math-verify reads as a set. In text,
    `$` and a trailing `solution:` go, `4.5e33` becomes `4.5 \times 10^{33}` (else it is read as 4.5 times e times
    33), `1./3` becomes `1/3`, `np.arcsin` becomes `\arcsin`, a unit such as `cm^{2}` at the end goes, and words
    become `\text{...}`.
    Errors: KvrlError, which `where` starts, for what is no text, no finite number and no list of them.
    """
    if isinstance(answer, list):
        return ", ".join(part for part in (to_latex(one, where) for one in answer) if part) or None
    if answer is None:
        return None
    if isinstance(answer, (int, float, Decimal)) and not isinstance(answer, bool) and Decimal(answer).is_finite():
        answer = _number(answer)
    if not isinstance(answer, str):
        raise KvrlError(f"{where} is {answer!r}; give text, a finite number, or a list of them")
    text = re.sub(r"(?<!\\)\$", "", answer)
    text = re.sub(r"\s*solution:\s*$", "", text)
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d*)?)[eE](?:\+|(-))?0*(\d+)(?![\w.])", r"\1 \\times 10^{\2\3}", text)
    text = re.sub(r"(?<=\d)\.(?=/)", "", text)
    text = re.sub(r"\bnp\.(?=[a-z])", r"\\", text)
    text = re.sub(r"(?:\\[;,]\s*[cdkm]?m|\s*[cdkm]m)\^\{?[23]\}?\s*$", "", text)
    text = text.strip()
    if re.fullmatch(r"[A-Za-z]{4,}( [A-Za-z]+)+", text):
        text = f"\\text{{{text}}}"
    return text or None


def _number(value: int | float | Decimal) -> str:
    text = str(value)  # of a float the shortest that is read back as it: the decimals that the file has
    exact = Fraction(text)
    if exact.denominator == 1:
        return str(exact)
    _, _, decimals = text.partition(".")
    fraction = exact.limit_denominator(100)
    if len(decimals) >= 5 and decimals.isdigit() and round(fraction, len(decimals)) == exact:
        sign = "-" if value < 0 else ""
        return f"{sign}\\frac{{{abs(fraction.numerator)}}}{{{fraction.denominator}}}"
    return text
