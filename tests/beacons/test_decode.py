"""Decoding with beacons: what the cache holds, when beacons are fed, and that mates and neighbours change no bit."""

from __future__ import annotations

import itertools
import warnings

import pytest

import helpers
import kvrl
from beacon_models import BEACON, by_hand, cache, make_prompts, model, sample
from helpers import assert_same_bits, gap, replay
from kvrl.cache.slots import KVSlots
from kvrl.sampler.engine import Engine
from kvrl.sampler.request import Request


def engine(every=None, *, slots: int = 1, new: int = 23, longest: int = 64, lm=None, **kwargs) -> Engine:
    fields = kwargs.pop("sampling_fields", {})
    return Engine(
        lm or model(), cache(every), helpers.sampling(new, **fields), num_slots=slots, max_prompt_length=longest
    )  # fmt: skip


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_the_cache_holds_what_the_paper_says_at_every_step(every, monkeypatch):
    """|prompt| + floor(n / c) + n mod c after n raw tokens; before a beacon its whole window, and itself."""
    steps = []
    count = Request.count

    def noted(self, entries):
        steps.append((len(self.prompt_ids), self.raw, self.beacon_is_due, entries))
        count(self, entries)

    monkeypatch.setattr(Request, "count", noted)
    rollouts = sample(every=every, slots=2)
    for r in rollouts:
        prompt = len(r.prompt_ids)
        mine = [step[1:] for step in steps if step[0] == prompt]
        expected, n = [], 0
        while n < 22:  # the last of 23 has no forward
            if n and n % every == 0:
                expected.append((n, True, prompt + n // every - 1 + every + 1))
            expected.append((n, False, prompt + n // every + n % every + 1))
            n += 1
        assert mine == expected
    most, mean = max(s[3] for s in steps), sum(s[3] for s in steps) / len(steps)
    assert rollouts[0].stats["held_entries_max"] == most
    assert rollouts[0].stats["held_entries"] == pytest.approx(mean)


def test_the_engine_asserts_it(monkeypatch):
    monkeypatch.setattr("kvrl.beacons.plan.Beacons.held", lambda self, prompt, n: prompt + n)
    with pytest.raises(AssertionError):
        sample(every=3)


@pytest.mark.parametrize("positions", ["sequence", "shared"])
def test_what_stands_in_a_slot_at_the_end(positions):
    run = engine(3, lm=model(positions=positions), new=12)
    (r,) = run.run(make_prompts([5]))
    # 11 raw tokens were forwarded: windows of 3 closed by beacons 0 to 2, then raw tokens 9 and 10
    places = [8, 12, 16, 17, 18] if positions == "sequence" else [7, 10, 13, 14, 15]
    assert run.slots.position[:, 0, :, :10].tolist() == [[[0, 1, 2, 3, 4, *places]] * 2] * 2
    assert r.trace.num_events == 3 and run.slots.capacity == 64 + 4 + 3 + 1
    assert run.kv_bytes == 2 * 2 * 2 * 2 * run.slots.capacity * 16 * 4  # K, V, layers, rows, heads, entries, width, f32


def test_every_layer_is_managed():
    assert engine(3, lm=model("gemma2")).slots.managed == [0, 1, 2]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_a_closed_window_leaves_in_storage_is_not_read(name, native, monkeypatch):
    clean = sample(model(name), native_kernels=native)
    move = KVSlots.move

    def spoil(self, rows, source, target):
        move(self, rows, source, target)
        for row, first, last in zip(rows.tolist(), target.tolist(), source.tolist(), strict=True):
            for t in (self.k, self.v):
                t[:, row, :, first + 1 : last + 1] = 1e3

    monkeypatch.setattr(KVSlots, "move", spoil)
    for a, b in zip(clean, sample(model(name), native_kernels=native), strict=True):
        assert_same_bits(a, b)
    monkeypatch.setattr(KVSlots, "move", lambda self, rows, source, target: None)  # the beacon stays behind
    assert any(a.token_ids != b.token_ids for a, b in zip(clean, sample(model(name)), strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_mates_order_and_slot_do_not_touch_a_request(slots, name):
    if name != "llama" and slots != 3:
        pytest.skip("one width is enough for another family")
    mine, mates = make_prompts([17], seed=9), make_prompts([3, 30, 20, 9, 12, 28][: slots + 1], seed=5)

    def run(prompts, ids):
        return engine(slots=slots, lm=model(name)).run(prompts, seed=3, request_ids=ids)

    (alone,) = run(mine, [77])
    rates = set()
    for place in range(len(mates) + 1):  # every slot, and after a slot's reuse
        prompts = [*mates[:place], *mine, *mates[place:]]
        together = run(prompts, [*range(place), 77, *range(place, len(mates))])
        rates |= {r.beacons.windows for r in together}
        assert together[place].beacons == alone.beacons
        assert_same_bits(together[place], alone)
    assert len(rates) > 1  # mates with other windows were among them


def test_a_group_shares_its_prefill():
    fields = {"num_generations": 4}
    group = sample(prompts=make_prompts([19, 6]), sampling_fields=fields, slots=4)
    assert [(r.prompt_index, r.sample_index) for r in group] == [(p, g) for p in (0, 1) for g in range(4)]
    assert len({r.beacons.windows for r in group}) > 1  # each of a group draws its own
    (alone,) = sample(prompts=make_prompts([19]), slots=4)
    assert_same_bits(alone, group[0])
    assert gap(replay(model(), group, backend="mask"), kvrl.sampler_logprobs(group)) < 1e-4


def test_a_reused_engine_remembers_nothing():
    used, fresh = engine(slots=2), engine(slots=2)
    used.run(make_prompts([60, 2, 33, 48, 50], seed=8), seed=1)
    for t in (used.slots.k, used.slots.v):
        t.fill_(1e3)
    for a, b in zip(used.run(make_prompts(), seed=3), fresh.run(make_prompts(), seed=3), strict=True):
        assert_same_bits(a, b)


def test_windows_are_drawn_by_the_requests_own_streams():
    """Each of the set about as often; another seed draws others; one alone needs no drawing."""
    prompts = make_prompts([3] * 200)
    drawn = [r.beacons.windows for r in sample(prompts=prompts, new=5)]
    assert {c: 25 < drawn.count(c) < 80 for c in drawn} == {(c,): True for c in (1, 2, 3, 5)}
    assert drawn != [r.beacons.windows for r in sample(prompts=prompts, new=5, seed=1)]
    assert {r.beacons.windows for r in sample(prompts=prompts, new=5, every=[2, 5])} == {(2,), (5,)}
    assert {r.beacons.windows for r in sample(prompts=prompts, new=5, every=5)} == {(5,)}


def test_a_random_schedule_draws_every_window():
    """Windows independent of one another and of the longest completion, and as many as it can have."""
    drawn = [r.beacons.windows for r in sample(prompts=make_prompts([3] * 60), new=9, schedule="random")]
    assert {len(windows) for windows in drawn} == {9}  # all could be of one token
    for place in range(9):
        counts = [windows[place] for windows in drawn]
        assert all(3 < counts.count(c) < 30 for c in (1, 2, 3, 5))
    assert sum(a == b for windows in drawn for a, b in itertools.pairwise(windows)) < 60 * 8 / 2  # 120 expected
    longer = [r.beacons.windows for r in sample(prompts=make_prompts([3] * 60), new=20, schedule="random")]
    assert [windows[:9] for windows in longer] == drawn


def test_windows_chosen_for_each_prompt():
    prompts = make_prompts()
    lm = model()
    chosen = kvrl.rollout(lm, prompts, cache=cache(), sampling=helpers.sampling(23), every=[5, 1, 2])
    assert [r.beacons.windows for r in chosen] == [(5,), (1,), (2,)]
    for i, c in enumerate((5, 1, 2)):
        assert chosen[i].token_ids == sample(every=c)[i].token_ids
    for every, message in (
        ([5, 1], "every: 2 for 3 prompts"), ([5, 1, 4], "every: 4 is not one of the 1, 2, 3, 5"),
        ([5, 1, [2, 4]], "every: 4 is not one of the 1, 2, 3, 5"), ([5, 1, []], "every: an empty list"),
        (2, "every: 2 is one value; give a list of one for each prompt"), ([2.0, 1, 1], "every: 2.0 is refused"),
        ([2, True, 1], "every: True is refused"), ("235", "every: '2' is refused"),
    ):  # fmt: skip
        with pytest.raises(kvrl.KvrlError, match=message):
            kvrl.rollout(lm, prompts, cache=cache(), sampling=helpers.sampling(23), every=every)
    with pytest.raises(kvrl.KvrlError, match="every: chooses the beacons' windows, and this cache has none"):
        kvrl.rollout(lm, prompts, cache=helpers.cache(), sampling=helpers.sampling(23), every=[1, 1, 1])


def test_a_schedule_for_each_prompt():
    """What a request is given, the cache section gives to all: windows in turn, the last for the rest."""
    chosen = kvrl.rollout(
        model(), make_prompts(), cache=cache(), sampling=helpers.sampling(23), every=[[5, 1, 2], 3, [1]]
    )
    assert [r.beacons.windows for r in chosen] == [(5, 1, 2), (3,), (1,)]
    assert chosen[0].token_ids == sample(schedule=[5, 1, 2])[0].token_ids
    assert chosen[0].fed.ids.tolist() == by_hand(chosen[0], (5, 1, 2))[0]
    places = (chosen[0].fed.beacons - len(chosen[0].prompt_ids)).tolist()
    assert places[:4] == [5, 7, 10, 13]  # after 5, 6, 8 and 10 raw tokens
    assert chosen[2].token_ids == sample(every=1)[2].token_ids


@pytest.mark.parametrize("ends_at, beacons", [(2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (7, 2)])
def test_an_end_around_a_windows_end(ends_at, beacons):
    """Windows of 3: the beacon is fed only when a token after its window is forwarded, not merely sampled."""
    free = sample(prompts=make_prompts([5] * 12), every=3)
    chosen = next(r for r in free if r.completion_ids.index(r.completion_ids[ends_at]) == ends_at)
    ended = sample(
        prompts=make_prompts([5] * 12), every=3, sampling_fields={"eos_token_ids": [chosen.completion_ids[ends_at]]}
    )[free.index(chosen)]
    assert ended.completion_ids == chosen.completion_ids[: ends_at + 1] and ended.finish_reason == "eos"
    assert len(ended.fed.beacons) == ended.trace.num_events == beacons
    assert gap(replay(model(), [ended])[0], ended.logprobs) < 1e-4


@pytest.mark.parametrize("eos", [[], list(range(97)), list(range(50))])
def test_completions_no_longer_than_a_window(eos):
    rollouts = sample(new=5, every=5, sampling_fields={"eos_token_ids": eos})
    assert len(rollouts[0].completion_ids) == (1 if len(eos) == 97 else 5) or len(eos) == 50
    assert all(r.trace.num_events == 0 and r.beacons.windows == (5,) for r in rollouts)
    assert gap(replay(model(), rollouts, backend="mask"), kvrl.sampler_logprobs(rollouts)) < 1e-4


def test_without_a_beacon_fed_it_is_the_full_cache():
    dense = kvrl.rollout(model(), make_prompts(), cache=helpers.cache("dense"), sampling=helpers.sampling(5))
    for a, b in zip(sample(every=5, new=5), dense, strict=True):
        assert a.token_ids == b.token_ids and gap(a.logprobs, b.logprobs) < 1e-5


def test_native_and_plain_kernels_agree():
    for name in ("llama", "gemma2", "gpt_oss"):
        plain, native = (sample(model(name, positions="shared"), native_kernels=n) for n in (False, True))
        assert [r.token_ids for r in plain] == [r.token_ids for r in native]
        assert max(gap(a.logprobs, b.logprobs) for a, b in zip(plain, native, strict=True)) < 1e-4


def test_positions_that_beacons_take_count_against_the_models_limit():
    with pytest.warns(UserWarning, match=r"4097 tokens \(1365 of them beacons\) are over the 4096"):
        engine(2, new=2732, longest=0)
    with pytest.warns(UserWarning) as seen:
        engine(2, new=2731, longest=0)
        engine(2, new=4096, longest=0, lm=model(positions="shared"))
        warnings.warn("none of these", stacklevel=1)
    assert [str(w.message) for w in seen] == ["none of these"]


def test_mistakes():
    for call, message in (
        (lambda: sample(every=4), "cache.params.every: 4 is not one of the 1, 2, 3, 5 that the model was trained with"),
        (
            lambda: sample(every=5, new=4),
            r"cache.params.every: 5 is over sampling.max_completion_length \(4\), .* to at most 2, .* to at least 7$",
        ),
        (lambda: sample(helpers.model()), "cache.policy: beacon needs a model that has a beacon"),
        (lambda: sample(prompts=[[1, 5, BEACON]]), "prompts.0.: holds the beacon's id 96"),
        (lambda: sample(on_turn=lambda r: None), "on_turn: tokens cannot be inserted where beacons close windows"),
    ):
        with pytest.raises(kvrl.KvrlError, match=message):
            call()
