"""The compiled compaction: entries moved as by gather, repeated keys found as in the matrix of similarities."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import gap
from kvrl.cache.policies.rkv import redundancy, redundancy_native
from kvrl.native.compaction import keep, newest_similar
from kvrl.native.decode_attention import supported

pytestmark = pytest.mark.skipif(not supported(torch.float32, torch.device("cpu"), 64), reason="needs g++")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[2], [4, 0, 3], [1, 1, 3, 3]], ids=str)
def test_kept_entries_move_to_the_front(rows, dtype):
    g = torch.Generator().manual_seed(0)
    entries = torch.randn(2, 6, 3, 20, 16, generator=g).to(dtype)
    choose = {r: torch.rand(2, 3, 20, generator=g).argsort(-1)[..., :7].sort(-1).values for r in set(rows)}
    kept = torch.stack([choose[r] for r in rows], dim=1)  # [2, g, 3, 7]
    before = entries.clone()
    keep(entries, torch.tensor(rows), kept)
    for layer in range(2):
        for row in range(6):
            for head in range(3):
                expected = before[layer, row, head].clone()
                if row in rows:
                    expected[:7] = before[layer, row, head][choose[row][layer, head]]
                assert torch.equal(entries[layer, row, head], expected)


def keys(seed: int, n: int, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Clustered keys, so that many pairs are similar and some are not, and candidates."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(2, 3, 6, dim, generator=g)
    chosen = torch.randint(0, 6, (2, 3, n), generator=g)
    points = centres.gather(2, chosen[..., None].expand(-1, -1, -1, dim)) + 0.4 * torch.randn(2, 3, n, dim, generator=g)
    candidate = torch.rand(2, 3, n, generator=g) < 0.8
    candidate[..., 0] = True
    return points, candidate


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_newest_similar_by_brute_force(n, threshold):
    points, candidate = keys(n, n)
    unit = F.normalize(points, dim=-1)
    expected = torch.zeros(2, 3, n)
    for a in range(2):
        for h in range(3):
            for i in range(n):
                similar = [
                    j for j in range(n)
                    if j != i and candidate[a, h, i] and candidate[a, h, j]
                    and float(unit[a, h, i] @ unit[a, h, j]) > threshold
                ]  # fmt: skip
                if similar:
                    expected[a, h, similar[-1]] += unit[a, h, i] @ unit[a, h, similar[-1]]
    assert gap(newest_similar(unit, candidate, threshold), expected) < 1e-5
    assert n < 15 or threshold == 1.0 or expected.any()


@pytest.mark.parametrize("n", [2, 16, 33, 90])
def test_redundancy_as_from_the_matrix(n):
    for seed in range(5):
        points, candidate = keys(seed, n)
        assert gap(redundancy_native(points, candidate, 0.5), redundancy(points, candidate, 0.5)) < 2e-6


def test_threads_do_not_change_bits():
    points, candidate = keys(0, 90)
    unit, outs = F.normalize(points, dim=-1), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(newest_similar(unit, candidate, 0.5))
    torch.set_num_threads(1)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
