"""What a run's step optimises, against its paper's formula written out: every field reaches the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrl.learner import logprobs
from kvrl.train.batch import Batch, Cut
from kvrl.train.run import Run, build
from kvrl.train.trainer import collect
from kvrl.train.update import make_course, update
from runs import make_config, noisy_rewards


def moved(run: Run) -> None:
    """Let the policy leave what it was when it sampled, far enough for ratios beyond the clip range."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.03 * torch.randn(p.shape, generator=generator)


def run_of(folder, monkeypatch, **changes) -> Run:
    noisy_rewards(monkeypatch)
    return build(make_config(folder, **changes), lambda text: None)[0]


def step_loss(run: Run, batch: Batch) -> tuple[float, dict[str, Any]]:
    """The objective of one optimiser step over the whole batch once the policy has moved, and what it is made of:
    lists of log-probs and values by completion.
    """
    fixed = make_course(run, batch, 2).fixed
    moved(run)
    rows = list(range(len(batch.rollouts)))
    with torch.no_grad():
        scored = run.scorer(batch.rollouts, view=run.config.learner_view)
        loss, _ = run.algorithm.loss(scored, fixed, Cut(rows, scored.logps), run.algorithm.normaliser(fixed, rows))
    assert batch.mask.sum(-1).unique().numel() > 1  # lengths differ, or means could not be told apart

    def by_row(x: Tensor | None) -> list[list[float]] | None:
        return None if x is None else [x[i][batch.mask[i]].double().tolist() for i in rows]

    parts = {
        "logps": by_row(scored.logps), "old": by_row(fixed.views.old), "sampler": by_row(fixed.views.sampler),
        "reference": by_row(fixed.views.reference), "values": by_row(scored.values),
        "old_values": by_row(fixed.views.values),
    }  # fmt: skip
    return float(loss), parts


def clipped(ratio: float, advantage: float, low: float = 0.2, high: float | None = None) -> float:
    high = low if high is None else high
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def k3(logp: float, reference: float) -> float:
    return math.exp(reference - logp) - (reference - logp) - 1


# --- Sparse-RL ---


@pytest.mark.parametrize(
    "settings",
    [
        {},  # the released settings
        {"band": None, "normalize": False, "max_weight": 1.0005, "reject_below": 0.99},
        {"band": (0.9995, 1.0005), "normalize": True, "max_weight": 1.0002, "reject_below": 0.98},
    ],
)
def test_sparse_rl_optimises_the_papers_objective(tmp_path, monkeypatch, settings):
    """J of arXiv 2601.10079 by default: means over each completion's tokens, then over all completions."""
    run = run_of(tmp_path, monkeypatch, method="sparse_rl", sparse_rl=settings, grpo={"beta": 0.2})
    batch, _ = collect(run)
    loss, parts = step_loss(run, batch)
    eps, cap = settings.get("reject_below", 1e-4), settings.get("max_weight", 1.5)
    low, high = settings.get("band", (0.5, 1.5)) or (0.0, math.inf)
    xi = [
        [math.exp(o - s) for o, s in zip(*rows, strict=True)]
        for rows in zip(parts["old"], parts["sampler"], strict=True)
    ]
    rejected = [min(row) < eps for row in xi]
    if "reject_below" in settings:
        assert 0 < sum(rejected) < 12
    kept = [[not out and low <= x <= high for x in row] for row, out in zip(xi, rejected, strict=True)]
    if settings.get("band"):
        assert any(any(row) and not all(row) for row in kept)
    remaining = [min(x, cap) for row, k in zip(xi, kept, strict=True) for x, one in zip(row, k, strict=True) if one]
    mean = sum(remaining) / len(remaining) if settings.get("normalize", True) else 1.0
    j = 0.0
    for i, row in enumerate(xi):
        counted = kept[i] if any(kept[i]) else [True] * len(row)  # a rejected one stays in the average, with weight 0
        total = 0.0
        for t in range(len(row)):
            if counted[t]:
                weight = min(row[t], cap) / mean if kept[i][t] else 0.0
                ratio = math.exp(parts["logps"][i][t] - parts["old"][i][t])
                total += weight * clipped(ratio, float(batch.advantages.values[i]))
                total -= 0.2 * k3(parts["logps"][i][t], parts["reference"][i][t])
        j += total / sum(counted) / 12
    assert loss == pytest.approx(-j, abs=1e-5)


