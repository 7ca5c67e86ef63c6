"""Every policy's scores against its formula written out in loops, and the state that some of them gather."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import cache, make_prompts, model, sampling
from kvrl.attention.replay import attend_mask
from kvrl.cache.policies import POLICIES, Entries, make_policy
from kvrl.cache.policies.base import Observation
from kvrl.sampler.engine import Engine

N, H, GROUP, W, n, D = 2, 2, 2, 5, 13, 6
SCALING = 0.37


def entries(seed: int = 0, softcap: float | None = 1.5, in_prompt: bool = False, **fields) -> Entries:
    """Random full slots; the first two and the last three entries may not go."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(N, H, n, D, generator=g)
    keys[..., 4:9, :] = keys[..., 2:3, :] + 0.2 * torch.randn(N, H, 5, D, generator=g)  # some repeat each other
    candidate = torch.ones(N, H, n, dtype=torch.bool)
    candidate[..., :2] = False
    candidate[..., -3:] = False
    position = torch.randperm(40, generator=g)[:n].sort().values.expand(N, H, n).to(torch.int32)
    return Entries(**{
        "keys": keys, "values": torch.randn(N, H, n, D, generator=g),
        "queries": torch.randn(N, H * GROUP, W, D, generator=g), "state": torch.rand(N, H, n, generator=g),
        "position": position, "candidate": candidate, "stream": torch.tensor([5, 6]), "scaling": SCALING,
        "softcap": softcap, "in_prompt": in_prompt, **fields,
    })  # fmt: skip


