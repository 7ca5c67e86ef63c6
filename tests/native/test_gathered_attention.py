"""The compiled attention over gathered entries: values and gradients against float64."""

from __future__ import annotations

import pytest
import torch

from helpers import gap, random_trace
from kvrl.attention import gathered, segments
from kvrl.attention.gathered import attend_gathered
from kvrl.attention.replay import attend_mask
from kvrl.attention.seam import AttentionCall
from kvrl.attention.segments import Plan, attend_segments
from kvrl.native import gathered_attention as native
from kvrl.native.gathered_attention import known


def make(blocks, hq, heads, m, n, d, batch, length, masks=(1, 1), missing=0):
    """`blocks` in each row over random entries; most are visible, the first one always. missing: queries at the end."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, hq, blocks * m - missing, d, generator=g).bfloat16().requires_grad_()
    k, v = (torch.randn(batch, heads, length, d, generator=g).bfloat16().requires_grad_() for _ in range(2))
    index = torch.randint(length, (batch, blocks, heads, n), generator=g).int()
    visible = torch.rand(batch if masks[0] > 1 else 1, *masks, m, n, generator=g) < 0.7
    visible[..., 0] = True
    return q, k, v, index, visible, torch.randn(q.shape, generator=g).bfloat16()


pytestmark = pytest.mark.skipif(not known(*make(1, 1, 1, 64, 8, 64, 1, 9)[:3], 64), reason="needs g++ and AVX512-BF16")


def run(attend, q, k, v, *more, **kwargs):
    """Output and gradients, in the leaves' type."""
    grad = more[-1]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, *more[:-1], **kwargs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def far(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


SHAPES = [
    (5, 4, 2, 20, 37, 64, 2, 50),  # rows and entries that do not fill a panel
    (3, 2, 1, 33, 70, 128, 2, 90),  # two panels a head
    (4, 3, 3, 64, 64, 64, 1, 99),  # no groups, full panels
    (2, 6, 2, 11, 1, 64, 1, 5),  # a single entry
]


@pytest.mark.parametrize("masks", ["one", "each"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(monkeypatch, shape, masks):
    monkeypatch.setattr(native, "PARTS_BYTES", 3 * 2 * 4 * shape[2] * shape[4] * shape[5])  # three blocks at once
    given = make(*shape, masks=(1, 1) if masks == "one" else (shape[0], shape[2]))
    assert known(*given[:3], shape[3])
    found = run(attend_gathered, *given, scaling=0.3)
    exact = run(attend_gathered, *(x.double() for x in given[:3]), *given[3:], scaling=0.3)
    for one, wanted in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16 and one.shape == wanted.shape
        if shape[4] == 1 and not wanted.abs().max() > 1e-9:  # one entry: no gradient reaches query and key
            assert one.abs().max() < 1e-2
        else:
            assert far(one, wanted) < 4e-3


@pytest.mark.parametrize(("start", "missing"), [(0, 5), (-7, 7), (-3, 22), (-19, 19)])
def test_blocks_that_reach_over_the_ends(start, missing):
    """Queries before the first and after the last one do not exist, and what lies beyond the tensors is not touched."""
    q, k, v, index, visible, grad = make(3, 4, 2, 20, 37, 64, 2, 50, masks=(3, 2), missing=missing)
    exact = run(attend_gathered, q.double(), k.double(), v.double(), index, visible, grad, scaling=0.3, start=start)
    found = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3, start=start)
    for one, wanted in zip(found, exact, strict=True):
        assert far(one, wanted) < 4e-3


def test_tensors_are_read_and_written_in_any_order_of_their_axes():
    """As heads of whole tokens, as a model lays them; as a slice of more; with tokens innermost, which is copied."""
    q, k, v, index, visible, grad = make(3, 4, 2, 20, 37, 64, 2, 50)

    def by_tokens(x):
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    def within(x):
        room = torch.full((x.shape[0], x.shape[1] + 1, x.shape[2] + 3, 2 * x.shape[3]), torch.nan, dtype=x.dtype)
        room[:, 1:, 3:, : x.shape[3]] = x.detach()
        return room[:, 1:, 3:, : x.shape[3]].requires_grad_()

    def innermost(x):
        return x.detach().mT.contiguous().mT.requires_grad_()

    def result(lay):
        leaves = [lay(x) for x in (q, k, v)]
        out = attend_gathered(*leaves, index, visible, scaling=0.3)
        return out, *torch.autograd.grad(out, leaves, lay(grad).detach())

    usual = result(lambda x: x.detach().clone().requires_grad_())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        leaves = [by_tokens(x) for x in (q, k, v)]
        attend_gathered(*leaves, index, visible, scaling=0.3)
    assert kept[:3] == [x.data_ptr() for x in leaves]  # no copy of them
    for lay in (by_tokens, within, innermost):
        for one, wanted in zip(result(lay), usual, strict=True):
            assert torch.equal(one, wanted)
    for one in usual:  # the projections around attention view them as [B, T, H * D]
        assert one.transpose(1, 2).is_contiguous()


def test_is_no_farther_than_torchs_attention():
    given = make(4, 9, 3, 128, 640, 64, 1, 2000)
    exact = run(attend_gathered, *(x.double() for x in given[:3]), *given[3:], scaling=0.125)
    ours, torchs = (run(attend_gathered, *given, scaling=0.125, native=kernels) for kernels in (True, False))
    assert not torch.equal(ours[0], torchs[0])  # two computations
    for one, other, wanted in zip(ours, torchs, exact, strict=True):
        assert far(one, wanted) < 1.1 * far(other, wanted)


def test_threads_and_parts_do_not_change_bits(monkeypatch):
    given = make(7, 4, 2, 40, 50, 64, 2, 60)
    whole = run(attend_gathered, *given, scaling=0.2)
    monkeypatch.setattr(native, "PARTS_BYTES", 1)
    torch.set_num_threads(3)
    again = run(attend_gathered, *given, scaling=0.2)
    torch.set_num_threads(1)
    for one, other in zip(again, whole, strict=True):
        assert torch.equal(one, other)


def test_a_hidden_entry_with_a_huge_logit_changes_nothing():
    q, k, v, index, visible, grad = make(2, 2, 1, 32, 9, 64, 1, 30)
    index[..., 8] = 29  # which no other entry is
    index[..., :8] %= 29
    visible[..., 8] = False
    usual = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3)
    with torch.no_grad():
        k[0, 0, 29] = 3e4
        v[0, 0, 29] = 3e4
    hidden = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3)
    for one, other in zip(hidden, usual, strict=True):
        assert torch.equal(one, other)
    assert not hidden[2][0, 0, 29].any() and not hidden[3][0, 0, 29].any()


