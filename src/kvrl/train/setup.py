"""From a configuration to a model: weights, tokenizer, adapters, reference."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrl.errors import KvrlError
from kvrl.models.fetch import resolve_model
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks import Task
from kvrl.train.config import Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_policy(config: Config, task: Task, folder: Path | None) -> tuple[nn.Module, Any]:
    """The model to train, adapters attached, and its tokenizer; from a checkpoint's `model` folder if given."""
    start = config.model.path
    if config.lora is None and folder is not None:
        start = str(folder)
    if start == "tiny":
        if not hasattr(task, "vocab"):
            raise KvrlError(
                f"model.path: tiny has the vocabulary of its task, and task {task.name} has none; "
                "set model.path to a model folder"
            )
        tokenizer = build_tiny_tokenizer(task.vocab)
        model: nn.Module = build_tiny_model(tokenizer, config.seed)
        for parameter in model.parameters():  # parameters alone: `model.to` would round RoPE's frequencies too
            parameter.data = parameter.data.to(DTYPES[config.model.dtype])
    else:
        model, tokenizer = load_model(start, config.model.dtype)
    if config.lora is not None:
        model = add_lora(model, config, folder)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if config.lora is not None:  # frozen embeddings have no gradient to start the recomputation from
            model.enable_input_require_grads()  # type: ignore[operator]
    return model, tokenizer


def load_model(path: str, dtype: str) -> tuple[nn.Module, Any]:
    """A model folder, a fetched name or a hub name, with its tokenizer. KvrlError if there is none."""
    folder = resolve_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    except OSError as error:
        raise KvrlError(f"model.path: {path} cannot be loaded ({str(error).splitlines()[0]})") from error
    return model, tokenizer


def add_lora(model: nn.Module, config: Config, folder: Path | None) -> nn.Module:
    """Attach new adapters, or those of a checkpoint."""
    from peft import LoraConfig, PeftModel, get_peft_model

    assert config.lora is not None
    if folder is not None:
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        modules_to_save=config.lora.modules_to_save or None,
        lora_dropout=0.0,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return get_peft_model(model, lora)
    except ValueError as error:
        raise KvrlError(f"lora.target_modules: {config.lora.target_modules} is refused ({error})") from error


class Reference:
    """The policy that the KL is taken against: the adapters off, or a frozen copy of the starting model."""

    def __init__(self, model: nn.Module, *, lora: bool) -> None:
        self.lora, self.model = lora, model
        if not lora:
            self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The reference model inside the block."""
        if self.lora:
            with self.model.disable_adapter():  # type: ignore[operator]
                yield self.model
        else:
            yield self.model
