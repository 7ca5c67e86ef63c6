"""A beacon in a model and its tokenizer: where it starts, that it is saved, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import helpers
import kvrl
from kvrl.beacons.config import BeaconSet, beacons_for, beacons_of, decodings, params_of
from kvrl.beacons.model import NAME, RESERVED, restore_beacon, save_beacon
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.models.tiny_families import build_family
from kvrl.train.checkpoint import write
from kvrl.train.setup import load_model

WORDS = ["zero", "one", "two", "reserved"]  # ids 4 to 7, after pad, bos, eos, unk


def words():
    tokenizer = build_tiny_tokenizer(WORDS)
    tokenizer.add_tokens(["reserved"], special_tokens=True)
    return tokenizer


def pair():
    return build_tiny_model(words(), seed=0), words()


def test_a_new_row_starts_at_the_mean():
    lm, tokenizer = pair()
    before, head = lm.get_input_embeddings().weight.detach().clone(), lm.lm_head.weight.detach().clone()
    state = torch.get_rng_state()
    found = kvrl.add_beacon(lm, tokenizer, every=[4, 2])
    assert found == BeaconSet(8, (2, 4), "sequence") == beacons_of(lm)
    assert torch.equal(torch.get_rng_state(), state)
    weight = lm.get_input_embeddings().weight
    assert weight.shape == (9, 128) == lm.lm_head.weight.shape and lm.config.vocab_size == 9
    assert torch.equal(weight[:8], before) and torch.equal(lm.lm_head.weight[:8], head)
    assert torch.allclose(weight[8], before.mean(0), atol=1e-7)
    assert tokenizer.convert_ids_to_tokens(8) == NAME and len(tokenizer) == 9
    assert tokenizer("one two", add_special_tokens=False)["input_ids"] == [5, 6]


def test_a_reserved_token_and_a_named_start():
    lm, tokenizer = pair()
    before = lm.get_input_embeddings().weight.detach().clone()
    found = kvrl.add_beacon(lm, tokenizer, every=4, positions="shared", token="reserved", start="one")
    assert found == BeaconSet(7, (4,), "shared") and len(tokenizer) == 8
    weight = lm.get_input_embeddings().weight
    assert torch.equal(weight[7], before[5]) and torch.equal(weight[:7], before[:7])


def test_the_mean_leaves_out_the_token_itself_and_rows_without_a_token():
    """Models have more rows than their tokenizer has tokens; a free row takes the beacon."""
    tokenizer = words()
    lm = build_family("llama", vocab_size=12)
    before = lm.get_input_embeddings().weight.detach().clone()
    assert kvrl.add_beacon(lm, tokenizer, every=2).token_id == 8
    assert lm.config.vocab_size == 12
    assert torch.allclose(lm.get_input_embeddings().weight[8], before[:8].mean(0), atol=1e-6)
    other = build_family("llama", vocab_size=12)
    tokenizer = words()
    tokenizer.add_tokens(["two"], special_tokens=True)
    kvrl.add_beacon(other, tokenizer, every=2, token="two")
    rows = [i for i in range(8) if i != 6]
    assert torch.allclose(other.get_input_embeddings().weight[6], before[rows].mean(0), atol=1e-6)


def test_an_unused_token_that_is_not_marked_special():
    tokenizer = build_tiny_tokenizer([*WORDS, "<unused0>"])
    lm = build_family("llama", vocab_size=len(tokenizer))
    index = tokenizer.convert_tokens_to_ids("<unused0>")
    assert index not in tokenizer.all_special_ids
    assert kvrl.add_beacon(lm, tokenizer, every=2, token="<unused0>").token_id == index


def test_words_are_not_reserved():
    for token, reserved in {
        "<unused0>": True, "<|reserved_special_token_0|>": True, "[unused7]": True, "unreserved": False,
        "Ġunused": False,
    }.items():  # fmt: skip
        assert bool(RESERVED.fullmatch(token)) == reserved


def test_a_beacon_that_ends_completions_is_refused():
    lm, tokenizer = pair()
    kvrl.add_beacon(lm, tokenizer, every=2)
    lm.generation_config.eos_token_id = 8
    with pytest.raises(
        kvrl.KvrlError, match="model: token 8 is its beacon, which is never drawn, and ends completions"
    ):
        kvrl.rollout(
            lm, [[1, 5]], cache=kvrl.CacheConfig(policy="beacon"), sampling=kvrl.SamplingConfig(max_completion_length=6)
        )


def test_tied_embeddings():
    tokenizer = build_tiny_tokenizer(WORDS)
    lm = build_family("llama", vocab_size=8, tie_word_embeddings=True)
    kvrl.add_beacon(lm, tokenizer, every=2)
    assert lm.lm_head.weight is lm.get_input_embeddings().weight and lm.lm_head.weight.shape[0] == 9


@pytest.mark.parametrize("positions", ["sequence", "shared"])
def test_a_folder_decodes_with_its_beacons_by_itself(tmp_path, positions):
    lm, tokenizer = pair()
    kvrl.add_beacon(lm, tokenizer, every=[2, 3], positions=positions)
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, words = load_model(str(tmp_path), "float32")
    assert beacons_of(again) == BeaconSet(8, (2, 3), positions) and words.convert_tokens_to_ids(NAME) == 8
    given = {"cache": kvrl.CacheConfig(policy="beacon"), "sampling": helpers.sampling(12)}
    for a, b in zip(kvrl.rollout(lm, [[1, 5]] * 3, **given), kvrl.rollout(again, [[1, 5]] * 3, **given), strict=True):
        assert a.token_ids == b.token_ids and helpers.gap(a.logprobs, b.logprobs) < 1e-5  # loaded weights lie elsewhere
        assert a.beacons == b.beacons and a.beacons.positions == positions and a.trace.num_events > 2


def test_a_beacon_among_adapters(tmp_path):
    """LoRA's folder has no config of the model: the beacon is kept beside it, and its row of the embedding in it."""
    from peft import LoraConfig, PeftModel, get_peft_model

    lm, tokenizer = pair()
    lm.save_pretrained(tmp_path / "base")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # whose folder peft compares with, and sees it grew
    kvrl.add_beacon(lm, tokenizer, every=3)
    wrapped = get_peft_model(lm, LoraConfig(target_modules="all-linear", trainable_token_indices=[8]))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if p.requires_grad:
                p.add_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
                assert "lora" in name or p.shape == (1, 128)
    write(tmp_path / "adapters", wrapped)
    save_beacon(tmp_path / "adapters", wrapped)
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {tuple(t.shape) for n, t in saved.items() if "lora" not in n} == {(1, 128)}  # of the embedding one row
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    note = tmp_path / "adapters" / "kvrl_beacons.json"
    held = note.read_text()
    note.write_text(held.replace('"token_id": 8', '"token_id": 10000'))
    with pytest.raises(kvrl.KvrlError, match=r"says that token 10000 is the beacon, and .* trained with \[8\]"):
        restore_beacon(tmp_path / "adapters", base)
    assert base.get_input_embeddings().num_embeddings == 8
    note.write_text(held)
    restore_beacon(tmp_path / "adapters", base)
    again = PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert beacons_of(again) == BeaconSet(8, (3,), "sequence")
    given = {"cache": kvrl.CacheConfig(policy="beacon"), "sampling": helpers.sampling(12)}
    (a,), (b,) = (kvrl.rollout(x, [[1, 5]], **given) for x in (wrapped, again))
    assert a.token_ids == b.token_ids and helpers.gap(a.logprobs, b.logprobs) < 1e-5
    assert helpers.gap(helpers.replay(again, [b], backend="mask")[0], b.logprobs) < 1e-5
    merged = again.merge_and_unload()
    assert beacons_of(merged) is not None
    assert helpers.gap(helpers.replay(merged, [b], backend="mask")[0], b.logprobs) < 1e-4


