"""Contract 7: train mode, checkpointing, order, micro-batches and extra passes change nothing."""

from __future__ import annotations

import copy

import pytest
import torch

import kvrl
from helpers import gap, make_prompts, model, replay, sample
from kvrl.attention.replay import ReplayContext
from kvrl.models.tiny_families import build_family

BACKENDS = ["mask", "segments"]


def gradients(lm, rollouts, backend="segments", extra_pass=False, chunk=1024):
    """Log-probs and gradients of their weighted sum, in the mode in which the model is."""
    lm.zero_grad(set_to_none=True)
    logps = kvrl.logprobs(lm, rollouts, backend=backend, chunk=chunk)
    if extra_pass:
        kvrl.logprobs(lm, rollouts[:1], view="dense").detach()
        sample(lm, prompts=make_prompts([7]), new=3)
        kvrl.logprobs(lm, list(reversed(rollouts)))
    weights = torch.linspace(-1.0, 1.0, logps.numel(), dtype=logps.dtype).view_as(logps)
    (logps * weights).sum().backward()
    return logps.detach(), {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def assert_close(a, b, tolerance):
    assert gap(a[0], b[0]) <= tolerance
    assert a[1].keys() == b[1].keys()
    for name, grad in a[1].items():
        assert gap(grad, b[1][name]) <= tolerance * max(1.0, grad.abs().max().item()), name


FAMILIES = ["llama", "gemma2", "gpt_oss", "qwen3_moe", "mistral"]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_both_backends_agree(name, double):
    lm = copy.deepcopy(model(name, 40, torch.float64)).train()
    rollouts = sample(lm, new=20)
    mask = gradients(lm, rollouts, "mask")
    assert all(name.startswith("lm_head") or grad.abs().max() > 0 for name, grad in mask[1].items())
    assert_close(gradients(lm, rollouts, "segments"), mask, 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_train_mode_and_checkpointing(name, backend, double, monkeypatch):
    lm = copy.deepcopy(model(name, 8, torch.float64))
    rollouts = sample(lm, new=20)
    evaluated = gradients(lm.eval(), rollouts, backend)
    trained = gradients(lm.train(), rollouts, backend)
    assert_close(trained, evaluated, 1e-12)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls, attend = [], ReplayContext.attend

    def counted(self, call):
        calls.append(call.layer)
        return attend(self, call)

    monkeypatch.setattr(ReplayContext, "attend", counted)
    assert_close(gradients(lm, rollouts, backend), trained, 1e-12)
    assert len(calls) == 2 * lm.config.num_hidden_layers  # every layer again in the backward pass
    assert_close(gradients(lm, rollouts, backend, extra_pass=True), trained, 1e-12)


def test_reentrant_checkpointing(double):
    lm = copy.deepcopy(model("llama", 8, torch.float64)).train()
    rollouts = sample(lm, new=20)
    plain = gradients(lm, rollouts)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    lm.enable_input_require_grads()
    assert_close(gradients(lm, rollouts), plain, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_between_forward_and_backward(backend):
    lm = copy.deepcopy(model())
    rollouts = sample(lm)
    plain, disturbed = gradients(lm, rollouts, backend), gradients(lm, rollouts, backend, extra_pass=True)
    assert torch.equal(plain[0], disturbed[0])
    assert all(torch.equal(grad, disturbed[1][name]) for name, grad in plain[1].items())


def test_a_pass_before_changes_nothing():
    lm = model()
    rollouts = sample(lm)
    first = replay(lm, rollouts)
    replay(lm, rollouts[1:], view="dense")
    assert torch.equal(replay(lm, rollouts), first)


def test_shuffled_and_cut_batches(double):
    lm = model("qwen2", 40, torch.float64)
    rollouts = sample(lm)
    whole = replay(lm, rollouts)
    order = [2, 0, 1]
    assert gap(replay(lm, [rollouts[i] for i in order]), whole[order]) < 1e-10
    for i, r in enumerate(rollouts):
        assert gap(replay(lm, [r]), whole[i : i + 1]) < 1e-10


def test_the_size_of_head_chunks_does_not_matter(double):
    lm = copy.deepcopy(model("gemma2", 8, torch.float64)).train()
    rollouts = sample(lm, new=20)
    assert_close(gradients(lm, rollouts, chunk=7), gradients(lm, rollouts), 1e-10)


def test_the_model_keeps_its_mode():
    lm = build_family("llama")
    sample(lm, new=2)
    assert lm.training
    sample(lm.eval(), new=2)
    assert not lm.training
