"""Adding a beacon to a model and its tokenizer, and keeping it with adapters, which save no config of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from kvrl.attention.probe import text_config
from kvrl.beacons.config import FIELD, BeaconSet, beacons_of, check_rates, plain_integer, whole_numbers
from kvrl.beacons.plan import Positions
from kvrl.errors import KvrlError

NAME = "<|beacon|>"
"""The new token's text, which no prompt should hold."""
ADAPTER_CONFIG = "adapter_config.json"  # peft's
FILE = f"{FIELD}.json"
"""Beside a folder of adapters: what the model's config says of its beacons."""
RESERVED = re.compile(r"<.*(unused|reserved).*>|\[.*(unused|reserved).*\]")
"""Tokens that no text holds though they are not marked special, as Gemma's <unused0>."""


def add_beacon(
    model: Any,
    tokenizer: Any,
    *,
    every: int | Sequence[int],
    positions: Positions = "sequence",
    token: str | None = None,
    start: str = "mean",
) -> BeaconSet:
    """Give a model a beacon, in place, and say so in its config, with which it is saved.

    every: raw tokens of a window, or the set of them that it is trained with. token: a reserved token, which becomes
    the beacon; None: a new one, with a new row of the embedding. start: where its embedding starts, `mean` of all
    others, or a token whose embedding it takes. Raises KvrlError for a token that cannot be used, for a
    model that has a beacon, and for one with adapters, which must be added after it.
    """
    rates = tuple(sorted(whole_numbers(every, "every")))
    check_rates(rates, "every")
    if positions not in get_args(Positions):
        raise KvrlError(
            f"positions: {positions!r} is refused; it should be {' or '.join(map(repr, get_args(Positions)))}"
        )
    if beacons_of(model) is not None:
        raise KvrlError(f"model: has a beacon already ({getattr(text_config(model), FIELD)}); use it as it is")
    if hasattr(model, "peft_config"):
        raise KvrlError("model: has adapters, which hold the embedding as it was; add the beacon before them")
    known = len(tokenizer)
    like = None if start == "mean" else token_id(tokenizer, start, "beacons.start")
    index = new_token(tokenizer) if token is None else reserved_token(model, tokenizer, token)
    make_room(model, index)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        others = [i for i in range(min(known, len(weight))) if i != index]
        row = weight[others].float().mean(dim=0) if like is None else weight[like]
        tables: list[nn.Parameter] = [model.get_input_embeddings().weight, head_of(model).weight]  # which may be one
        for table in tables:
            table[index] = row.to(table.dtype)
    found = BeaconSet(index, rates, positions)
    setattr(text_config(model), FIELD, found.as_config())
    return found


def token_id(tokenizer: Any, token: str, field: str) -> int:
    """The id of a token by its text. KvrlError if the tokenizer has none."""
    ids = tokenizer.get_vocab()
    if token not in ids:
        raise KvrlError(
            f"{field}: {token!r} is no token of this tokenizer, which has {len(ids)}; name one that it has, or leave "
            f"{field} out"
        )
    return ids[token]


def new_token(tokenizer: Any) -> int:
    """The id of the beacon's own token, added to the tokenizer if it is not there."""
    tokenizer.add_tokens([NAME], special_tokens=True)
    index = tokenizer.convert_tokens_to_ids(NAME)
    if index is None or index == tokenizer.unk_token_id:
        raise KvrlError("beacons.token: this tokenizer takes no new token; name a reserved one that it has")
    return index


def reserved_token(model: Any, tokenizer: Any, token: str) -> int:
    """The id of a token that shall be the beacon. KvrlError for one that means something else, such as a word."""
    index = token_id(tokenizer, token, "beacons.token")
    added = tokenizer.added_tokens_decoder.get(index)
    special = index in tokenizer.all_special_ids or (added is not None and added.special)
    if not special and not RESERVED.fullmatch(token):
        raise KvrlError(
            f"beacons.token: {token!r} is an ordinary token, which texts may hold; name a special or an unused one, or "
            "leave beacons.token out for a new one"
        )
    ends = getattr(model.generation_config, "eos_token_id", None) if hasattr(model, "generation_config") else None
    taken = {
        *(ends if isinstance(ends, list) else [ends]),
        *(getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad", "unk")),
    }
    if index in taken:
        raise KvrlError(
            f"beacons.token: {token!r} has a meaning already (it begins, ends or fills sequences); name a reserved "
            "token, or leave beacons.token out for a new one"
        )
    return index


def make_room(model: Any, index: int) -> None:
    """Let the embedding have a row of that index. KvrlError for a model whose embedding cannot grow."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise KvrlError(
            f"model: its embedding is a {type(embedding).__name__}, which has no room for a beacon; use a model with "
            "an ordinary embedding"
        )
    if index >= embedding.num_embeddings:
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        with torch.random.fork_rng(devices):  # new rows are drawn at random before they are set
            model.resize_token_embeddings(index + 1, mean_resizing=False)


def head_of(model: Any) -> Any:
    """The language-model head."""
    return model.get_output_embeddings()


def save_beacon(folder: Path, model: Any) -> None:
    """Keep the beacon beside adapters; a whole model's config holds it."""
    if hasattr(model, "peft_config") and (found := beacons_of(model)) is not None:
        (folder / FILE).write_text(json.dumps(found.as_config()))


def restore_beacon(folder: Path, base: Any) -> None:
    """Make room for the beacon of adapters in their base model, and say so in its config.

    KvrlError unless the adapters were trained with that beacon.
    """
    file = folder / FILE
    if not file.is_file():
        return
    try:
        held = json.loads(file.read_text())
        index = plain_integer(held["token_id"])
        trained = json.loads((folder / ADAPTER_CONFIG).read_text())["trainable_token_indices"]
    except (ValueError, TypeError, KeyError):
        raise KvrlError(f"model.path: {file} is no description of a beacon; restore the folder") from None
    if trained != [index]:
        raise KvrlError(
            f"model.path: {file} says that token {index} is the beacon, and the adapters beside it were trained with "
            f"{trained}; restore the folder"
        )
    make_room(base, index)
    setattr(text_config(base), FIELD, held)
    beacons_of(base)
