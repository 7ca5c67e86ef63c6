"""Supervised warm start: a few steps on the task's worked solutions, so that rewards are not all zero."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrl.tasks import Task
from kvrl.train.micro_batch import MAX_TOKENS
from kvrl.train.section import WarmStart
from kvrl.train.supervised import Example, OnStep, completion_tokens, fit

IGNORED = -100  # a label that the cross-entropy leaves out


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: WarmStart,
    seed: int,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: OnStep | None = None,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, float]:
    """Train the model in place, by cross-entropy on the completions' tokens and their EOS; the rest is `fit`'s."""

    def cross_entropy(examples: list[Example], rows: list[int], step: int) -> Tensor:
        input_ids, labels = pad_batch(examples, _pad_id(tokenizer), model.device)
        # No attention mask: right padding lies after every real token, where causal attention cannot look.
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # [1, T]
        mean = model(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=False).loss
        return mean * completion_tokens(examples)

    return fit(model, tokenizer, task, settings, seed, cross_entropy, optimizer, on_step, max_tokens)


def pad_batch(batch: list[Example], pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Right-padded token ids and labels, both [B, T]; the labels leave prompt and padding out."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = torch.full((len(batch), length), pad_id)  # [B, T]
    labels = torch.full((len(batch), length), IGNORED)  # [B, T]
    for row, (ids, prompt_length) in enumerate(batch):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return input_ids.to(device), labels.to(device)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    # Padding is neither attended to nor trained on, so a model without a pad token may use any id.
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