def test_what_cannot_be_a_beacon():
    lm, tokenizer = pair()
    for fields, message in (
        ({"token": "three"}, "beacons.token: 'three' is no token of this tokenizer, which has 8"),
        ({"token": "<eos>"}, "beacons.token: '<eos>' has a meaning already"),
        ({"token": "two"}, "beacons.token: 'two' is an ordinary token, which texts may hold"),
        ({"start": "three"}, "beacons.start: 'three' is no token of this tokenizer"),
        ({"every": 0}, "every: 0 is below 1; a beacon stands for one raw token at least"),
        ({"every": []}, "every: is empty"),
        ({"every": [2, 2]}, "every: 2, 2 names a window twice"),
        ({"every": "2"}, "every: '2' is refused; it should be a whole number or a list of them"),
        ({"every": 2.0}, "every: 2.0 is refused"),
        ({"every": (2, 2.5)}, r"every: \(2, 2.5\) is refused"),
        ({"every": True}, "every: True is refused"),
        ({"every": None}, "every: None is refused"),
        ({"positions": "last"}, "positions: 'last' is refused; it should be 'sequence' or 'shared'"),
    ):
        with pytest.raises(kvrl.KvrlError, match=message):
            kvrl.add_beacon(lm, tokenizer, **{"every": 2, **fields})
    assert beacons_of(lm) is None and len(tokenizer) == 8
    kvrl.add_beacon(lm, tokenizer, every=2)
    with pytest.raises(kvrl.KvrlError, match="has a beacon already .*'token_id': 8"):
        kvrl.add_beacon(lm, tokenizer, every=2)


