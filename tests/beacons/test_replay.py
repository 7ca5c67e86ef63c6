"""Sampler = replay = stock model with entries deleted by hand, for beacons in every family; gradients; refusals."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch

import helpers
import kvrl
from beacon_models import BEACON, by_hand, make_prompts, model, oracle, sample
from helpers import DENSE_MISMATCH, gap, replay, stock
from kvrl.attention.blocks import make_blocks
from kvrl.attention.replay import ReplayContext, attend_mask
from kvrl.attention.seam import AttentionCall
from kvrl.beacons.plan import Beacons
from kvrl.distill import Distillation
from kvrl.head import Head
from kvrl.learner import Scorer
from kvrl.models.tiny_families import FAMILIES, WINDOWED, build_family
from kvrl.objectives.distill import kl_divergence
from kvrl.sampler.routing import RoutingRecorder
from kvrl.train.diagnostics import parity

CASES = [(name, window) for name in FAMILIES for window in ((8, 40) if name in WINDOWED else (8,))]


def bar(twin, rollouts) -> float:
    return helpers.bar(twin, rollouts)


@pytest.mark.parametrize("positions", ["sequence", "shared"])
@pytest.mark.parametrize("name, window", CASES)
def test_families(name, window, positions):
    lm, twin = model(name, window, positions=positions), stock(name, window)
    rollouts = sample(lm)
    assert len({r.beacons.windows for r in rollouts}) > 1
    sampled, limit = kvrl.sampler_logprobs(rollouts), bar(twin, rollouts)
    assert gap(sampled, oracle(twin, rollouts, positions)) <= limit
    for backend in ("mask", "segments"):
        assert gap(sampled, replay(lm, rollouts, backend=backend)) <= limit
        assert gap(sampled, replay(lm, rollouts, view="dense", backend=backend)) > DENSE_MISMATCH


@pytest.mark.parametrize("every, schedule", [
    (1, "constant"), (2, "constant"), (3, "constant"), (5, "constant"), (None, "random"), (None, [5, 1, 3]),
])  # fmt: skip
@pytest.mark.parametrize("name, window, positions", [
    ("llama", 8, "sequence"), ("gemma2", 8, "shared"), ("gemma2", 8, "sequence"), ("gpt_oss", 40, "shared"),
])  # fmt: skip
def test_float64_leaves_no_room_for_a_small_mistake(name, window, positions, every, schedule, double, monkeypatch):
    monkeypatch.setattr("kvrl.attention.blocks.SIZE", 5)  # many blocks, some of them without a window's end
    lm, twin = model(name, window, torch.float64, positions), stock(name, window, torch.float64)
    rollouts = sample(lm, every=every, schedule=schedule)
    truth = oracle(twin, rollouts, positions, torch.float64)
    assert gap(replay(lm, rollouts, backend="mask"), truth) < 1e-10
    assert gap(replay(lm, rollouts, backend="segments"), truth) < 1e-10
    assert gap(kvrl.sampler_logprobs(rollouts), truth) < 2e-6  # recorded in fp32


def test_the_trace_is_what_was_deleted_by_hand():
    for r in sample():
        ids, where, gone = by_hand(r, r.beacons.windows)
        assert r.fed.ids.tolist() == ids and r.fed.positions.tolist() == where
        assert r.trace.evicted_at().tolist() == [[gone] * 2] * 2
        assert BEACON not in r.completion_ids and r.token_ids == r.prompt_ids + r.completion_ids


def test_positions_matter(double):
    """The two choices are told apart: one's rollouts are not the other's."""
    rollouts = sample(model("llama", 8, torch.float64))
    shared = model("llama", 8, torch.float64, "shared")
    other = [dataclasses.replace(r, beacons=dataclasses.replace(r.beacons, positions="shared")) for r in rollouts]
    assert gap(replay(shared, other, backend="mask"), kvrl.sampler_logprobs(rollouts)) > DENSE_MISMATCH


@pytest.mark.parametrize("backend", ["mask", "segments"])
def test_a_stock_forward_under_a_hand_made_mask_has_the_same_gradients(backend, double, monkeypatch):
    monkeypatch.setattr("kvrl.attention.blocks.SIZE", 4)
    lm = copy.deepcopy(model("llama", 8, torch.float64)).train()
    twin = copy.deepcopy(stock("llama", 8, torch.float64)).train()
    (r,) = sample(lm, make_prompts([6]), every=3, new=14)
    weights = torch.linspace(-1.0, 1.0, 14, dtype=torch.float64)
    (kvrl.logprobs(lm, [r], backend=backend)[0] * weights).sum().backward()
    ids, where, gone = by_hand(r, (3,))
    q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    hidden = (k > q) | (q >= torch.tensor(gone))
    mask = torch.zeros(1, 1, *hidden.shape, dtype=torch.float64).masked_fill(hidden, -1e300)
    logits = twin(
        input_ids=torch.tensor([ids]), attention_mask=mask, position_ids=torch.tensor([where]), use_cache=False
    ).logits[0]  # fmt: skip
    logits = torch.cat([logits[:, :BEACON], logits[:, BEACON + 1 :]], dim=1)  # the beacon is the last id
    raw = [i for i, token in enumerate(ids) if token != BEACON]
    logps = logits[raw[5:-1]].log_softmax(-1).gather(1, torch.tensor(r.completion_ids)[:, None])[:, 0]
    (logps * weights).sum().backward()
    for (name, mine), theirs in zip(lm.named_parameters(), twin.parameters(), strict=True):
        assert gap(mine.grad, theirs.grad) < 1e-9 * max(1.0, float(theirs.grad.abs().max())), name
    assert lm.get_input_embeddings().weight.grad[BEACON].abs().max() > 1e-3  # a beacon's embedding learns


def test_rope_that_depends_on_the_longest_position_counts_positions_not_places():
    """64 raw tokens are the limit: beacons with positions of their own are over it, with shared ones they are not."""
    fields = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    prompts = make_prompts([4, 18, 44])
    for positions in ("sequence", "shared"):
        own = {"token_id": BEACON, "every": [3], "positions": positions}
        lm = build_family("llama", rope_parameters=fields, max_position_embeddings=64, kvrl_beacons=own)
        if positions == "sequence":
            long = build_family("llama", max_position_embeddings=256, kvrl_beacons=own)
            for call in (lambda: sample(lm, prompts, new=20), lambda: replay(lm, sample(long, prompts, new=20))):  # noqa: B023
                with pytest.raises(kvrl.KvrlError, match=r"70 tokens \(6 of them beacons\) are over 64"):
                    call()
            continue
        rollouts = sample(lm, prompts, new=20)
        assert rollouts[2].num_tokens == 64 and rollouts[2].trace.num_tokens == 70
        for backend in ("mask", "segments"):  # padding must not reach beyond the limit either
            assert gap(kvrl.sampler_logprobs(rollouts), replay(lm, rollouts, backend=backend)) < 1e-4


def test_an_evicted_window_is_gone():
    """Keys and values of a closed window: its beacon reads them, nothing after it does."""
    plan = Beacons(BEACON, (3,))
    trace = plan.trace(1, 2, 4, 12)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, trace.num_tokens, 8, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(0, q, k, v, scaling=0.3, window=None, softcap=None, s_aux=None)
    first, beacon = plan.fed([0] * 4, [1] * 12).at[0], 4 + 3
    changed = dataclasses.replace(call, k=k.clone(), v=v.clone())
    changed.k[:, :, first], changed.v[:, :, first] = 7.0, -7.0
    with_beacons = [attend_mask(c, trace.evicted_at()[None, 0]) for c in (call, changed)]
    without = [attend_mask(c, None) for c in (call, changed)]
    after = slice(beacon + 1, None)
    assert torch.equal(with_beacons[0][:, :, after], with_beacons[1][:, :, after])
    assert (with_beacons[0] - with_beacons[1])[:, :, beacon].abs().min() > 0
    assert (without[0] - without[1])[:, :, after].abs().amin() > 0


def test_the_beacon_has_no_probability():
    lm = copy.deepcopy(model())
    lm.lm_head.weight.data[BEACON] *= 50
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    logits, plain = Head(lm)(hidden), lm.lm_head(hidden)
    assert bool((plain.argmax(-1) == BEACON).any()) and torch.equal(logits[:, :BEACON], plain[:, :BEACON])
    assert bool(logits[:, BEACON].isneginf().all())
    for fields in ({}, {"temperature": 0.0}, {"top_k": BEACON + 1}, {"top_p": 0.99}):
        rollouts = sample(lm, sampling_fields=fields)
        assert all(BEACON not in r.completion_ids for r in rollouts)
        assert gap(replay(lm, rollouts, backend="mask"), kvrl.sampler_logprobs(rollouts)) < 1e-4
        dense = kvrl.rollout(lm, make_prompts(), cache=helpers.cache("dense"), sampling=helpers.sampling(9, **fields))
        assert all(BEACON not in r.completion_ids for r in dense)  # under any policy
        assert gap(replay(lm, dense), kvrl.sampler_logprobs(dense)) < 1e-4


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"temperature": 1.4}, {"top_k": 5, "temperature": 0.7}])
def test_other_sampling(fields):
    lm, rollouts = model("gemma2"), sample(model("gemma2"), sampling_fields=fields)
    assert gap(replay(lm, rollouts, backend="mask"), kvrl.sampler_logprobs(rollouts)) < 1e-4
    if "top_p" not in fields and "top_k" not in fields:
        assert gap(oracle(stock("gemma2"), rollouts), kvrl.sampler_logprobs(rollouts)) < 1e-4


def test_tokens_left_out_leave_the_others_as_they_were():
    lm, rollouts = model(), sample(every=3)
    whole = replay(lm, rollouts, backend="mask")
    cut = torch.arange(23) % 4 != 1
    masked = replay(lm, [dataclasses.replace(r, loss_mask=cut) for r in rollouts], backend="mask")
    assert torch.equal(masked[:, ~cut], torch.zeros(3, 6)) and gap(masked[:, cut], whole[:, cut]) < 1e-6


def test_padded_equals_unpadded(double):
    lm = model("gemma2", 8, torch.float64, "shared")
    rollouts = sample(lm)
    together = replay(lm, rollouts, backend="mask")
    for i, r in enumerate(rollouts):
        assert gap(replay(lm, [r], backend="mask")[0], together[i]) < 1e-10
    dense = kvrl.rollout(lm, make_prompts([9]), cache=helpers.cache("dense"), sampling=helpers.sampling(23))
    mixed = replay(lm, [rollouts[0], *dense], backend="mask")  # with and without beacons in one batch
    assert gap(mixed[0], together[0]) < 1e-10 and gap(mixed[1], kvrl.sampler_logprobs(dense)[0]) < 2e-6
    assert gap(replay(lm, [*dense, rollouts[0]], backend="segments"), mixed.flip(0)) < 1e-10


def test_experts_are_recorded_for_beacons_too():
    lm = model("qwen3_moe")
    rollouts = sample(lm)
    with RoutingRecorder.attached(lm, batch_invariant=False) as recorder, torch.no_grad():
        Scorer(lm, backend="mask")(rollouts)
    length = max(r.trace.num_tokens for r in rollouts)
    learner = torch.stack([x.view(len(rollouts), length, -1) for x in recorder.newest], dim=1)
    for i, r in enumerate(rollouts):
        assert r.routing.shape[1] == len(r.fed.ids) - 1 > r.num_tokens
        mine = learner[i, :, : r.routing.shape[1]].sort(-1).values
        assert torch.equal(mine.to(torch.int16), r.routing.sort(-1).values)
    assert parity(Scorer(lm), rollouts)["parity/routing_flipped"] == 0.0


def test_distillation_compares_the_views_at_the_raw_tokens(double):
    lm = model("llama", 8, torch.float64)
    rollouts = sample(lm, make_prompts([5, 11]), every=2, new=9)
    scored = Scorer(lm, backend="mask")(rollouts, view="dense", distill=Distillation("dense"))
    twin = stock("llama", 8, torch.float64)
    for i, r in enumerate(rollouts):
        with torch.no_grad():
            full = twin(input_ids=torch.tensor([r.token_ids]), use_cache=False).logits[0]
            ids, _, gone = by_hand(r, (2,))
            q, k = torch.arange(len(ids))[:, None], torch.arange(len(ids))
            hidden = ((k > q) | (q >= torch.tensor(gone)))[None, None]
            mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -1e300)
            seen = twin(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
        full[:, BEACON] = seen[:, BEACON] = -torch.inf
        raw, prompt = [j for j, token in enumerate(ids) if token != BEACON], len(r.prompt_ids)
        expected = kl_divergence(seen[raw][prompt - 1 : -1], full[prompt - 1 : -1])
        assert gap(scored.divergence[i], expected) < 1e-9 and expected.max() > 1e-3


def test_blocks_hold_what_is_alive_and_no_more(monkeypatch):
    """Prompt of 2, seven raw tokens, windows of 2, in blocks of 4: 2 + [r r B r | r B r r | r]."""
    monkeypatch.setattr("kvrl.attention.blocks.SIZE", 4)
    trace = Beacons(BEACON, (2,)).trace(1, 1, 2, 7)
    first, second, third = make_blocks([trace], 11, "cpu")
    assert first.keys.tolist() == [[0, 1, 2, 3]] and bool((first.visible[0, 0] == torch.ones(4, 4).tril()).all())
    assert second.keys.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]  # the first window is read by the beacon at 4
    assert second.visible[0, 0].int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1],
    ]  # fmt: skip
    assert third.keys.tolist() == [[0, 1, 4, 7, 8, 9, 10]]
    both = make_blocks([trace, kvrl.KVTrace.dense(1, 1, 9)], 11, "cpu")
    assert both[2].keys.tolist() == [[0, 1, 4, 7, 11, 11, 11, 11, 8, 9, 10], [*range(11)]]
    assert both[2].visible[0, 0].int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1],
    ]  # fmt: skip


def test_segments_needs_lifetimes_that_all_heads_share():
    (r,) = sample(prompts=make_prompts([5]), every=3)
    events = r.trace.events.clone()
    events[0, 1, 6] = -1
    with pytest.raises(kvrl.KvrlError, match="only if all layers and heads lose the same entries; use 'mask'"):
        make_blocks([dataclasses.replace(r.trace, events=events)], r.trace.num_tokens, "cpu")


def test_a_changed_trace_is_refused():
    (r,) = sample(prompts=make_prompts([5]), every=3)
    events = r.trace.events.clone()
    events[0, 1, 6] = -1
    for trace in (
        dataclasses.replace(r.trace, events=events),
        dataclasses.replace(r.trace, evicted_at_event=r.trace.evicted_at_event + 1),
        kvrl.KVTrace.dense(2, 2, r.trace.num_tokens),
    ):
        with pytest.raises(kvrl.KvrlError, match="evicts other entries than its beacons of every 3 tokens do"):
            replay(model(), [dataclasses.replace(r, trace=trace)], backend="mask")
    with pytest.raises(kvrl.KvrlError, match="trace covers 35 tokens, the rollout has 28"):
        replay(model(), [dataclasses.replace(r, beacons=None)], backend="mask")


def test_another_models_rollouts_are_refused():
    (r,) = sample(prompts=make_prompts([5]), every=3)
    with pytest.raises(kvrl.KvrlError, match="token 96 was its beacon, and the model has none"):
        replay(helpers.model(), [r])
    other = dataclasses.replace(r, beacons=dataclasses.replace(r.beacons, token_id=95))
    with pytest.raises(kvrl.KvrlError, match="token 95 was its beacon, and the model has 96"):
        replay(model(), [other])


def test_a_rollout_and_its_trace_are_kept_on_disk(tmp_path):
    (r,) = sample(prompts=make_prompts([5]), every=3)
    r.trace.save(tmp_path / "trace")
    again = dataclasses.replace(pickle.loads(pickle.dumps(r)), trace=kvrl.KVTrace.load(tmp_path / "trace"))
    assert again.beacons == r.beacons
    assert torch.equal(replay(model(), [again], backend="mask"), replay(model(), [r], backend="mask"))


def test_windows_are_checked_as_in_every_trace():
    rollouts = sample(model("gemma2", 8))
    with pytest.raises(kvrl.KvrlError, match="trace.windows: layer 0 was sampled with a window of 8"):
        replay(model("gemma2", 40), rollouts, backend="mask")


def test_replay_reads_positions_for_windows_alone():
    """Without a sliding window a context's positions change nothing; with one they do where beacons share them."""
    plan = Beacons(BEACON, (2,), "shared")
    trace, positions = plan.trace(1, 2, 4, 12), plan.fed([0] * 4, [1] * 12).positions[None]
    q, k, v = (torch.randn(1, heads, trace.num_tokens, 8) for heads in (4, 2, 2))
    for window, same in ((None, True), (4, False)):
        call = AttentionCall(0, q, k, v, scaling=0.3, window=window, softcap=None, s_aux=None)
        plain, placed = (
            ReplayContext([trace], trace.num_tokens, backend="mask", positions=p).attend(call)
            for p in (None, positions)
        )
        assert torch.equal(plain, placed) == same
