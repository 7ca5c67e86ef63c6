"""Distillation between the views: values from whole logits, where the gradient goes, and what is computed at all."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from helpers import gap, make_prompts, model, sample
from kvrl import learner
from kvrl.attention.replay import ReplayContext
from kvrl.distill import Distillation
from kvrl.learner import Scorer
from kvrl.models.tiny_families import build_family


def whole_logps(lm, r, view: str) -> torch.Tensor:
    """Log-softmax over the vocabulary at every completion token, from the model's own logits: [C, V]."""
    ids = torch.tensor([r.token_ids])
    context = ReplayContext([r.trace] if view == "sparse" else None, r.num_tokens, backend="mask", device="cpu")
    logits = lm(input_ids=ids, position_ids=torch.arange(r.num_tokens)[None], use_cache=False, kv=context).logits
    return (logits[0, len(r.prompt_ids) - 1 : -1].float() / r.temperature).log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # one with a final soft-cap
@pytest.mark.parametrize("teacher", ["sparse", "dense"])
@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_divergence_by_whole_logits(family, teacher, kl):
    lm = model(family)
    rollouts = sample(lm, prompts=make_prompts([40, 42]), new=12, sampling_fields={"temperature": 0.8})
    with torch.no_grad():
        out = Scorer(lm, chunk=5)(rollouts, view="sparse", distill=Distillation(teacher, kl))
        for i, r in enumerate(rollouts):
            other = "dense" if teacher == "sparse" else "sparse"
            p, q = whole_logps(lm, r, teacher), whole_logps(lm, r, other)
            if kl == "reverse":
                p, q = q, p
            expected = (p.exp() * (p - q)).sum(-1)
            assert float(expected.max()) > 1e-3
            assert gap(out.divergence[i, :12], expected) < 1e-4


def test_a_truncated_distribution_is_compared_on_its_support():
    lm = model()
    rollouts = sample(lm, new=8, sampling_fields={"top_k": 4})
    with torch.no_grad():
        out = Scorer(lm)(rollouts, view="sparse", distill=Distillation("sparse"))
        for i, r in enumerate(rollouts):
            sparse, dense = whole_logps(lm, r, "sparse"), whole_logps(lm, r, "dense")
            for t in range(8):
                kept = r.support.ids[r.support.offsets[t] : r.support.offsets[t + 1]].long()
                p, q = (x[t, kept].log_softmax(-1) for x in (sparse, dense))
                assert float(out.divergence[i, t]) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-4)


@pytest.mark.parametrize("teacher", ["sparse", "dense"])
def test_the_gradient_is_the_students_alone(teacher):
    lm = copy.deepcopy(model())
    (r,) = sample(lm, prompts=make_prompts([18]), new=20)
    Scorer(lm)([r], view="sparse", distill=Distillation(teacher)).divergence.sum().backward()
    mine = {name: p.grad.clone() for name, p in lm.named_parameters()}
    twin = copy.deepcopy(model())
    student = whole_logps(twin, r, "dense" if teacher == "sparse" else "sparse")
    with torch.no_grad():
        target = whole_logps(twin, r, teacher)
    (target.exp() * (target - student)).sum().backward()
    for name, p in twin.named_parameters():
        assert torch.allclose(mine[name], p.grad, atol=1e-4, rtol=1e-3), name


def test_both_views_agree_where_nothing_was_evicted():
    lm = model()
    rollouts = sample(lm, prompts=make_prompts([5, 9]), new=10)
    assert all(r.trace.num_events == 0 for r in rollouts)
    with torch.no_grad():
        out = Scorer(lm)(rollouts, view="sparse", distill=Distillation("dense"))
    assert float(out.divergence.abs().max()) < 1e-6


def test_other_weights_teach_inside_their_context():
    lm, other = model(), build_family("llama")  # as it is loaded: not prepared
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    (r,) = sample(lm, prompts=make_prompts([40]), new=9)
    for teacher, student in (("dense", "sparse"), ("sparse", "dense")):
        distill = Distillation(teacher, weights=lambda: contextlib.nullcontext(other))
        with torch.no_grad():
            divergence = Scorer(lm)([r], view="sparse", distill=distill).divergence[0]
            p, q = whole_logps(learner.prepare(other), r, teacher), whole_logps(lm, r, student)
        assert gap(divergence, (p.exp() * (p - q)).sum(-1)) < 1e-4


def test_top_k_is_a_lower_bound_and_its_error_is_told():
    lm = model()
    rollouts = sample(lm, new=10)
    with torch.no_grad():
        exact = Scorer(lm)(rollouts, distill=Distillation("sparse"))
        cut = Scorer(lm)(rollouts, distill=Distillation("sparse", top_k=3))
    assert bool((cut.divergence <= exact.divergence + 1e-6).all()) and float(cut.top_k_error.max()) > 1e-4
    assert gap(cut.divergence + cut.top_k_error, exact.divergence) < 1e-5
    assert float(exact.top_k_error.abs().max()) == 0.0


@pytest.mark.parametrize(("distill", "trunks"), [(None, 1), (Distillation("sparse"), 2), (Distillation("dense"), 2)])
def test_no_view_is_computed_that_is_not_needed(monkeypatch, distill, trunks):
    lm = model()
    rollouts = sample(lm, new=6)
    calls = []
    hook = lm.model.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    scorer = Scorer(lm)
    calls.clear()
    scorer(rollouts, view="sparse", distill=distill)
    hook.remove()
    assert len(calls) == trunks
    if distill is not None:
        assert calls[1] == (distill.teacher == "sparse")  # the dense view has a gradient only where it learns