@pytest.mark.parametrize("every", [np.int64(4), np.array([4, 2]), torch.tensor([2, 4]), (np.int32(2), 4)])
def test_integers_of_any_kind_are_windows(every):
    lm, tokenizer = pair()
    found = kvrl.add_beacon(lm, tokenizer, every=every)
    assert found.every in ((4,), (2, 4)) and all(type(c) is int for c in found.every)
    cache = kvrl.CacheConfig(policy="beacon", params={"every": np.int64(4), "schedule": [np.int64(4)]})
    assert beacons_for(cache, lm) == BeaconSet(8, (4,), "sequence", (4,))


def test_a_tokenizer_without_room():
    class Fixed:
        unk_token_id = 3

        def __len__(self):
            return 8

        def add_tokens(self, *args, **kwargs):
            return 0

        def convert_tokens_to_ids(self, token):
            return 3

    with pytest.raises(kvrl.KvrlError, match="beacons.token: this tokenizer takes no new token; name a reserved one"):
        kvrl.add_beacon(pair()[0], Fixed(), every=2)


def test_a_model_without_room():
    lm, tokenizer = pair()
    lm.set_input_embeddings(torch.nn.Sequential(lm.get_input_embeddings()))
    with pytest.raises(kvrl.KvrlError, match="model: its embedding is a Sequential, which has no room for a beacon"):
        kvrl.add_beacon(lm, tokenizer, every=2)


@pytest.mark.parametrize("held, message", [
    ({"token_id": 5}, "is not token_id, every and positions"),
    ({"token_id": 5, "every": [2], "positions": "last"}, "is not token_id, every and positions"),
    ({"token_id": 5, "every": [0], "positions": "sequence"}, "every: 0 is below 1"),
    ({"token_id": 5, "every": [2.5], "positions": "sequence"}, "is not token_id, every and positions"),
    ({"token_id": -1, "every": [2], "positions": "sequence"}, "token -1 is not in the vocabulary of 97"),
    ({"token_id": 97, "every": [2], "positions": "sequence"}, "token 97 is not in the vocabulary of 97"),
])  # fmt: skip
def test_a_config_that_was_changed(held, message):
    with pytest.raises(kvrl.KvrlError, match=message):
        beacons_of(build_family("llama", kvrl_beacons=held))


