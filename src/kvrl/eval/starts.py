"""Warm starts that several runs share, and whether a run that is on disk is the one that is wanted."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from kvrl.train.config import Config

START = "kvrl_start.json"
"""In a start's folder: what it was made from; in a run's folder: the start that it was trained from."""


def start_folder(root: Path, seed: int) -> Path:
    """The model from which all runs of a seed start."""
    return root / "start" / f"seed-{seed}"


def shares_starts(base: Config) -> bool:
    """Whether runs start from one folder for each seed. Adapters do not go on from a folder."""
    return base.warm_start is not None and base.lora is None


def ensure_start(config: Config, folder: Path, say: Callable[[str], object]) -> None:
    """Make the start of a seed, unless the folder holds the one that this configuration makes.

    It has no beacon yet: each run adds its own.
    """
    from kvrl.train.run import make_start

    fields = config.model_dump(mode="json", include={"seed", "model", "task", "warm_start"})
    made = folder / START
    if made.is_file() and json.loads(made.read_text())["config"] == fields:
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    plain = config.model_copy(update={"cache": config.cache.as_dense()}) if config.cache.is_beacon else config
    make_start(plain, partial, say)
    (partial / START).write_text(json.dumps({"config": fields, "id": uuid.uuid4().hex}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def finished(config: Config) -> bool:
    """Whether the run's folder holds a finished run of this very configuration, from the start that is there now."""
    folder, start = Path(config.output_dir), Path(config.model.path) / START
    if not (folder / "summary.json").is_file():
        return False
    if (folder / "config.json").read_text() != config.model_dump_json(indent=2):
        return False
    used = folder / START
    return not start.is_file() or (used.is_file() and used.read_text() == start.read_text())
