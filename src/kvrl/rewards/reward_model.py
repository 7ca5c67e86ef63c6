"""A reward model: a transformers checkpoint for sequence classification with one output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from kvrl.errors import KvrlError
from kvrl.models.fetch import resolve_model
from kvrl.rewards.base import Reward
from kvrl.train.setup import BROKEN, first_line, load_tokenizer

FIELD = "reward.funcs.reward_model"


class RewardModel(Reward):
    """The model's one logit for prompt and completion.

    A prompt of chat messages gets the completion as the assistant's message and the reward model's own chat template.
    A text prompt is put in front of the completion as it is.
    """

    name: ClassVar[str] = "reward_model"

    path: str
    """A model folder or a hub name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights."""
    batch_size: int = Field(16, ge=1)
    """Completions of one forward pass."""
    max_length: int | None = Field(None, ge=1)
    """Most tokens of prompt and completion. None: the model's own limit."""
    on_long: Literal["stop", "truncate"] = "stop"
    """A longer text stops the run, or loses its first tokens."""
    device: str | None = None
    """Where it runs. None: the run's device."""

    _model: Any = PrivateAttr(None)
    _tokenizer: Any = PrivateAttr(None)
    _pad: int | None = PrivateAttr(None)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("prompts",)

    def prepare(self, device: torch.device) -> None:
        place = device if self.device is None else usable(self.device)
        self._model, self._tokenizer = load(self.path, getattr(torch, self.dtype))
        self._model.to(place)
        self._pad = self._model.config.get_text_config().pad_token_id

    def check(self, columns: Mapping[str, list]) -> None:
        if self._tokenizer.chat_template is None and not isinstance(columns["prompts"][0], str):
            raise KvrlError(
                f"{FIELD}.params.path: the tokenizer of {self.path} has no chat template, and the prompts are chat "
                "messages; give another model, or prompts as text"
            )

    def __call__(self, completions: list[str], **columns: list) -> list[float]:
        ids = [self._encode(prompt, text) for prompt, text in zip(columns["prompts"], completions, strict=True)]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))  # like lengths together: less padding
        rewards = torch.zeros(len(ids))
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            rewards[rows] = logits(self._model, [ids[i] for i in rows], self._pad)
        return rewards.tolist()

    def _encode(self, prompt: str | list[dict[str, str]], text: str) -> list[int]:
        if isinstance(prompt, str):
            ids = self._tokenizer(prompt + text)["input_ids"]
        else:
            messages = [*prompt, {"role": "assistant", "content": text}]
            ids = self._tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        own = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        limit: int = self.max_length or own or len(ids)
        if len(ids) > limit and self.on_long == "stop":
            raise KvrlError(
                f"{FIELD}.params.max_length: a prompt with its completion has {len(ids)} tokens, over the limit of "
                f"{limit}; shorten prompts or sampling.max_completion_length, or set on_long to truncate"
            )
        return ids[-limit:]


def usable(device: str) -> torch.device:
    """The device of that name. Errors: KvrlError for one that there is not."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two if torch is built without it
        raise KvrlError(f"{FIELD}.params.device: {device} cannot be used ({first_line(error)}); give cpu, or leave "
                        "it out for the run's device") from error  # fmt: skip


def load(path: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model (loaded in eval mode) and its tokenizer. Errors: KvrlError for what is no reward model."""
    from transformers import AutoModelForSequenceClassification

    folder = resolve_model(path, f"{FIELD}.params.path")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except BROKEN as error:
        raise KvrlError(f"{FIELD}.params.path: {path} cannot be loaded as a reward model ({first_line(error)}); give a "
                        "complete folder or hub name of one") from error  # fmt: skip
    if model.config.num_labels != 1:
        raise KvrlError(f"{FIELD}.params.path: {path} has num_labels {model.config.num_labels}, and a reward model "
                        "has 1; give a checkpoint with one output")  # fmt: skip
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise KvrlError(f"{FIELD}.params.path: {path} lacks the weights {missing}, which would be random; give a "
                        "checkpoint trained for sequence classification")  # fmt: skip
    return model, load_tokenizer(path, folder, f"{FIELD}.params.path")


@torch.inference_mode()
def logits(model: Any, ids: list[list[int]], pad: int | None) -> Tensor:
    """The model's output for each sequence, padded on the right: f32 [N] on the CPU.

    transformers reads the last token that is not `pad_token_id` of the model's config. So `pad`, the checkpoint's own
    id there, fills up, whatever the tokenizer's is; if it has none, an id that occurs in no sequence. A batch then
    gives what each sequence gives alone.
    """
    if pad is None:
        used = {token for sequence in ids for token in sequence}
        pad = next(token for token in range(model.config.get_text_config().vocab_size) if token not in used)
    model.config.get_text_config().pad_token_id = pad
    width = max(map(len, ids))
    input_ids = torch.tensor([s + [pad] * (width - len(s)) for s in ids], device=model.device)  # [N, T]
    lengths = torch.tensor([len(s) for s in ids], device=model.device)  # [N]
    mask = torch.arange(width, device=model.device) < lengths[:, None]  # [N, T]
    return model(input_ids=input_ids, attention_mask=mask.long()).logits[:, 0].float().cpu()