def test_sparse_rl_has_another_default_loss_type_and_takes_what_is_given(tmp_path, monkeypatch):
    run = run_of(tmp_path, monkeypatch, method="sparse_rl")
    assert run.algorithm.loss_type()[0] == "grpo"
    given = run_of(tmp_path / "dapo", monkeypatch, method="sparse_rl", grpo={"loss_type": "dapo"})
    assert given.algorithm.loss_type()[0] == "dapo"
    assert run_of(tmp_path / "other", monkeypatch).algorithm.loss_type()[0] == "dapo"


# --- GRPO ---


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_scales_rewards_and_clips_as_it_is_told(tmp_path, monkeypatch, scale):
    settings = {
        "scale_rewards": scale,
        "loss_type": "dr_grpo",
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "num_iterations": 2,
    }
    run = run_of(tmp_path, monkeypatch, grpo=settings)
    batch, _ = collect(run)
    loss, parts = step_loss(run, batch)
    rewards = batch.rewards.double().view(-1, 4)
    advantages = rewards - rewards.mean(-1, keepdim=True)
    if scale != "none":
        advantages /= (rewards.std(-1, keepdim=True) if scale == "group" else rewards.std()) + 1e-4
    j = 0.0
    for new, old, advantage in zip(parts["logps"], parts["old"], advantages.flatten().tolist(), strict=True):
        j += sum(clipped(math.exp(n - o), advantage, 0.1, 0.3) for n, o in zip(new, old, strict=True))
    assert loss == pytest.approx(-j / (12 * 30), abs=1e-5)


# --- PPO ---


PPO = {
    "num_generations": 4, "epsilon": 0.1, "beta": 0.3, "gamma": 0.9, "lam": 0.7, "vf_coef": 0.4,
    "cliprange_value": 0.02,
}  # fmt: skip


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("whiten", [True, False])
def test_ppo_is_the_clipped_losses_of_policy_and_critic(tmp_path, monkeypatch, kl_in, whiten):
    """GAE written as its sum over what comes after, value clipping, and the KL in one of its two places."""
    run = run_of(tmp_path, monkeypatch, algorithm="ppo", ppo={**PPO, "kl_in": kl_in, "whiten_advantages": whiten})
    torch.nn.init.normal_(run.critic.head.weight, generator=torch.Generator().manual_seed(1))
    update(run, collect(run)[0], 1)  # the policy leaves its reference
    batch, _ = collect(run)
    loss, parts = step_loss(run, batch)
    advantages, returns, penalties = [], [], []
    for i, old in enumerate(parts["old"]):
        k1 = [o - r for o, r in zip(old, parts["reference"][i], strict=True)]
        values = [*parts["old_values"][i], 0.0]
        rewards = [-0.3 * k if kl_in == "reward" else 0.0 for k in k1]
        rewards[-1] += float(batch.rewards[i])
        deltas = [rewards[t] + 0.9 * values[t + 1] - values[t] for t in range(len(old))]
        row = [sum((0.9 * 0.7) ** (s - t) * deltas[s] for s in range(t, len(old))) for t in range(len(old))]
        advantages.append(row)
        returns.append([a + v for a, v in zip(row, values, strict=False)])
        penalties.append([k3(n, r) for n, r in zip(parts["logps"][i], parts["reference"][i], strict=True)])
    every = torch.tensor([a for row in advantages for a in row], dtype=torch.float64)
    shift, scale = (every.mean().item(), math.sqrt(every.var().item() + 1e-8)) if whiten else (0.0, 1.0)
    policy = value = 0.0
    cut = 0
    for i, old in enumerate(parts["old"]):
        for t, (n, o) in enumerate(zip(parts["logps"][i], old, strict=True)):
            policy -= clipped(math.exp(n - o), (advantages[i][t] - shift) / scale, 0.1)
            policy += 0.3 * penalties[i][t] if kl_in == "loss" else 0.0
            v, before, target = parts["values"][i][t], parts["old_values"][i][t], returns[i][t]
            near = min(max(v, before - 0.02), before + 0.02)
            cut += near != v
            value += 0.5 * max((v - target) ** 2, (near - target) ** 2)
    assert cut > 0
    assert loss == pytest.approx((policy + 0.4 * value) / len(every), rel=1e-4)


