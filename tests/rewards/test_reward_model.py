from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_tokenizer
from kvrl.rewards.reward_model import RewardModel, logits

CPU = torch.device("cpu")
WORDS = [*"abcdefgh"]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"  # `u a b a c `: u, s are unknown
TEXTS = ["a", "b c d e f", "", "h g", "a a a a a a a a a"]
PROMPTS = ["a b", "c", "d e f g", "h", "a"]


def save(
    folder: Path, kind: Any = LlamaForSequenceClassification, template: str | None = TEMPLATE, **changes: Any
) -> str:
    """A tiny random model with weights large enough that every token matters."""
    tokenizer = build_tiny_tokenizer(WORDS)
    tokenizer.chat_template = template
    fields = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, **changes}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.4, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, **fields,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def ready(path: str, **params: Any) -> RewardModel:
    reward = RewardModel(path=path, dtype="float32", **params)
    reward.prepare(CPU)
    return reward


def stock(path: str, ids: list[int]) -> float:
    """What transformers itself says of one sequence."""
    model = LlamaForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


def test_batches_of_any_size_give_what_transformers_gives_one_by_one(tmp_path: Path) -> None:
    path = save(tmp_path)
    tokenizer = build_tiny_tokenizer(WORDS)
    expected = [stock(path, tokenizer(p + t)["input_ids"]) for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert len({round(value, 3) for value in expected}) == len(expected)
    for batch_size in (1, 2, 5):
        assert ready(path, batch_size=batch_size)(TEXTS, prompts=PROMPTS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("pad", [None, "eos"])
def test_a_pad_token_that_also_ends_texts(tmp_path: Path, pad: str | None) -> None:
    tokenizer = build_tiny_tokenizer(WORDS)
    eos = tokenizer.eos_token_id
    path = save(tmp_path, pad_token_id=None if pad is None else eos)
    reward = ready(path)
    ids = [[4, 5, eos], [4, 0], [6, 4, 5, eos, 5, 4, eos], [eos, eos, 6]]
    expected = [stock(path, sequence) for sequence in ids]
    for _ in range(2):  # the id that pads must be found anew
        assert logits(reward._model, ids, reward._pad).tolist() == pytest.approx(expected, abs=1e-5)


def test_padding_has_no_influence(tmp_path: Path) -> None:
    reward = ready(save(tmp_path))
    alone = reward(["b c"], prompts=["a"])
    beside = reward(["b c", "a b c d e f g h a b c"], prompts=["a", "h g f"])
    assert beside[0] == pytest.approx(alone[0], abs=1e-6) and beside[1] != pytest.approx(alone[0], abs=1e-2)


def test_chat_messages_get_the_model_s_own_template(tmp_path: Path) -> None:
    path = save(tmp_path)
    prompt = [{"role": "user", "content": "a b"}]
    reward = ready(path)
    tokenizer = build_tiny_tokenizer(WORDS)
    ids = tokenizer("u a b a c d ", add_special_tokens=False)["input_ids"]
    assert reward(["c d"], prompts=[prompt]) == pytest.approx([stock(path, ids)], abs=1e-5)


def test_chat_messages_without_a_template_are_refused_at_the_start(tmp_path: Path) -> None:
    reward = ready(save(tmp_path, template=None))
    reward.check({"prompts": ["a"]})
    with pytest.raises(KvrlError, match=r"reward_model\.params\.path: the tokenizer of .* has no chat template"):
        reward.check({"prompts": [[{"role": "user", "content": "a"}]]})


def test_texts_over_the_limit(tmp_path: Path) -> None:
    path = save(tmp_path)
    with pytest.raises(KvrlError, match=r"params\.max_length: .* has 6 tokens, over the limit of 4;"):
        ready(path, max_length=4)(["c d e f"], prompts=["a b "])
    tokenizer = build_tiny_tokenizer(WORDS)
    last = tokenizer("c d e f", add_special_tokens=False)["input_ids"]
    cut = ready(path, max_length=4, on_long="truncate")(["c d e f"], prompts=["a b "])
    assert cut == pytest.approx([stock(path, last)], abs=1e-5)
    with pytest.raises(KvrlError, match="has 33 tokens, over the limit of 32;"):
        ready(path)(["a " * 33], prompts=[""])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 2}, "has num_labels 2, and a reward model has 1"),
        ({"kind": LlamaForCausalLM}, r"lacks the weights score\.weight, which would be random"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KvrlError, match=message) as refused:
        ready(save(tmp_path, **changes))
    assert "\n" not in str(refused.value)


def corrupt(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nothing")


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"nothing")


def larger(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 48'))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("breaks", [corrupt, cut_short, pickled, larger, no_tokenizer])
def test_a_broken_checkpoint_is_one_line(tmp_path: Path, breaks: Any) -> None:
    path = save(tmp_path)
    breaks(tmp_path)
    with pytest.raises(KvrlError, match=r"^reward\.funcs\.reward_model\.params\.path: .* cannot be loaded") as refused:
        ready(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_there_is_not(tmp_path: Path, device: str) -> None:
    with pytest.raises(
        KvrlError, match=rf"reward_model\.params\.device: {device} cannot be used .*; give cpu"
    ) as refused:
        ready(save(tmp_path), device=device)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KvrlError):
        ready(str(tmp_path / "nothing"))
