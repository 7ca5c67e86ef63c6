"""Checkpoints: a normal model folder, the optimiser, the scheduler and where the run stands."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvrl.beacons.model import save_beacon
from kvrl.errors import KvrlError
from kvrl.train.config import Config
from kvrl.train.distiller import Distiller
from kvrl.train.setup import ADAPTERS, merged

STATE, CONFIG, TRAINING, MODEL = "state.json", "config.json", "optimizer.pt", "model"
TEACHER = "teacher"
"""The policy, where `model` is a student apart from it."""
CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"

MAY_CHANGE = ("output_dir", "overwrite_output_dir", "checkpoint", "eval", "parity", "rollout.slots",
              "rollout.kv_memory", "train.micro_batch_tokens", "train.num_threads",
              "model.gradient_checkpointing")  # fmt: skip
"""Fields (or whole sections) that may differ when a run is resumed: where it is kept, what is measured, and how
much memory it takes. `train.max_steps` may grow too, under the constant learning rate."""


def save_checkpoint(
    output_dir: Path, step: int, *, models: dict[str, nn.Module], tokenizer: Any, optimizer: Any, scheduler: Any,
    state: dict, config: Config, critic: nn.Module | None = None, distiller: Distiller | None = None,
) -> Path:  # fmt: skip
    """Write `checkpoints/step-N` (whole or not at all) after step N; delete the oldest beyond `checkpoint.keep`."""
    folder = output_dir / CHECKPOINTS / f"step-{step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_models(partial, models, tokenizer)
    for model in models.values():
        if has_lost_base(model):  # `model` has them merged, which rounds
            write(partial / ADAPTERS, model)
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                "torch_rng": torch.get_rng_state(), "critic": None if critic is None else critic.state_dict(),
                "distiller": None if distiller is None else distiller.state_dict()}, partial / TRAINING)  # fmt: skip
    (partial / CONFIG).write_text(config.model_dump_json(indent=2))
    (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    for old in _checkpoints(output_dir)[: -config.checkpoint.keep]:
        shutil.rmtree(old)
    return folder


def save_models(folder: Path, models: dict[str, nn.Module], tokenizer: Any) -> None:
    """Each model in the folder of its name, of whose former content nothing stays: it might be loaded instead."""
    for name, model in models.items():
        shutil.rmtree(folder / name, ignore_errors=True)
        save_model(folder / name, model, tokenizer)


def save_model(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """An ordinary `save_pretrained` folder: adapters alone under LoRA, with a note of the beacon if there is one.

    Adapters whose base no folder holds are merged into it, and the whole model is saved.
    """
    if has_lost_base(model):
        model = merged(copy.deepcopy(model))
    write(folder, model)
    save_beacon(folder, model)
    tokenizer.save_pretrained(folder)


def write(folder: Path, model: Any) -> None:
    """A model, or its adapters without the embedding that they were trained beside, which peft adds where it grew."""
    adapters = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
    model.save_pretrained(folder, **adapters)


def has_lost_base(model: Any) -> bool:
    """Whether a model is adapters on a base that no folder holds: `tiny`, or one that adapters were merged into."""
    return hasattr(model, "peft_config") and not any(c.base_model_name_or_path for c in model.peft_config.values())


def is_occupied(output_dir: Path) -> bool:
    """Whether a folder holds a run, or a model where a run would write its own."""
    return (output_dir / METRICS).exists() or (output_dir / MODEL).exists()


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
    return _read_json(folder / STATE)


def check_resume(folder: Path, config: Config) -> None:
    """Raise KvrlError for a checkpoint that `config` cannot continue: incomplete, of another run, or past its end."""
    _check_parts(folder, STATE, CONFIG, TRAINING, MODEL, *([TEACHER] if config.separate_student else []))
    step = load_state(folder)["step"]
    before, now = _read_json(folder / CONFIG), config.model_dump(mode="json")
    for field, was, wanted in _differences(before, now):
        longer = field == "train.max_steps" and wanted > was and config.train.lr_scheduler == "constant"
        end = field == "train.max_steps" and step > wanted
        if any(field == name or field.startswith(f"{name}.") for name in MAY_CHANGE) or longer or end:
            continue
        old, new = _shown(was), _shown(wanted)
        raise KvrlError(
            f"checkpoint.resume: {field} is {new}, and the run of {folder} had {old}; set {field} to {old}, or start a "
            "new run in another output_dir"
        )
    if config.lora is not None and not (folder / MODEL / "adapter_config.json").exists():
        _check_parts(folder, ADAPTERS)
    if step > config.train.max_steps:
        raise KvrlError(
            f"train.max_steps: {config.train.max_steps} is below step {step} of {folder}; raise it to at least {step}"
        )
    output_dir = Path(config.output_dir)
    elsewhere = folder.resolve().parent != (output_dir / CHECKPOINTS).resolve()
    if elsewhere and is_occupied(output_dir):
        raise KvrlError(
            f"output_dir: {output_dir} holds another run than {folder}; give the run's own folder, or an empty one"
        )


def _check_parts(folder: Path, *names: str) -> None:
    for name in names:
        if not (folder / name).exists():
            raise KvrlError(f"checkpoint.resume: {folder / name} is missing; resume from a complete checkpoint")


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value before, value now) wherever two configurations differ; None for a field without value."""
    for name in dict.fromkeys([*now, *before]):
        was, is_now = before.get(name), now.get(name)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, f"{prefix}{name}.")
        elif was != is_now:
            yield prefix + name, was, is_now


def _shown(value: Any) -> str:
    """A field's value as a flag takes it: YAML."""
    return json.dumps(value) if isinstance(value, dict | list | None) else repr(value)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise KvrlError(f"checkpoint.resume: {file} is no JSON ({error}); resume from another checkpoint") from None


def load_training(
    folder: Path, *, optimizer: Any, scheduler: Any, critic: nn.Module | None = None, distiller: Distiller | None = None
) -> None:
    """Restore optimiser, scheduler, the global random stream, and what learns or moves beside the model."""
    file = folder / TRAINING
    try:
        saved = torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:80]
        raise KvrlError(
            f"checkpoint.resume: {file} cannot be read ({reason}); resume from another checkpoint"
        ) from None
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["torch_rng"])
    for part, state in ((critic, saved["critic"]), (distiller, saved["distiller"])):
        if part is not None:
            part.load_state_dict(state)


def _checkpoints(output_dir: Path) -> list[Path]:
    found = (output_dir / CHECKPOINTS).glob("step-*")
    return sorted(p for p in found if (p / STATE).is_file() and p.suffix != ".partial")