def logit(e: Entries, s: int, q_head: int, w: int, j: int) -> float:
    k = e.keys[s, q_head // GROUP, j]
    x = sum(float(a) * float(b) for a, b in zip(e.queries[s, q_head, w], k, strict=True)) * SCALING
    return x if e.softcap is None else e.softcap * math.tanh(x / e.softcap)


def softmax(values: dict[int, float]) -> dict[int, float]:
    top = max(values.values())
    total = sum(math.exp(v - top) for v in values.values())
    return {j: math.exp(v - top) / total for j, v in values.items()}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def importance(e: Entries, s: int, h: int, queries: int, pool: str, kernel: int) -> dict[int, float]:
    """I of R-KV and SnapKV; pooling crosses entries that may not go as if they were 0."""
    those = [j for j in range(n) if e.candidate[s, h, j]]
    mean = dict.fromkeys(range(n), 0.0)
    for w in range(W - queries, W):
        best = {j: max(logit(e, s, h * GROUP + g, w, j) for g in range(GROUP)) for j in those}
        for j, p in softmax(best).items():
            mean[j] += p / queries
    near = {j: [mean[i] if 0 <= i < n else 0.0 for i in range(j - kernel // 2, j + kernel // 2 + 1)] for j in those}
    return {j: max(x) if pool == "max" else sum(x) / kernel for j, x in near.items()}


def redundancy(e: Entries, s: int, h: int, threshold: float) -> dict[int, float]:
    """R of R-KV: each row spares the newest key that it finds similar; then column means, then a softmax."""
    those = [j for j in range(n) if e.candidate[s, h, j]]
    sums = dict.fromkeys(those, 0.0)
    for i in those:
        row = {j: 0.0 if i == j else cosine(e.keys[s, h, i], e.keys[s, h, j]) for j in those}
        similar = [j for j in those if row[j] > threshold]
        if similar:
            row[max(similar)] = 0.0
        for j in those:
            sums[j] += row[j]
    return softmax({j: x / len(those) for j, x in sums.items()})


def slow_rkv(e, s, h, mix=0.1, kernel=7, threshold=0.5, window=4):
    i, r = importance(e, s, h, window, "max", kernel), redundancy(e, s, h, threshold)
    return {j: mix * i[j] - (1 - mix) * r[j] for j in i}


def slow_tova(e, s, h):
    probs = [softmax({j: logit(e, s, q, W - 1, j) for j in range(n)}) for q in range(h * GROUP, (h + 1) * GROUP)]
    return {j: sum(p[j] for p in probs) / GROUP for j in range(n)}


def slow_keydiff(e, s, h):
    unit = [e.keys[s, h, j].double() / e.keys[s, h, j].double().norm() for j in range(n)]
    anchor = sum(unit) / n
    return {j: -cosine(e.keys[s, h, j], anchor) for j in range(n)}


CASES = [
    ("rkv", {"window": 4}, False, slow_rkv),
    ("rkv", {"window": 4, "kernel": 3, "mix": 0.6, "threshold": 0.9}, False,
     lambda e, s, h: slow_rkv(e, s, h, 0.6, 3, 0.9)),
    ("snapkv", {"window": 3, "kernel": 5}, False, lambda e, s, h: importance(e, s, h, 3, "max", 5)),
    ("snapkv", {"window": 3, "prompt_window": 4, "prompt_kernel": 3}, True,
     lambda e, s, h: importance(e, s, h, 4, "avg", 3)),
    ("tova", {}, False, slow_tova),
    ("keydiff", {}, False, slow_keydiff),
    ("knorm", {}, False, lambda e, s, h: {j: -math.hypot(*e.keys[s, h, j].tolist()) for j in range(n)}),
    ("h2o", {}, False, lambda e, s, h: {j: float(e.state[s, h, j]) for j in range(n)}),
    ("streaming", {}, False, lambda e, s, h: {j: float(e.position[s, h, j]) for j in range(n)}),
    ("recent", {}, False, lambda e, s, h: {j: float(e.position[s, h, j]) for j in range(n)}),
]  # fmt: skip


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("name, params, in_prompt, slow", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_scores_against_loops(name, params, in_prompt, slow, softcap):
    e = entries(softcap=softcap, in_prompt=in_prompt)
    policy = POLICIES[name](**params)
    if name == "tova":
        e = entries(softcap=softcap, queries=e.queries[:, :, -1:].expand(-1, -1, W, -1).contiguous())
        score = policy.score(entries(softcap=softcap, queries=e.queries[:, :, -1:]))
    else:
        score = policy.score(e)
    for s in range(N):
        for h in range(H):
            for j, expected in slow(e, s, h).items():
                if e.candidate[s, h, j]:
                    assert float(score[s, h, j]) == pytest.approx(expected, abs=2e-6), (s, h, j)


def test_random_scores_are_the_requests_own():
    policy = POLICIES["random"]()
    e = entries()
    score = policy.score(e)
    swapped = policy.score(entries(stream=torch.tensor([6, 5])))
    assert torch.equal(swapped.flip(0), score)  # the same positions in both rows: only streams differ
    assert not torch.equal(score[0, 0], score[0, 1])
    many = policy.score(entries(stream=torch.tensor([9, 10]), position=torch.arange(40_000).expand(2, 2, -1)))
    assert abs(many.mean() - 0.5) < 0.005 and abs(many.var() - 1 / 12) < 0.002


def test_tova_asks_for_one_set_per_layer():
    assert make_policy(cache("tova")).granularity == "per_layer"
    assert {name for name in POLICIES if make_policy(cache(name)).granularity == "per_layer"} == {"tova"}


def test_defaults_that_keep_entries():
    assert make_policy(cache("h2o", budget=40)).window == 20  # the recent half
    assert make_policy(cache("recent")).sinks == 0 and make_policy(cache("streaming")).sinks == 4
    snapkv = make_policy(cache("snapkv", budget=80, params={}))
    assert (snapkv.window_at(in_prompt=True), snapkv.window_at(in_prompt=False)) == (64, 4)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_h2o_state_is_the_column_sums_of_a_full_attention(chunk, softcap):
    g = torch.Generator().manual_seed(3)
    T = 100
    q, k = torch.randn(1, 4, T, D, generator=g), torch.randn(1, 2, T, D, generator=g)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    state = torch.zeros(1, 2, T)
    for start in range(0, T, chunk):
        rows = slice(start, min(T, start + chunk))
        visible = causal[rows][None, None]
        make_policy(cache("h2o")).observe(state, Observation(q[:, :, rows], k, visible, 0.3, softcap))
    logits = 0.3 * q.double() @ k.repeat_interleave(2, dim=1).double().transpose(-1, -2)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    columns = logits.masked_fill(~causal, float("-inf")).softmax(-1).sum(-2).view(1, 2, 2, T).sum(2)
    assert torch.allclose(state.double(), columns, atol=1e-5)


@pytest.mark.parametrize("name, window", [("llama", 8), ("gemma2", 40)])
def test_h2o_state_follows_its_entries(name, window):
    """After 61 tokens and 4 evictions an entry's state is its column of the visible attention."""
    lm = model(name, window)
    engine = Engine(lm, cache("h2o"), sampling(12), num_slots=2, max_prompt_length=64)
    (r,) = engine.run(make_prompts([50]), seed=1)
    T = r.num_tokens - 1  # forwarded
    lifetimes, calls = r.trace.evicted_at()[..., :T], {}

    class Record:
        def attend(self, call):
            calls[call.layer] = call
            return attend_mask(call, lifetimes[call.layer][None])

    ids = torch.tensor([r.token_ids[:-1]])
    with torch.no_grad():
        lm(input_ids=ids, position_ids=torch.arange(T)[None], use_cache=False, kv=Record())
    held = T - int(r.trace.evicted_at_event[-1]) + 24
    for i, layer in enumerate(engine.slots.managed):
        call = calls[layer]
        logits = call.scaling * call.q[0].view(2, 2, T, -1) @ call.k[0][:, None].transpose(-1, -2)  # [H, group, T, T]
        logits = logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)
        index = torch.arange(T)
        visible = (index <= index[:, None])[None] & (index[:, None] < lifetimes[layer][:, None])
        if call.window is not None:
            visible &= index > index[:, None] - call.window
        columns = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1).sum((1, 2))  # [H, T]
        position = engine.slots.position[i, 0, :, :held].long()
        assert torch.allclose(engine.slots.state[i, 0, :, :held], columns.gather(1, position), atol=2e-4)
        assert bool((engine.slots.state[i, 0, :, held:] == 0).all())