def test_the_critic_has_its_own_learning_rate(tmp_path, monkeypatch):
    run = run_of(tmp_path, monkeypatch, algorithm="ppo", ppo={**PPO, "critic_learning_rate": 0.05})
    head, body = run.critic.head.weight, next(run.model.parameters())
    rates = {id(p): group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
    assert (rates[id(head)], rates[id(body)]) == (0.05, run.config.train.learning_rate)


# --- RLOO ---


def test_rloo_has_one_ratio_for_each_completion(tmp_path, monkeypatch):
    run = run_of(
        tmp_path, monkeypatch, algorithm="rloo", rloo={"num_generations": 4, "num_iterations": 2, "epsilon": 0.5}
    )
    batch, _ = collect(run)
    loss, parts = step_loss(run, batch)
    rewards = batch.rewards.double().tolist()
    j = 0.0
    for i, (new, old) in enumerate(zip(parts["logps"], parts["old"], strict=True)):
        group = [j for j in range(i // 4 * 4, i // 4 * 4 + 4) if j != i]
        advantage = rewards[i] - sum(rewards[k] for k in group) / 3
        j += len(new) * clipped(math.exp(sum(new) - sum(old)), advantage, 0.5) / 12
    assert loss == pytest.approx(-j, rel=1e-4)


# --- Online DPO ---


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_online_dpo_has_the_loss_that_it_is_told(tmp_path, monkeypatch, loss_type, average):
    settings = {"num_generations": 4, "beta": 0.3, "loss_type": loss_type, "average_logps": average, "pairs": "all"}
    run = run_of(tmp_path, monkeypatch, algorithm="online_dpo", online_dpo=settings)
    batch, _ = collect(run)
    loss, parts = step_loss(run, batch)
    rewards, losses = batch.rewards.tolist(), []
    gains = []
    for new, reference in zip(parts["logps"], parts["reference"], strict=True):
        gain = sum(new) - sum(reference)
        gains.append(gain / len(new) if average else gain)
    for i in range(12):
        for j in range(i // 4 * 4, i // 4 * 4 + 4):
            if rewards[i] > rewards[j]:
                d = gains[i] - gains[j]
                losses.append((d - 1 / 0.6) ** 2 if loss_type == "ipo" else math.log1p(math.exp(-0.3 * d)))
    assert len(losses) > 6
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


# --- Distillation ---


@pytest.mark.parametrize(
    "teacher, kl, top_k",
    [("sparse", "forward", None), ("dense", "reverse", None), ("sparse", "js", None), ("dense", "forward", 3),
     ("sparse", "reverse", 3), ("dense", "js", 3)],
)  # fmt: skip
def test_the_distillation_is_the_divergence_that_it_is_told(tmp_path, monkeypatch, teacher, kl, top_k):
    """From the whole distributions of both views, as the model gives them; the cut-off part is logged."""
    small = {
        "grpo": {"num_generations": 2},
        "train": {"prompts_per_step": 1},
        "sampling": {"max_completion_length": 16},
    }
    settings = {"weight": 0.5, "teacher": teacher, "kl": kl, "top_k": top_k}
    run = run_of(tmp_path, monkeypatch, distill=settings, cache={"budget": 8, "buffer": 4, "window": 2}, **small)
    moved(run)  # a model whose distributions are not yet flat
    batch, _ = collect(run)
    exact, cut = [], []
    for r in batch.rollouts:
        views = {view: distributions(run, r, view) for view in ("sparse", "dense")}
        p, q = views[teacher], views["dense" if teacher == "sparse" else "sparse"]  # [C, V] each
        exact.append(divergence(p, q, kl))
        if top_k is not None:
            ids = p.topk(top_k, dim=-1).indices
            p, q = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, q))
        cut.append(divergence(p, q, kl))
    whole, seen = torch.cat(exact), torch.cat(cut)
    metrics = update(run, batch, 1)
    assert float(seen.mean()) > 1e-4
    assert metrics["distill/kl/mean"] == pytest.approx(float(seen.mean()), rel=1e-3)
    if top_k is None:
        assert "distill/top_k_error/mean" not in metrics
    else:
        assert metrics["distill/top_k_error/mean"] == pytest.approx(float((whole - seen).mean()), rel=1e-2)
        assert float((whole - seen).mean()) > 1e-5


def distributions(run: Run, rollout, view) -> Tensor:
    """f64 [C, V]: every token of the vocabulary scored in each sampled token's place."""
    vocab = run.model.config.vocab_size
    out = []
    for token in range(vocab):
        other = [
            replace(rollout, completion_ids=[*rollout.completion_ids[:t], token, *rollout.completion_ids[t + 1 :]])
            for t in range(len(rollout.completion_ids))
        ]
        with torch.no_grad():
            scored = logprobs(run.model, other, view=view)
        out.append(scored.diagonal())
    return torch.stack(out, -1).double().exp()


def divergence(p: Tensor, q: Tensor, kl: str) -> Tensor:
    """Nats [C] of distributions [C, V]: forward is KL(p || q), p being the teacher's."""

    def of(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    mix = (p + q) / 2
    return {"forward": of(p, q), "reverse": of(q, p), "js": (of(p, mix) + of(q, mix)) / 2}[kl]
