"""Mathematical answers, compared by value: `\\boxed{\\frac12}` is 0.5 (math-verify)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field, PrivateAttr

from kvrl.errors import KvrlError
from kvrl.rewards.base import Reward, require
from kvrl.rewards.call import BadReward
from kvrl.rewards.match import golds_of, unreadable


class MathVerify(Reward):
    """1 if the completion's answer equals the gold one, else 0.

    The answer is what math-verify finds: `\\boxed{}` first (several of them are a list), then other LaTeX, then the
    last number. Answers are compared in a process of their own; one that takes longer than `seconds` of its
    processor time counts as wrong.
    """

    name: ClassVar[str] = "math_verify"

    column: str = "answer"
    """Column of the gold answer: LaTeX or a number, with or without `$` or `\\boxed{}`; or a list of such."""
    seconds: float = Field(5.0, gt=0)
    """Processor time for one comparison."""

    _worker: _Worker | None = PrivateAttr(None)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def prepare(self, device: torch.device) -> None:
        require("math_verify", "rewards", self.name)
        self._worker = _Worker(self.seconds)

    def __call__(self, completions: list[str], **columns: list) -> list:
        assert self._worker is not None, "prepare() was not called"
        golds = columns[self.column]
        return [self._worker.compare(gold, text) for gold, text in zip(golds, completions, strict=True)]


class _Worker:
    """The process, started again after each answer that ended it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.lock = threading.Lock()  # a batch that passed its time limit may still be at work
        self._start()

    def compare(self, gold: object, text: str) -> float | BadReward:
        """1 or 0, or why there is neither."""
        with self.lock:
            return self._compare(gold, text)

    def _compare(self, gold: object, text: str) -> float | BadReward:
        golds = [boxed(str(one)) for one in golds_of(gold)]
        if not golds:
            return unreadable(gold)
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([golds, text]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:  # it ended between two comparisons
            line = ""
        if not line:
            code = self.process.wait()
            self._start()
            return 0.0 if code == -signal.SIGPROF else BadReward(f"lost its process (exit code {code})")
        verdict = json.loads(line)
        return unreadable(gold) if verdict is None else float(verdict)

    def _start(self) -> None:
        file = Path(__file__).with_name("math_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(file), str(self.seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise KvrlError(f"reward.funcs.math_verify: {file.name} ended with code {self.process.wait()} at its "
                            "start; see its message above")  # fmt: skip


def boxed(gold: str) -> str:
    """The gold answer in the form that is parsed as mathematics whatever it is: bare LaTeX is not."""
    return gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"
