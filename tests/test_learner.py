"""Log-probs of rollouts under a view: values by hand, shapes, entropy, and what is refused."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model

import kvrl
from helpers import bar, gap, make_prompts, model, replay, sample, stock
from kvrl.cache.trace import KVTrace
from kvrl.errors import KvrlError
from kvrl.eval.oracle import full_forward_logprobs
from kvrl.learner import Scorer, make_targets


def test_dense_view_is_the_stock_models_forward():
    rollouts = sample()
    dense, limit = replay(model(), rollouts, view="dense"), bar(stock(), rollouts)
    for i, r in enumerate(rollouts):
        expected = full_forward_logprobs(stock(), r.token_ids, len(r.prompt_ids))
        assert gap(dense[i, : len(expected)], expected) <= limit


def test_shapes_padding_and_masks():
    short, long = sample(prompts=make_prompts([18]), new=4)[0], sample(prompts=make_prompts([6]), new=9)[0]
    logps = replay(model(), [short, long])
    assert logps.shape == (2, 9) and logps.dtype == torch.float32 and bool((logps[0, 4:] == 0).all())
    assert kvrl.completion_mask([short, long]).tolist() == [[True] * 4 + [False] * 5, [True] * 9]
    assert kvrl.sampler_logprobs([short, long])[0].tolist() == [*short.logprobs.tolist(), 0, 0, 0, 0, 0]
    masked = dataclasses.replace(long, loss_mask=torch.tensor([True, False, True] + [True] * 6))
    assert float(replay(model(), [masked])[0, 1]) == 0.0
    assert gap(replay(model(), [masked])[0, 2:], logps[1, 2:]) < 1e-5


def test_every_predictor_is_the_token_before():
    (r,) = sample(prompts=make_prompts([6]), new=3)
    targets = make_targets([dataclasses.replace(r, loss_mask=torch.tensor([True, False, True]))], "cpu")
    assert targets.predictor.tolist() == [5, 7] and targets.column.tolist() == [0, 2]
    assert targets.token.tolist() == [r.completion_ids[0], r.completion_ids[2]]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.7}])
def test_entropy_by_hand(fields):
    lm = model()
    rollouts = sample(lm, new=6, sampling_fields=fields)
    with torch.no_grad():
        entropy = Scorer(lm)(rollouts, view="dense").entropy
        for i, r in enumerate(rollouts):
            logits = stock()(torch.tensor([r.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1] / r.temperature
            for t in range(6):
                those = (
                    slice(None)
                    if r.support is None
                    else r.support.ids[r.support.offsets[t] : r.support.offsets[t + 1]].long()
                )
                p = logits[t, those].softmax(-1)
                assert float(entropy[i, t]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)
    assert not entropy.requires_grad


def test_gradient_of_the_dense_view_is_autograds():
    lm, twin = copy.deepcopy(model()), copy.deepcopy(stock())
    rollouts = sample(lm, prompts=make_prompts([9]), new=6)
    kvrl.logprobs(lm, rollouts, view="dense").sum().backward()
    (r,) = rollouts
    logps = twin(torch.tensor([r.token_ids])).logits[0, 8:-1].log_softmax(-1)
    logps.gather(1, torch.tensor(r.completion_ids)[:, None]).sum().backward()
    for (name, p), q in zip(lm.named_parameters(), twin.parameters(), strict=True):
        assert gap(p.grad, q.grad) < 1e-4 * max(1.0, q.grad.abs().max().item()), name


def test_adapters_get_gradients_and_the_reference_is_adapters_off():
    torch.manual_seed(0)
    base = copy.deepcopy(model())
    lm = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    rollouts = sample(lm)
    logps = kvrl.logprobs(lm, rollouts)
    assert gap(logps.detach(), kvrl.sampler_logprobs(rollouts)) < 1e-4
    logps.sum().backward()
    grads = {name for name, p in lm.named_parameters() if p.grad is not None}
    assert grads and all("lora_" in name for name in grads)
    with lm.disable_adapter():
        assert gap(replay(lm, rollouts), replay(model(), rollouts)) < 1e-5


def test_a_trace_of_other_tokens_is_refused():
    a, b = sample(prompts=make_prompts([6, 9]), new=4)
    with pytest.raises(kvrl.KvrlError, match=r"rollouts\[1\]: its trace covers 13 tokens, the rollout has 10"):
        replay(model(), [b, dataclasses.replace(a, trace=b.trace)])


def test_logits_of_the_whole_never_exist(monkeypatch):
    """No tensor with more than `chunk` rows of the vocabulary is made."""
    import kvrl.head

    sizes = []
    original = kvrl.head.Head.finish
    monkeypatch.setattr(kvrl.head.Head, "finish", lambda self, x: (sizes.append(x.shape[0]), original(self, x))[1])
    lm = copy.deepcopy(model())
    rollouts = sample(lm)
    sizes.clear()
    kvrl.logprobs(lm, rollouts, chunk=8).sum().backward()
    assert len(sizes) >= 2 * (90 // 8) and max(sizes) <= 8  # each chunk again in the backward pass


def test_a_trace_of_another_model_is_refused():
    (r,) = sample(prompts=make_prompts([18]))
    cut = KVTrace(r.trace.events[:1], r.trace.evicted_at_event, r.trace.budget, r.trace.buffer)
    with pytest.raises(KvrlError, match=r"rollouts\[0\]: its trace has \(1, 2\) layers and KV heads"):
        kvrl.logprobs(model(), [dataclasses.replace(r, trace=cut)])


def test_a_support_without_the_sampled_id_is_refused():
    (r,) = sample(prompts=make_prompts([5]), new=4, sampling_fields={"top_k": 3})
    ids = r.support.ids.clone()
    ids[:3] = (ids[:3] + 1 + r.completion_ids[0]) % 97
    ids[:3][ids[:3] == r.completion_ids[0]] += 1
    with pytest.raises(KvrlError, match=r"rollouts\[0\].support: .* completion token 0 lack the sampled id"):
        replay(model(), [dataclasses.replace(r, support=kvrl.sampler.types.Support(ids, r.support.offsets))])
    empty = kvrl.sampler.types.Support(ids[:0], torch.zeros(5, dtype=torch.int32))
    with pytest.raises(KvrlError, match="lack the sampled id"):
        replay(model(), [dataclasses.replace(r, support=empty)])


def test_temperature_zero_is_refused():
    (r,) = sample(prompts=make_prompts([5]), new=4)
    with pytest.raises(KvrlError, match=r"rollouts\[0\].temperature: 0.0 is not above 0"):
        replay(model(), [dataclasses.replace(r, temperature=0.0)])
