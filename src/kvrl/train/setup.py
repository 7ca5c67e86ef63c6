"""From a configuration to a model: weights, tokenizer, adapters, reference."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrl.beacons.config import beacons_for, beacons_of, params_of
from kvrl.beacons.model import add_beacon, restore_beacon, token_id
from kvrl.errors import KvrlError
from kvrl.models.fetch import resolve_model
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks import Task
from kvrl.train.config import Config

BROKEN = (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, StrictDataclassError)
"""What transformers raises for the folder of a model that is broken, or none that it knows."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REFERENCE = "reference"
"""The starting model, beside a run's checkpoints: a resumed run has the same one."""
ADAPTERS = "adapters"
"""In a checkpoint whose `model` has them merged: the adapters, as they are trained on."""


def load_policy(config: Config, task: Task, folder: Path | None) -> tuple[nn.Module, Any]:
    """The model to train, adapters attached, and its tokenizer; from a checkpoint's `model` folder if given."""
    start = config.model.path
    if config.lora is None and folder is not None:
        start = str(folder)
    if start == "tiny":
        tokenizer = tiny_tokenizer(task)
        model: nn.Module = build_tiny_model(tokenizer, config.seed)
        for parameter in model.parameters():  # parameters alone: `model.to` would round RoPE's frequencies too
            parameter.data = parameter.data.to(DTYPES[config.model.dtype])
    else:
        model, tokenizer = load_model(start, config.model.dtype, merge=True)
        if folder is None and config.warm_start is not None and beacons_of(model) is not None:
            raise KvrlError(
                f"warm_start: would train {start} without the beacons that it has, and it would read them no longer; "
                "set warm_start to null"
            )
    if config.cache.is_beacon:
        give_beacon(model, tokenizer, config)
    if config.lora is not None:
        model = add_lora(model, config, folder)
    if config.model.gradient_checkpointing:
        checkpoint_activations(model)
        if config.lora is not None:  # frozen embeddings have no gradient to start the recomputation from
            model.enable_input_require_grads()  # type: ignore[operator]
    return model, tokenizer


def give_beacon(model: nn.Module, tokenizer: Any, config: Config) -> None:
    """Add the beacon that a configuration asks for, or check that the model's own is it."""
    if (own := beacons_of(model)) is not None:
        beacons_for(config.cache, model)
        if (token := config.beacons.token) is not None and token_id(tokenizer, token, "beacons.token") != own.token_id:
            raise KvrlError(
                f"beacons.token: {token!r} is not the beacon that the model has, "
                f"{tokenizer.convert_ids_to_tokens(own.token_id)!r}; leave beacons.token out"
            )
        if config.beacons.start != "mean":
            raise KvrlError(
                f"beacons.start: {config.beacons.start!r} has no meaning for a model that has a beacon already; leave "
                "it out"
            )
        return
    params = params_of(config.cache)
    assert params.rates is not None  # the configuration names them
    add_beacon(
        model, tokenizer, every=params.rates, positions=params.positions or "sequence", token=config.beacons.token,
        start=config.beacons.start,
    )  # fmt: skip


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute each layer in the backward pass (under the name that this transformers has for it)."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})  # type: ignore[operator]


def tiny_tokenizer(task: Task) -> Any:
    """The tokenizer of `tiny`. KvrlError for a task without a vocabulary."""
    if not hasattr(task, "vocab"):
        raise KvrlError(
            f"model.path: tiny has the vocabulary of its task, and task {task.name} has none; "
            "set model.path to a model folder"
        )
    return build_tiny_tokenizer(task.vocab)


def load_model(path: str, dtype: str, *, merge: bool = False, field: str = "model.path") -> tuple[nn.Module, Any]:
    """A model folder, a fetched name or a hub name, with its tokenizer. KvrlError if there is none.

    A folder of LoRA adapters is loaded on the base model that it names. merge: fold the adapters into the base's
    weights, so that all of them can be trained or get new adapters (bfloat16 rounds them). field: what a message
    calls the path.
    """
    folder = resolve_model(path, field)
    if not Path(folder).is_dir():
        check_hub(path, field)
    tokenizer = load_tokenizer(path, folder, field)
    try:
        if not (Path(folder) / "adapter_config.json").is_file():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]), tokenizer
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(base_of_adapters(folder), dtype=DTYPES[dtype])
        restore_beacon(Path(folder), base)
        model = PeftModel.from_pretrained(base, folder)
    except BROKEN as error:
        if isinstance(error, KvrlError):
            raise
        raise KvrlError(
            f"{field}: {path} cannot be loaded ({first_line(error)}); give a complete folder of a causal language "
            "model that this version of transformers knows"
        ) from error
    return merged(model).requires_grad_(True) if merge else model, tokenizer


def merged(model: Any) -> nn.Module:
    """A model's adapters folded into its base, in place. It names no folder any more: none holds these weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if head.weight is table.weight and any(isinstance(layer, BaseTunerLayer) for layer in (table, head)):
        own = getattr(head, "base_layer", head)  # what is learned for the one must not go into the other
        own.weight = nn.Parameter(own.weight.detach().clone())
        base.config.tie_word_embeddings = False
    base = model.merge_and_unload()
    base.name_or_path = ""
    return base


def check_hub(path: str, field: str) -> None:
    """Raise KvrlError, once and in one line, for a hub id that neither the hub nor its local cache gives."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    names = ("config.json", "adapter_config.json")
    if any(isinstance(try_to_load_from_cache(path, name), str) for name in names):
        return
    reason = "it has neither config.json nor adapter_config.json"
    for name in names:
        try:
            hf_hub_download(path, name)
            return
        except LocalEntryNotFoundError:
            reason = "it cannot be reached"
            break
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:  # no such repository, or no right to read it
            reason = first_line(error)
            break
    raise KvrlError(
        f"{field}: {path} is no folder here, and the hub did not give it ({reason}); check the name, the network and "
        "the login (`hf auth login`), or give a local folder"
    )


