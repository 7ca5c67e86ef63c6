"""Every algorithm under every method: it trains, its numbers are its paper's, and what makes no sense is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from kvrl.cache.trace import KVTrace
from kvrl.errors import KvrlError
from kvrl.learner import completion_mask
from kvrl.objectives.advantages import rloo_advantages
from kvrl.train import trainer
from kvrl.train.algorithms.base import Views
from kvrl.train.config import Config
from kvrl.train.run import build
from kvrl.train.trainer import collect, train
from kvrl.train.update import fixed_views, score_all, update
from runs import make_config, metrics_of, noisy_rewards

METHODS = ("dense", "naive", "corrected", "sparse_rl", "shadow_mask")
SECTIONS = {
    "grpo": {"num_generations": 4},
    "rloo": {"num_generations": 4, "beta": 0.1},
    "ppo": {"num_generations": 4, "num_iterations": 2, "beta": 0.1},
    "online_dpo": {"num_generations": 4},
}
REJECTION = {"level": "token", "action": "reject", "bounds": (1e-4, None)}


def run_of(folder, algorithm, method="shadow_mask", section=None, **changes):
    changes.setdefault("train", {"max_steps": 2, "prompts_per_step": 3})
    if algorithm == "online_dpo" and method == "corrected":
        changes.setdefault("correction", REJECTION)
    config = make_config(
        folder, algorithm=algorithm, method=method, **{algorithm: {**SECTIONS[algorithm], **(section or {})}}, **changes
    )
    return build(config, lambda text: None)[0]


def always_right(monkeypatch) -> None:
    def reward(self, completions, **columns):
        return [1.0] * len(completions)

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)


def weights(module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(before, module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", SECTIONS)
def test_every_algorithm_trains_under_every_method(tmp_path, monkeypatch, algorithm, method):
    noisy_rewards(monkeypatch)
    if (algorithm, method) == ("online_dpo", "sparse_rl"):
        with pytest.raises(ValidationError, match="online_dpo's loss has no such term"):
            run_of(tmp_path, algorithm, method)
        return
    run = run_of(tmp_path, algorithm, method)
    before = weights(run.model)
    metrics = trainer.train_step(run, 1)
    assert not same(before, run.model)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["grad_norm"] > 0 and metrics["updates_skipped"] == 0


def test_online_dpo_refuses_weights_that_it_could_not_use(tmp_path):
    with pytest.raises(ValidationError, match="correction.action: truncate .* set correction.action to reject"):
        make_config(tmp_path, algorithm="online_dpo", method="corrected")


def test_a_section_of_another_algorithm_may_stand_unused(tmp_path):
    config = make_config(tmp_path, algorithm="ppo", ppo={"num_generations": 3}, grpo={"num_generations": 7})
    assert config.sampling.num_generations == 3 and config.slots == 9


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
@pytest.mark.parametrize("method", METHODS)
def test_with_one_update_every_ratio_is_one(tmp_path, monkeypatch, algorithm, method):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, algorithm, method, {"num_iterations": 1})
    metrics = update(run, collect(run)[0], 1)
    assert metrics["ratio/min"] == pytest.approx(1.0, abs=1e-5) and metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)


# --- RLOO ---


def test_rloo_takes_the_kl_out_of_the_reward(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "rloo")
    trainer.train_step(run, 1)  # the policy leaves its reference
    batch, _ = collect(run)
    views = fixed_views(run, batch)
    fixed = run.algorithm.prepare(batch, views, 2)
    kl = [float((views.old[i] - views.reference[i])[batch.mask[i]].sum()) for i in range(12)]
    assert max(map(abs, kl)) > 1e-4
    expected = []
    for i in range(12):
        group = range(i // 4 * 4, i // 4 * 4 + 4)
        penalised = {j: float(batch.rewards[j]) - 0.1 * kl[j] for j in group}
        expected.append(penalised[i] - sum(penalised[j] for j in group if j != i) / 3)
    assert fixed.advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_others_baseline_has_the_kl_of_a_completion_that_does_not_learn(tmp_path, monkeypatch):
    """Equal rewards and equal KL: nobody has an advantage, whoever was truncated."""
    run = run_of(tmp_path, "rloo", section={"mask_truncated_completions": True})
    batch, _ = collect(run)
    half = [replace(r, finish_reason="length" if i % 2 else "eos") for i, r in enumerate(batch.rollouts)]
    batch = type(batch).build(half, torch.ones(12), run.config)
    assert batch.mask.any(-1).tolist() == [True, False] * 6
    lengths = completion_mask(half).sum(-1, keepdim=True)
    views = Views(torch.zeros(batch.mask.shape), old=completion_mask(half) / lengths, reference=torch.zeros(()))
    fixed = run.algorithm.prepare(batch, views, 1)
    assert fixed.advantages.tolist() == pytest.approx([0.0] * 12, abs=1e-6)
    assert fixed.metrics["kl/mean"] == pytest.approx(6 / int(batch.mask.sum()))  # of the tokens that learn


def test_rloo_sums_tokens_and_averages_completions(tmp_path, monkeypatch):
    """With one update the loss is -mean over completions of A * (number of tokens): every ratio is 1."""
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "rloo", section={"beta": 0.0})
    batch, _ = collect(run)
    values = rloo_advantages(batch.rewards, 4).values
    lengths = batch.mask.sum(-1)
    assert len(set(lengths.tolist())) > 1
    assert update(run, batch, 1)["loss"] == pytest.approx(-float((values * lengths).mean()), abs=1e-5)


# --- PPO ---


@pytest.mark.parametrize("critic", ["head", "model"])
def test_the_critic_alone_learns_during_its_warm_up(tmp_path, monkeypatch, critic):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "ppo", section={"critic": critic, "critic_warmup_steps": 1})
    policy, value = weights(run.model), weights(run.critic)
    metrics = trainer.train_step(run, 1)
    assert same(policy, run.model) and not same(value, run.critic)
    assert "ratio/mean" not in metrics
    trainer.train_step(run, 2)
    assert not same(policy, run.model)


def test_a_critic_of_its_own_shares_nothing_with_the_policy(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "ppo", section={"critic": "model", "vf_coef": 0.0})
    shared = {p.data_ptr() for p in run.model.parameters()} & {p.data_ptr() for p in run.critic.parameters()}
    assert not shared
    head, whole = run_of(tmp_path, "ppo"), run
    assert sum(p.numel() for p in whole.critic.parameters()) == sum(p.numel() for p in whole.model.parameters()) + sum(
        p.numel() for p in head.critic.parameters()
    )


@pytest.mark.parametrize("critic", ["head", "model"])
@pytest.mark.parametrize("method", ["shadow_mask", "naive"])
def test_the_critic_sees_what_the_policy_sees(tmp_path, monkeypatch, critic, method):
    """A value at a token that follows an eviction depends on the trace if and only if the learner replays it."""
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "ppo", method, {"critic": critic})
    torch.nn.init.normal_(run.critic.head.weight)
    batch, _ = collect(run)
    values = fixed_views(run, batch).values
    for i, r in enumerate(batch.rollouts):  # nothing was ever evicted
        batch.rollouts[i] = replace(r, trace=KVTrace.dense(*r.trace.events.shape))
    forgotten = fixed_views(run, batch).values
    assert torch.allclose(values, forgotten, atol=1e-5) == (method == "naive")


def test_ppo_puts_the_kl_where_it_is_told(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    fixed = {}
    for kl_in in ("reward", "loss"):
        run = run_of(tmp_path / kl_in, "ppo", section={"kl_in": kl_in, "beta": 0.5, "whiten_advantages": False,
                                                       "lam": 1.0, "gamma": 1.0})  # fmt: skip
        trainer.train_step(run, 1)
        torch.nn.init.zeros_(run.critic.head.weight)
        torch.nn.init.zeros_(run.critic.head.bias)
        batch, _ = collect(run)
        fixed[kl_in] = run.algorithm.prepare(batch, fixed_views(run, batch), 2), batch, run
    plain, batch, _ = fixed["loss"]
    # Without a discount, and with values of 0, a token's advantage is what comes after it: the completion's reward
    assert torch.allclose(plain.advantages, batch.rewards[:, None] * batch.mask, atol=1e-6)
    penalised, batch, _ = fixed["reward"]
    kl = torch.where(batch.mask, penalised.views.old - penalised.views.reference, 0)
    after = kl.flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(penalised.advantages, (batch.rewards[:, None] - 0.5 * after) * batch.mask, atol=1e-5)
    assert float(kl.abs().max()) > 1e-4


def test_the_value_loss_falls_on_a_constant_reward(tmp_path, monkeypatch):
    always_right(monkeypatch)
    run = run_of(
        tmp_path, "ppo",
        section={"num_iterations": 80, "beta": 0.0, "critic_warmup_steps": 9, "cliprange_value": 10.0, "lam": 1.0},
        train={"max_steps": 2, "prompts_per_step": 3, "learning_rate": 0.002},
    )  # fmt: skip
    batch, _ = collect(run)
    before = fixed_views(run, batch).values
    update(run, batch, 1)
    after = fixed_views(run, batch).values
    assert float(before.abs().max()) == 0.0
    assert float(after[batch.mask].mean()) == pytest.approx(1.0, abs=0.15)


# --- Online DPO ---


def test_online_dpo_starts_at_log_two(tmp_path, monkeypatch):
    """Policy and reference agree at the first step, so every pair's loss is log 2, whatever the rewards."""
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "online_dpo", train={"max_steps": 2, "prompts_per_step": 3, "micro_batch_tokens": 1})
    metrics = update(run, collect(run)[0], 1)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["pairs"] == 3.0 and metrics["rewards/margins/mean"] == pytest.approx(0, abs=1e-4)


