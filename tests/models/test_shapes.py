"""Known shapes against the parameter counts that their authors publish; models as shapes alone."""

from __future__ import annotations

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.models.shapes import SHAPES, meta_policy, model_config
from kvrl.models.tiny import make_tiny
from kvrl.tasks import get_task
from kvrl.train.config import Config
from kvrl.train.setup import load_policy

PUBLISHED = {  # parameters of the checkpoints' safetensors headers, tied ones counted once
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
}


def run_config(path: str = "tiny", **fields) -> Config:
    return Config(model={"path": path, "dtype": fields.pop("dtype", "float32")}, **fields)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_ones(name):
    model = meta_policy(run_config(f"{name}-Instruct", dtype="bfloat16"))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
    assert {p.device.type for p in model.parameters()} == {"meta"} and model.dtype == torch.bfloat16


def test_names():
    for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"):
        assert model_config(name).num_hidden_layers == 30
    assert model_config("Qwen/Qwen3-0.6B-Base").head_dim == 128


def test_a_folder_is_read_and_lora_is_attached_as_in_training(tmp_path):
    folder = make_tiny(tmp_path / "m", get_task("recurrence").vocab, seed=0)
    for fields in ({}, {"lora": {"r": 4, "modules_to_save": ["lm_head"]}}):
        for dtype in ("float32", "bfloat16"):
            config = run_config(str(folder), dtype=dtype, **fields)
            real = load_policy(config, get_task("recurrence"), None)[0]
            planned = meta_policy(config)
            expected = [(n, p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()]
            assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in planned.named_parameters()] == expected


def test_a_folder_of_adapters_has_its_bases_shape(tmp_path):
    folder = make_tiny(tmp_path / "m", get_task("recurrence").vocab, seed=0)
    model = load_policy(run_config(str(folder), lora={"r": 4}), get_task("recurrence"), None)[0]
    model.save_pretrained(tmp_path / "adapters")
    assert model_config(str(tmp_path / "adapters")).hidden_size == 128


def test_unknown_models(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(KvrlError, match="no folder, no hub id"):
        model_config("nowhere")
    with pytest.raises(KvrlError, match="model.path: the shape of someone/unheard-of cannot be read.*Qwen2.5-7B"):
        model_config("someone/unheard-of")
    with pytest.raises(KvrlError, match="task jsonl has none"):
        meta_policy(run_config(task={"name": "jsonl", "params": {"path": __file__}}))