@pytest.mark.parametrize("params, message", [
    ({"every": 0}, "cache.params.every: 0 is below 1"),
    ({"every": "many"}, "cache.params.every: 'many' is refused; it should be a whole number or a list of them"),
    ({"every": True}, "cache.params.every: True is refused; it should be a whole number"),
    ({"every": [2, True]}, r"cache.params.every: \[2, True\] is refused"),
    ({"every": [2, 1], "schedule": [2, True]}, "cache.params.schedule: .* is refused"),
    ({"positions": "last"}, "cache.params.positions: 'last' is refused; it should be 'sequence' or 'shared'"),
    ({"every": 2, "schedule": "sometimes"}, "cache.params.schedule: 'sometimes' is refused; it should be"),
    ({"every": 2, "schedule": []}, "cache.params.schedule: is empty"),
    ({"every": [2, 8], "schedule": [2, 4]}, "cache.params.schedule: 4 is not one of the 2, 8 of cache.params.every"),
    ({"evry": 2}, "cache.params.evry: is no parameter of beacon; did you mean every"),
])  # fmt: skip
def test_parameters(params, message):
    with pytest.raises(kvrl.KvrlError, match=message):
        params_of(kvrl.CacheConfig(policy="beacon", params=params))


def test_what_a_cache_may_ask_of_a_model():
    lm = build_family("llama", kvrl_beacons={"token_id": 5, "every": [2, 4], "positions": "shared"})

    def ask(**params):
        return beacons_for(kvrl.CacheConfig(policy="beacon", params=params), lm)

    assert ask() == BeaconSet(5, (2, 4), "shared")
    assert ask(every=4, positions="shared") == BeaconSet(5, (4,), "shared")
    assert ask(schedule=[2, 2, 4]) == BeaconSet(5, (2, 4), "shared", (2, 2, 4))
    with pytest.raises(kvrl.KvrlError, match="every: 8 is not one of the 2, 4 that the model was trained with"):
        ask(every=[2, 8])
    with pytest.raises(kvrl.KvrlError, match="schedule: 8 is not one of the 2, 4"):
        ask(schedule=[2, 8])
    with pytest.raises(kvrl.KvrlError, match="positions: sequence is not the shared that the model was trained with"):
        ask(positions="sequence")
    for name, value in (("budget", 24), ("buffer", 8), ("protect_prompt", True)):
        with pytest.raises(kvrl.KvrlError, match=f"cache.{name}: has no meaning under cache.policy beacon"):
            params_of(kvrl.CacheConfig(policy="beacon", **{name: value}))
    for name, value in (("window", 4), ("sinks", 2), ("granularity", "shared")):
        with pytest.raises(kvrl.KvrlError, match=f"cache.{name}: {value} has no meaning under policy beacon"):
            params_of(kvrl.CacheConfig(policy="beacon", **{name: value}))


def test_a_slot_holds_whatever_the_windows_are():
    """Of c alone |prompt| + ceil(n / c) + c + 1; of several the longest window after the shortest ones."""
    assert BeaconSet(5, (4,)).slots(10, 30) == 10 + 8 + 4 + 1
    own = BeaconSet(5, (2, 7))
    plan = own.plan([2] * 11 + [7])  # 22 tokens in windows of 2, then 7 of the 30
    assert max(plan.held(10, n) for n in range(29)) == 10 + 11 + 6
    assert plan.held(10, 28) + 2 <= own.slots(10, 30) == 10 + 12 + 7 + 2  # its beacon would be the second more


@pytest.mark.parametrize(
    "schedule, expected", [("constant", ["c=2", "c=4"]), ("random", ["c=2", "c=4"]), ((2, 2, 4), ["c=2,2,4"])]
)
def test_windows_of_an_evaluation(schedule, expected):
    assert decodings((2, 4), schedule) == expected
    own = kvrl.CacheConfig(policy="beacon", params={"every": [2, 4], "schedule": "random"})
    asked = [params_of(own.at_budget(point)) for point in expected]
    assert [p.ordered for p in asked] == (["constant"] * 2 if isinstance(schedule, str) else [(2, 2, 4)])
    assert [p.rates for p in asked] == ([(2,), (4,)] if isinstance(schedule, str) else [(2, 4)])
