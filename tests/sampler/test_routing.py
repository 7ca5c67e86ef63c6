"""Mixtures of experts: batch-independent kernels while sampling, and the experts that each token took."""

from __future__ import annotations

import pytest
import torch

from helpers import make_prompts, model, sample
from kvrl.sampler.routing import RoutingRecorder, flipped

FAMILIES = ["qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_experts_are_those_of_the_stock_forward(name):
    """With the full context (a short rollout) the sampler's experts are the model's own."""
    lm = model(name)
    rollouts = sample(lm, make_prompts([6, 11, 14]), new=6, slots=2)
    layers = lm.config.num_hidden_layers
    for r in rollouts:
        assert r.routing.shape == (layers, r.num_tokens - 1, 2) and r.routing.dtype == torch.int16
        chosen = []
        routers = [m for m in lm.modules() if type(m).__name__.endswith("TopKRouter")]
        handles = [m.register_forward_hook(lambda m, a, out, to=chosen: to.append(out[-1])) for m in routers]
        with torch.no_grad():
            lm(input_ids=torch.tensor([r.token_ids[:-1]]), use_cache=False)
        for handle in handles:
            handle.remove()
        assert flipped(r.routing, torch.stack(chosen)) == 0.0


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_are_switched_and_restored(name):
    lm = model(name)
    before = lm.config._experts_implementation
    with RoutingRecorder.attached(lm, batch_invariant=True) as recorder:
        assert recorder is not None and lm.config._experts_implementation == "batched_mm"
    assert lm.config._experts_implementation == before
    with RoutingRecorder.attached(lm, batch_invariant=False):
        assert lm.config._experts_implementation == before
    with pytest.raises(ZeroDivisionError), RoutingRecorder.attached(lm, batch_invariant=True):
        raise ZeroDivisionError
    assert lm.config._experts_implementation == before
    with RoutingRecorder.attached(model("llama"), batch_invariant=True) as recorder:
        assert recorder is None


def test_flips_by_hand():
    sampler = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    learner = torch.tensor([[[1, 0], [2, 4]], [[4, 5], [6, 7]]])  # order does not matter, one of four sets differs
    assert flipped(sampler, learner) == 0.25
