"""The tiny model and its tokenizer: one symbol one token, and the same after saving and loading."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer, make_tiny
from kvrl.tasks.recurrence import Recurrence

VOCAB = Recurrence().vocab


def test_each_symbol_is_one_token_and_texts_come_back():
    tokenizer = build_tiny_tokenizer(VOCAB)
    text = "<bos> #20 3 7 #3 3 + 7 = 0 <eos>"
    ids = tokenizer(text)["input_ids"]
    assert ids == [1, 4 + VOCAB.index("#20"), 7, 11, 4 + VOCAB.index("#3"), 7, 14, 11, 15, 4, 2]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "#20 3 7 #3 3 + 7 = 0"
    assert tokenizer("nonsense")["input_ids"] == [tokenizer.unk_token_id]
    assert len(tokenizer) == 4 + len(VOCAB)
    assert [tokenizer.decode([i]) for i in range(4, len(tokenizer))] == VOCAB


def test_a_step_has_six_tokens_and_a_trace_at_most_126():
    tokenizer = build_tiny_tokenizer(VOCAB)
    lengths = {
        len(tokenizer(f"{prompt} {text} <eos>")["input_ids"])
        for prompt, text in Recurrence().demonstrations(300, seed=0)
    }
    assert lengths == {5 + 6 * steps + 1 for steps in range(1, 21)}


def test_a_saved_folder_reads_back_the_same(tmp_path):
    folder = make_tiny(tmp_path / "tiny", VOCAB, seed=3)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    built = build_tiny_tokenizer(VOCAB)
    for prompt, text in Recurrence().demonstrations(20, seed=0):
        ids = built(f"{prompt} {text} <eos>")["input_ids"]
        assert tokenizer(f"{prompt} {text} <eos>")["input_ids"] == ids
        assert tokenizer.decode(ids) == built.decode(ids) == f"{prompt} {text} <eos>"
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id", "padding_side"):
        assert getattr(tokenizer, name) == getattr(built, name)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for name, value in build_tiny_model(built, seed=3).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_size_and_seed():
    tokenizer = build_tiny_tokenizer(VOCAB)
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    first, again, other = (build_tiny_model(tokenizer, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)  # the global stream was left as it was
    assert 400_000 < sum(parameter.numel() for parameter in first.parameters()) < 600_000
    weights = [model.model.layers[0].self_attn.q_proj.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
