"""The tiny model of the quickstart: Llama-shaped, random, with a word-level tokenizer of its own.

About 450,000 parameters: large enough to learn a recurrence in a minute on one core, and small enough to ship
as a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


def build_tiny_tokenizer(vocab: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose texts are the symbols of `vocab` with a space between them, one token each.

    BOS is written out in the prompt (`<bos> #20 3 7`): nothing is added to a text.
    """
    ids = {symbol: index for index, symbol in enumerate([PAD, BOS, EOS, UNK, *vocab])}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK,
        padding_side="right", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The model with random weights of that seed; the global random stream is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # At this width the usual 0.02 learns a recurrence several times slower, and some seeds hardly at all.
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # wavelengths that fit 128 positions
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_tiny(folder: str | Path, vocab: Sequence[str], seed: int) -> Path:
    """Write the tiny model and its tokenizer as an ordinary model folder, and return the folder."""
    tokenizer = build_tiny_tokenizer(vocab)
    build_tiny_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)
