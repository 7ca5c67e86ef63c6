"""Measurements in a process of their own, whose peak memory is theirs alone."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvrl.errors import KvrlError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def in_new_process(module: str, given: dict[str, Any]) -> dict[str, Any]:
    """What `python -m module JSON` prints as its last line. KvrlError, in one line, if it fails."""
    return last_json([sys.executable, "-m", module, json.dumps(given)], module)


def last_json(command: list[str], name: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON object in the last line that a command prints. KvrlError, in one line, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    try:
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        pass
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    raise KvrlError(f"{name}: ended with code {done.returncode} and printed no result ({lines[-1][:300]})")


class PeakMemory:
    """The most bytes that the process, or the card, holds from now on above what it holds now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        elif CLEAR.exists():
            # The peak that getrusage gives is never below that of the process that started this one, and it stands
            # at what loading the model took
            CLEAR.write_text("5")
            self.before = _status("VmRSS")
        else:
            self.before = self._peak()

    @property
    def bytes(self) -> int:
        return self._peak() - self.before

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if CLEAR.exists():
            return _status("VmHWM")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