def test_online_dpo_raises_the_margin_of_its_pairs(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "online_dpo", section={"num_iterations": 8})
    batch, _ = collect(run)
    update(run, batch, 1)
    views = fixed_views(run, batch)
    fixed = run.algorithm.prepare(batch, views, 2)
    gain = torch.where(batch.mask, score_all(run, run.scorer, batch.rollouts)[0] - views.reference, 0).sum(-1)
    assert bool((gain[fixed.pairs.chosen] > gain[fixed.pairs.rejected]).all())


@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_the_pairs_loss_does_not_depend_on_how_the_batch_is_cut(tmp_path, monkeypatch, pairs):
    noisy_rewards(monkeypatch)
    results = []
    for tokens in (10_000, 1):
        run = run_of(tmp_path / str(tokens), "online_dpo", section={"pairs": pairs, "num_iterations": 2},
                     train={"max_steps": 2, "prompts_per_step": 3, "micro_batch_tokens": tokens})  # fmt: skip
        metrics = update(run, collect(run)[0], 1)
        results.append((metrics["loss"], metrics["grad_norm"]))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


def test_equal_rewards_make_no_pair_and_the_step_is_skipped(tmp_path, monkeypatch):
    always_right(monkeypatch)
    run = run_of(tmp_path, "online_dpo")
    before = weights(run.model)
    metrics = trainer.train_step(run, 1)
    assert metrics["updates_skipped"] == 1 and metrics["pairs"] == 0 and same(before, run.model)