def load_tokenizer(path: str, folder: str, field: str) -> Any:
    """The tokenizer of a model. KvrlError if there is none, or one that cannot be read."""
    try:
        if Path(folder).is_dir() and not any(Path(folder).glob("*token*")):
            raise FileNotFoundError("the folder has none")  # transformers 5.2 would make an empty one
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a broken tokenizer.json is a bare Exception of the library's
        raise KvrlError(
            f"{field}: the tokenizer of {path} cannot be loaded ({first_line(error)}); give a folder that holds a "
            "model and its tokenizer, both written by save_pretrained"
        ) from error


def first_line(error: Exception, limit: int = 160) -> str:
    """The first line of a library's message, without its full stop."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".:")
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def base_of_adapters(folder: str) -> str:
    """What the base model of a folder of adapters is loaded from. KvrlError if the folder names none that exists."""
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise KvrlError(
            f"model.path: {folder} holds LoRA adapters and names no base model (one that started from `tiny` was "
            "never saved); train from a model folder"
        )
    try:
        return resolve_model(base)
    except KvrlError as error:
        raise KvrlError(f"model.path: {folder} holds LoRA adapters whose base model is missing: {error}") from None


def add_lora(model: nn.Module, config: Config, folder: Path | None) -> nn.Module:
    """Attach new adapters, or those of a checkpoint, of which `folder` is the model's."""
    from peft import LoraConfig, PeftModel, get_peft_model

    assert config.lora is not None
    if folder is not None:
        beside = folder.with_name(ADAPTERS)
        return PeftModel.from_pretrained(model, beside if beside.is_dir() else folder, is_trainable=True)
    modules = [name for name, _ in model.named_modules()]
    for wanted in config.lora.modules_to_save:
        if not any(name == wanted or name.endswith(f".{wanted}") for name in modules):
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in modules} - {""} - set(map(str, range(999)))))
            raise KvrlError(f"lora.modules_to_save: {wanted} is no module of the model; choose among {known}")
    beacons = beacons_of(model)
    if beacons is not None:
        check_embedding_is_free(model, config)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.target_modules,
        modules_to_save=config.lora.modules_to_save or None,
        lora_dropout=0.0,
        # A beacon's embedding is new: no adapter of the layers could teach it
        trainable_token_indices=None if beacons is None else [beacons.token_id],
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return get_peft_model(model, lora)
    except ValueError as error:
        raise KvrlError(f"lora.target_modules: {config.lora.target_modules} is refused ({error})") from error


def check_embedding_is_free(model: Any, config: Config) -> None:
    """Raise KvrlError for adapters on the embedding, of which the beacon's row alone can learn beside them."""
    assert config.lora is not None
    name_of = {module: name for name, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = [name_of[table], name_of[head]] if head.weight is table.weight else [name_of[table]]
    for field in ("modules_to_save", "target_modules"):
        wanted = getattr(config.lora, field)
        for given in [] if isinstance(wanted, str) else wanted:
            if any(name == given or name.endswith(f".{given}") for name in layers):
                raise KvrlError(
                    f"lora.{field}: {given} is the embedding, of which a beacon's row is trained alone; leave {given} "
                    "out, or leave lora out to train all weights"
                )


class Reference:
    """The policy that the KL is taken against, frozen: the model as it was when the run began.

    With LoRA it shares the base: the adapters are off, or (if a warm start trained them) as they were.
    """

    def __init__(self, model: nn.Module, *, lora: bool, adapters: dict[str, Tensor] | None = None) -> None:
        self.lora, self.model, self.adapters = lora, model, adapters
        if not lora:
            self.model = copy.deepcopy(model).requires_grad_(False).eval()

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The reference model inside the block."""
        if not self.lora:
            yield self.model
        elif self.adapters is None:
            with self.model.disable_adapter():  # type: ignore[operator]
                yield self.model
        else:
            trained = adapters_of(self.model)
            try:
                self._use(self.adapters)
                yield self.model
            finally:
                self._use(trained)

    def save(self, folder: Path) -> None:
        """Keep what a resumed run cannot make anew: the model, or the adapters that a warm start trained."""
        if not self.lora:
            self.model.save_pretrained(folder)  # type: ignore[operator]
        elif self.adapters is not None:
            folder.mkdir(parents=True)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in self.adapters.items()}
            save_file(tensors, folder / "adapters.safetensors")

    @classmethod
    def load(cls, folder: Path, model: Any, *, lora: bool) -> Reference:
        """What `save` kept, for the model that learns."""
        if not lora:
            kept = type(model).from_pretrained(folder, dtype=model.dtype)
            return cls(kept.to(model.device), lora=False)
        tensors = load_file(folder / "adapters.safetensors")
        return cls(model, lora=True, adapters={name: tensor.to(model.device) for name, tensor in tensors.items()})

    def _use(self, adapters: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if name in adapters:
                parameter.data = adapters[name]


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything that is trained, by name: the tensors themselves."""
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}