def test_what_is_not_a_number_stays_in_its_row():
    q, k, v, index, visible, _ = make(1, 1, 1, 32, 9, 64, 1, 30)
    with torch.no_grad():
        q[0, 0, 3, 5] = torch.nan
        out = attend_gathered(q, k, v, index, visible, scaling=0.3)
    assert out.isnan().any(-1)[0, 0].nonzero()[:, 0].tolist() == [3]


def test_gradients_are_summed_in_float32():
    """An entry that 1,024 blocks read: a bfloat16 sum would stop growing at 256 shares."""
    n = 1024
    q = torch.zeros(1, 1, n * 32, 64, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    index = torch.zeros(1, n, 1, 1, dtype=torch.int32)
    attend_gathered(q, k, v, index, torch.ones(1, 1, 1, 32, 1, dtype=torch.bool), scaling=1.0).sum().backward()
    assert v.grad[0, 0, 0].tolist() == [32.0 * n] * 64 and not v.grad[0, 0, 1].any()


def test_nothing_gathered_is_kept_for_the_backward_pass():
    q, k, v, index, visible, _ = make(*SHAPES[0])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        out = attend_gathered(q, k, v, index, visible, scaling=0.3)
    counts, lse = index.shape[:2], (*index.shape[:3], q.shape[1] // k.shape[1] * visible.shape[3])
    assert kept == [*(x.shape for x in (q, k, v, index)), counts, *(x.shape for x in (visible, out)), lse]


@pytest.mark.parametrize("masks", ["one", "each"])
def test_blocks_with_entries_of_their_own_number(monkeypatch, masks):
    """The last `counts` entries of each block, the rest of `index` and `visible` is never read."""
    blocks, hq, heads, m, n, d, batch, length = shape = (2, 4, 2, 20, 70, 64, 2, 90)
    monkeypatch.setattr(native, "PARTS_BYTES", 3 * 2 * 4 * heads * n * d)
    q, k, v, index, visible, grad = make(*shape, masks=(1, 1) if masks == "one" else (blocks, heads))
    counts = torch.tensor([[70, 1], [33, 64]])
    visible[..., -1] = True
    exists = (torch.arange(n) >= n - counts[..., None])[:, :, None, None, :]  # [B, C, 1, 1, n]
    exact = run(attend_gathered, q.double(), k.double(), v.double(), index, visible & exists, grad, scaling=0.3)
    index = torch.where(exists[:, :, :, 0], index, 2**30)
    found = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3, counts=counts)
    for one, wanted in zip(found, exact, strict=True):
        assert far(one, wanted) < 4e-3


def test_what_is_not_a_number_stays_in_its_block():
    """One thread's tasks share their memory: what a longer block left where a shorter one has nothing is not read."""
    q, k, v, index, visible, grad = make(2, 1, 1, 32, 50, 64, 1, 120, missing=1)
    index = torch.stack([torch.arange(50), 60 + torch.arange(50)]).view(1, 2, 1, 50).int()
    counts = torch.tensor([[50, 10]])
    visible[..., -10:] = True
    clean = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3, counts=counts)
    with torch.no_grad():
        q[0, 0, [0, 31], 0] = torch.nan  # the last one stands where the second block has no query
    found = run(attend_gathered, q, k, v, index, visible, grad, scaling=0.3, counts=counts)
    assert found[1][0, 0, :32].isnan().any()
    for one, wanted, from_token in zip(found, clean, (32, 32, 60, 60), strict=True):
        assert torch.equal(one[:, :, from_token:], wanted[:, :, from_token:])