def test_a_rejected_completion_is_in_no_pair(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "online_dpo", "corrected", correction={**REJECTION, "bounds": (0.999, 1.001)})
    batch, _ = collect(run)
    views = fixed_views(run, batch)
    kept = views.correction.keep
    assert 0 < int(kept.sum()) < 12
    pairs = run.algorithm.prepare(batch, views, 1).pairs
    assert all(bool(kept[row]) for row in [*pairs.chosen.tolist(), *pairs.rejected.tolist()])


# --- Sparse-RL ---


def test_a_step_whose_samples_are_all_rejected_is_skipped_and_counted(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, "grpo", "sparse_rl", {"beta": 0.1})
    batch, _ = collect(run)
    for r in batch.rollouts:
        r.logprobs[0] += 10  # xi = e^-10 there, below 1e-4
    before = weights(run.model)
    metrics = update(run, batch, 1)
    assert metrics["correction/share_rejected"] == 1.0
    assert metrics["updates_skipped"] == 1 and same(before, run.model)
    assert trainer.train_step(run, 2)["updates_skipped"] == 1  # the run goes on
    assert not same(before, run.model)


def test_sparse_rl_is_plain_grpo_where_nothing_was_evicted(tmp_path, monkeypatch):
    """Sampler and dense view agree then, so that every weight is 1 up to rounding and nothing is rejected."""
    noisy_rewards(monkeypatch)
    results = []
    for method in ("sparse_rl", "naive"):
        # dapo's mean over tokens, as a mean of groups' means is 0 at ratio 1 whatever is weighed
        run = run_of(tmp_path / method, "grpo", method, {"loss_type": "dapo"}, cache={"budget": 100})
        results.append(update(run, collect(run)[0], 1))
    assert results[0]["correction/share_rejected"] == 0.0
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-5)
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-3)


# --- Resuming ---


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "ppo", "ppo": {**SECTIONS["ppo"], "critic": "model"}},
        {"algorithm": "online_dpo", "online_dpo": SECTIONS["online_dpo"]},
        {"distill": {"weight": 0.05, "teacher_weights": "average", "grad_ratio": 0.5}},
        {"distill": {"weight": 0.05, "teacher": "dense", "teacher_weights": "start", "warmup_steps": 3}},
    ],
    ids=["ppo", "online_dpo", "average", "start"],
)
def test_a_resumed_run_is_the_run_that_was_stopped(tmp_path, monkeypatch, changes):
    noisy_rewards(monkeypatch)
    changes = {**changes, "train": {"max_steps": 2}, "checkpoint": {"every": 1}, "warm_start": None}
    train(make_config(tmp_path, **changes))
    whole = metrics_of(tmp_path)
    again = {"checkpoint": {"every": 1, "resume": str(tmp_path / "checkpoints" / "step-000001")}}
    train(make_config(tmp_path, **{**changes, **again}))
    resumed = [m for m in metrics_of(tmp_path) if m["step"] == 2][-1]
    timing = {"seconds", "rollout_seconds", "tokens_per_second"}
    assert {k: v for k, v in resumed.items() if k not in timing} == pytest.approx(
        {k: v for k, v in whole[1].items() if k not in timing}, rel=1e-6, abs=1e-9
    )


def test_settings_of_the_algorithm_in_use_are_checked(tmp_path):
    with pytest.raises(ValidationError) as error:
        make_config(tmp_path, algorithm="ppo", ppo={"num_minibatches": 9})
    assert isinstance(error.value.errors()[0]["ctx"]["error"], KvrlError)
    assert "ppo.num_minibatches: 9 is above train.prompts_per_step" in str(error.value)
    assert Config(grpo={"num_minibatches": 999}, algorithm="rloo").rloo.num_minibatches == 1
