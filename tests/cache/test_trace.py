"""KVTrace: lifetimes by definition, files, and what a broken one says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers import cache, make_prompts, sample
from kvrl import KvrlError, KVTrace
from kvrl.cache.trace import NEVER, event_dtype


def small() -> KVTrace:
    """Budget 2, buffer 1, 6 tokens: events at 3, 4 and 5."""
    events = torch.tensor([[[0, 1, -1, 2, -1, -1], [1, 0, 2, -1, -1, -1]]], dtype=torch.int16)
    return KVTrace(events, torch.tensor([3, 4, 5], dtype=torch.int32), 2, 1)


def test_lifetimes_by_hand():
    expected = [[[3, 4, NEVER, 5, NEVER, NEVER], [4, 3, 5, NEVER, NEVER, NEVER]]]
    assert small().validate().evicted_at().tolist() == expected
    assert KVTrace.dense(2, 3, 4).validate().evicted_at().tolist() == [[[NEVER] * 4] * 3] * 2


def test_file_round_trip(tmp_path):
    for r in [*sample(), *sample(config=cache("dense"), new=3)]:
        r.trace.save(tmp_path / "t.safetensors")
        loaded = KVTrace.load(tmp_path / "t.safetensors")
        assert torch.equal(loaded.events, r.trace.events) and loaded.events.dtype == torch.int16
        assert torch.equal(loaded.evicted_at_event, r.trace.evicted_at_event)
        assert (loaded.budget, loaded.buffer) == (r.trace.budget, r.trace.buffer)


def test_seventy_thousand_tokens_evicted_one_by_one(tmp_path):
    """More evictions than int16 counts: the events are int32 and survive the file."""
    tokens, budget = 70_000, 64
    count = tokens - 1 - budget
    assert (
        event_dtype(count) == torch.int32 and event_dtype(32_767) == torch.int16 and event_dtype(32_768) == torch.int32
    )
    events = torch.full((2, 1, tokens), -1, dtype=event_dtype(count))
    events[..., :count] = torch.arange(count)
    trace = KVTrace(events, budget + 1 + torch.arange(count, dtype=torch.int32), budget, 1)
    trace.save(tmp_path / "long.safetensors")
    loaded = KVTrace.load(tmp_path / "long.safetensors")
    assert torch.equal(loaded.evicted_at()[0, 0, :count], torch.arange(count, dtype=torch.int32) + budget + 1)
    assert bool((loaded.evicted_at()[..., count:] == NEVER).all())


def test_size_of_the_example_in_the_design():
    trace = KVTrace(torch.zeros(28, 4, 4608, dtype=torch.int16), torch.arange(36, dtype=torch.int32))
    assert trace.nbytes == 28 * 4 * 4608 * 2 + 36 * 4  # about 1 MB


@pytest.mark.parametrize("change, message", [
    ({"events": torch.zeros(3, 4, dtype=torch.int16)}, "2 dimensions"),
    ({"events": torch.full((1, 1, 6), 3, dtype=torch.int16)}, "values from 3 to 3, .* has 3 evictions"),
    ({"events": torch.full((1, 1, 6), -2, dtype=torch.int16)}, "values from -2"),
    ({"evicted_at_event": torch.tensor([3, 3, 5], dtype=torch.int32)}, "positions must grow"),
    ({"events": torch.tensor([[[-1, -1, -1, 0, -1, -1]]], dtype=torch.int16)}, "before its own query"),
    ({"events": torch.tensor([[[-1, -1, -1, -1, -1, 2]]], dtype=torch.int16)}, "before its own query"),
])  # fmt: skip
def test_a_broken_trace_says_so(change, message, tmp_path):
    broken = dataclasses.replace(small(), **change)
    with pytest.raises(KvrlError, match=message):
        broken.validate()
    broken.save(tmp_path / "broken.safetensors")
    with pytest.raises(KvrlError, match=message):
        KVTrace.load(tmp_path / "broken.safetensors")


def test_files_that_are_not_traces(tmp_path):
    from safetensors.torch import save_file

    save_file({"events": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(KvrlError, match="other.safetensors: format is None"):
        KVTrace.load(tmp_path / "other.safetensors")
    small().save(tmp_path / "cut.safetensors")
    data = (tmp_path / "cut.safetensors").read_bytes()
    for name, content in (("cut", data[:-9]), ("text", b"not a trace"), ("empty", b"")):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(KvrlError, match=f"{name}.safetensors"):
            KVTrace.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(KvrlError, match="missing.safetensors"):
        KVTrace.load(tmp_path / "missing.safetensors")


def test_an_entry_evicted_right_after_its_query_is_valid():
    """TOVA may drop the newest entry: its own query saw it, the next does not."""
    KVTrace(torch.tensor([[[-1, -1, 0, -1]]], dtype=torch.int16), torch.tensor([3], dtype=torch.int32), 2, 1).validate()
    r = sample(prompts=make_prompts([40]), config=cache("tova", buffer=1, window=0, sinks=0))[0]
    lifetimes = r.trace.validate().evicted_at()
    assert bool((lifetimes == torch.arange(r.num_tokens) + 1).any())