def test_a_query_that_sees_nothing():
    q, k, v, index, visible, grad = make(1, 2, 1, 32, 9, 64, 2, 30)
    blind = visible.clone()
    blind[..., 5, :] = False
    grad[:, :, 5] = 0
    usual, found = (run(attend_gathered, q, k, v, index, seen, grad, scaling=0.3) for seen in (visible, blind))
    assert not found[0][:, :, 5].any() and not found[1][:, :, 5].any()
    assert torch.equal(found[0][:, :, 6:], usual[0][:, :, 6:])
    for one, wanted in zip(found[2:], usual[2:], strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize("window", [None, 40, 58, 75])
@pytest.mark.parametrize("budget, buffer, tokens", [(37, 20, (100, 70, 58, 30)), (48, 16, (140,)), (40, 24, (33, 64))])
def test_segments_as_blocks_equal_the_mask(monkeypatch, budget, buffer, tokens, window):
    """All tokens of a sequence by the kernel, those before the first eviction too."""
    traces = [random_trace(t, budget, buffer, seed=t) for t in tokens]
    length, capacity = max(tokens), budget + buffer
    lifetimes = torch.stack([torch.nn.functional.pad(t.evicted_at()[0], (0, length - t.num_tokens)) for t in traces])
    lifetimes = lifetimes.masked_fill(lifetimes == 0, 10**6)
    if window is not None and window <= capacity:  # a ring: the sampler's trace records nothing there
        lifetimes = None
    given = make(1, 4, 2, length, 1, 64, len(tokens), length)
    grad = given[5] * (torch.arange(length) < torch.tensor(tokens)[:, None])[:, None, :, None]

    def under(attend):
        def attention(q, k, v):
            return attend(AttentionCall(layer=0, q=q, k=k, v=v, scaling=0.3, window=window, softcap=None, s_aux=None))

        return attention

    plan = Plan(torch.zeros(1, len(tokens), 2, 1, budget, dtype=torch.int32), budget, buffer)
    if any(t.num_events for t in traces):
        plan = Plan.from_traces(traces, length, "cpu")
    exact = run(under(lambda call: attend_mask(call, lifetimes)), *(x.double() for x in given[:3]), grad)
    if window is None or window > capacity:
        monkeypatch.setattr(segments, "attend", None)  # nothing is left to torch's attention
    found = run(under(lambda call: attend_segments(call, plan)), *given[:3], grad)
    real = (torch.arange(length) < torch.tensor(tokens)[:, None])[:, None, :, None]
    for one, wanted in zip(found, exact, strict=True):
        assert one.isfinite().all() and far(one * real, wanted * real) < 5e-3


def test_what_is_known():
    q, k, v, *_ = make(1, 4, 2, 16, 8, 64, 1, 9)
    assert known(q, k, v, 16)  # 2 query heads a group x 16 queries
    assert not known(q, k, v, 15) and not known(q[..., :32], k[..., :32], v[..., :32], 16)
    for one in range(3):
        assert not known(*(x.float() if i == one else x for i, x in enumerate((q, k, v))), 16)
    assert not known(q, k, torch.cat([v, v], dim=-1), 16)


@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (None, True)])
def test_soft_caps_and_sinks_take_the_general_path(monkeypatch, softcap, sinks):
    q, k, v, index, visible, _ = make(*SHAPES[0])
    s_aux = torch.ones(4) if sinks else None
    monkeypatch.setattr(gathered, "attend_gathered_native", None)  # would fail
    out = attend_gathered(q, k, v, index, visible, scaling=0.3, softcap=softcap, s_aux=s_aux)
    plain = attend_gathered(q, k, v, index, visible, scaling=0.3, softcap=softcap, s_aux=s_aux, native=False)
    assert gap(out, plain) == 0.0
