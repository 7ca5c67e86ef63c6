"""The folder of a run: refused where it holds something else, made, and cleared of what another run left in it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kvrl.errors import KvrlError
from kvrl.train.checkpoint import CHECKPOINTS, METRICS, MODEL, TEACHER, is_occupied
from kvrl.train.config import Config
from kvrl.train.setup import REFERENCE

FILES = (METRICS, "summary.json", "reward.png", "distill.png")
FOLDERS = (CHECKPOINTS, MODEL, TEACHER, REFERENCE)


def check_output_dir(config: Config) -> None:
    """Raise KvrlError rather than write over another run, over the run's own start, or into what is no folder."""
    if not config.output_dir.strip():
        raise KvrlError("output_dir: is empty; give the path of a folder, such as runs/first")
    check_folder(Path(config.output_dir))
    start = Path(config.model.path).expanduser().resolve()
    written = [(Path(config.output_dir) / name).resolve() for name in FOLDERS]
    if config.checkpoint.resume is None and any(start.is_relative_to(folder) for folder in written):
        raise KvrlError(
            f"output_dir: {config.output_dir} is cleared of its models before training, and model.path "
            f"({config.model.path}) is one of them; give another folder"
        )
    if is_occupied(Path(config.output_dir)) and config.checkpoint.resume is None and not config.overwrite_output_dir:
        raise KvrlError(
            f"output_dir: {config.output_dir} holds another run; give another folder, or continue it with "
            "--checkpoint.resume latest, or start anew in it with --overwrite_output_dir true"
        )


def check_folder(folder: Path, field: str = "output_dir") -> None:
    """Raise KvrlError for a path that is a file or leads through one."""
    for path in (folder, *folder.parents):
        if os.path.exists(path) and not path.is_dir():
            raise KvrlError(f"{field}: {path} is a file; give the path of a folder")


def make_output_dir(folder: Path, field: str = "output_dir") -> None:
    """Make the folder and write to it once. KvrlError if either cannot be done."""
    check_folder(folder, field)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise KvrlError(f"{field}: {folder} cannot be written ({error.strerror}); give another folder") from None


def prepare_output_dir(config: Config) -> None:
    """Make the folder, without what another run left in it unless that run goes on."""
    output_dir = Path(config.output_dir)
    if config.checkpoint.resume is None:
        for name in FILES:
            (output_dir / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(output_dir / name, ignore_errors=True)
    (output_dir / "config.json").write_text(config.model_dump_json(indent=2))
