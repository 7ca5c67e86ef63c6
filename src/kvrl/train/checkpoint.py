"""Checkpoints: a normal model folder, the optimiser, the scheduler and where the run stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvrl.errors import KvrlError

STATE = "state.json"


def save_checkpoint(
    output_dir: Path, step: int, *, model: nn.Module, tokenizer: Any, optimizer: Any, scheduler: Any, state: dict,
    keep: int,
) -> Path:  # fmt: skip
    """Write `checkpoints/step-N` (whole or not at all) after step N and delete the oldest beyond `keep`."""
    folder = output_dir / "checkpoints" / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_model(partial / "model", model, tokenizer)
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                "torch_rng": torch.get_rng_state()}, partial / "optimizer.pt")  # fmt: skip
    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in _checkpoints(output_dir)[:-keep]:
        shutil.rmtree(old)
    return folder


def save_model(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """An ordinary `save_pretrained` folder (adapters alone under LoRA)."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)


def find_checkpoint(output_dir: Path, resume: str | None) -> Path | None:
    """The folder to resume from. KvrlError if `resume` names none."""
    if resume is None:
        return None
    if resume == "latest":
        found = _checkpoints(output_dir)
        if not found:
            raise KvrlError(
                f"checkpoint.resume: latest, but {output_dir}/checkpoints has none; set checkpoint.every in the first "
                "run, or leave checkpoint.resume out"
            )
        return found[-1]
    folder = Path(resume)
    if not (folder / STATE).is_file():
        raise KvrlError(f"checkpoint.resume: {folder} has no {STATE}; give a folder like checkpoints/step-000020")
    return folder


def load_state(folder: Path) -> dict[str, Any]:
    """Where the run stood: step, data position and counters."""
    return json.loads((folder / STATE).read_text())


def load_training(folder: Path, optimizer: Any, scheduler: Any) -> None:
    """Restore optimiser, scheduler and the global random stream."""
    saved = torch.load(folder / "optimizer.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["torch_rng"])


def _checkpoints(output_dir: Path) -> list[Path]:
    return sorted(p for p in (output_dir / "checkpoints").glob("step-*") if (p / STATE).is_file())
