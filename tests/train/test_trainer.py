"""The trainer end to end on a tiny model: every method, resume, cut-invariance, the parity guard, LoRA."""

from __future__ import annotations

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.train import trainer
from kvrl.train import update as updates
from kvrl.train.batch import Batch, minibatches
from kvrl.train.diagnostics import ParityError, repetition_rate
from kvrl.train.run import build
from kvrl.train.trainer import collect, train
from kvrl.train.update import update
from runs import make_config, metrics_of, noisy_rewards


@pytest.mark.parametrize("method", ["dense", "naive", "corrected", "sparse_rl", "shadow_mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_every_method_trains_under_every_loss(tmp_path, monkeypatch, method, loss_type):
    noisy_rewards(monkeypatch)
    config = make_config(tmp_path, method=method, grpo={"loss_type": loss_type}, train={"max_steps": 1})
    run, _ = build(config, lambda text: None)
    before = [p.detach().clone() for p in run.model.parameters()]
    metrics = trainer.train_step(run, 1)
    assert any(not torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert metrics["parity/max"] < 1e-4
    if method == "dense":
        assert metrics["dense_mismatch"] < 1e-4 and metrics["evictions"] == 0
    else:
        assert metrics["dense_mismatch"] > 1e-3 and metrics["evictions"] > 0
    # One update: the old log-probs are the learner's own, whatever the mismatch with the sampler
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0
    if method in ("corrected", "sparse_rl"):
        assert metrics["correction/ratio_max"] > 1.001


def test_the_loss_does_not_depend_on_how_the_batch_is_cut(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    norms, losses = [], []
    for tokens in (10_000, 80, 1):
        config = make_config(tmp_path / str(tokens), train={"micro_batch_tokens": tokens}, grpo={"beta": 0.1})
        run, _ = build(config, lambda text: None)
        batch, _ = collect(run)
        metrics = update(run, batch, 1)
        norms.append(metrics["grad_norm"])
        losses.append(metrics["loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    results = []
    for checkpointing in (False, True):
        config = make_config(tmp_path / str(checkpointing), model={"gradient_checkpointing": checkpointing})
        run, _ = build(config, lambda text: None)
        results.append(trainer.train_step(run, 1))
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-5)
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-7)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_run_whose_rewards_fail_goes_on_from_its_last_step(tmp_path, monkeypatch, failing):
    """A judge that is down loses nothing, not even a warm start, and no checkpoint was asked for."""
    from kvrl.tasks.recurrence import Recurrence

    noisy_rewards(monkeypatch)
    changes = {"train": {"max_steps": 4, "lr_scheduler": "linear"}, "grpo": {"dynamic_sampling": {"max_rounds": 2}}}
    train(make_config(tmp_path / "whole", **changes))
    whole, given, calls = metrics_of(tmp_path / "whole"), Recurrence.reward, []

    def reward(self, completions, **columns):
        calls.append(1)
        if len(calls) == failing:
            raise KvrlError("reward.funcs.judge: http://localhost:1 does not answer")
        return given(self, completions, **columns)

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)
    kept = tmp_path / "cut" / "checkpoints" / f"step-{failing - 1:06d}"
    with pytest.raises(KvrlError, match=f"does not answer; .*{kept}.*--checkpoint.resume latest"):
        train(make_config(tmp_path / "cut", **changes))
    assert not (tmp_path / "cut" / "model").exists()
    train(make_config(tmp_path / "cut", checkpoint={"resume": "latest"}, **changes))
    resumed = metrics_of(tmp_path / "cut")
    assert [m["step"] for m in resumed] == [m["step"] for m in whole] == [1, 2, 3, 4]
    for name in ("loss", "reward", "grad_norm", "learning_rate", "position"):
        assert [m[name] for m in resumed] == pytest.approx([m[name] for m in whole], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_continues_with_the_same_losses(tmp_path, monkeypatch, dtype):
    noisy_rewards(monkeypatch)
    changes = {
        "model": {"dtype": dtype},
        "grpo": {"beta": 0.05, "num_iterations": 2, "num_minibatches": 3},
        "train": {"max_steps": 4, "lr_scheduler": "linear"},
        "checkpoint": {"every": 2},
        "parity": {"mean_tolerance": 1.0, "p99_tolerance": 5.0},
    }
    train(make_config(tmp_path / "whole", **changes))
    whole = metrics_of(tmp_path / "whole")
    # The run is cut after step 3: the checkpoint of step 2 is the newest, and step 3 is done again
    cut = make_config(tmp_path / "cut", **changes)
    real_step = trainer.train_step

    def dies(run, step):
        if step == 4:
            raise KeyboardInterrupt
        return real_step(run, step)

    monkeypatch.setattr(trainer, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(cut)
    monkeypatch.setattr(trainer, "train_step", real_step)
    train(make_config(tmp_path / "cut", **{**changes, "checkpoint": {"every": 2, "resume": "latest"}}))
    again = {m["step"]: m for m in metrics_of(tmp_path / "cut")}
    assert sorted(again) == [1, 2, 3, 4]
    for record in whole:
        for name in ("loss", "grad_norm", "reward", "entropy", "kl/mean", "learning_rate", "position"):
            assert again[record["step"]][name] == pytest.approx(record[name], rel=1e-6, abs=1e-9), name


def test_another_run_is_never_written_over_unasked(tmp_path, monkeypatch):
    train(make_config(tmp_path, warm_start=None, train={"max_steps": 1}, checkpoint={"every": 1}))
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(KvrlError, match="output_dir: .* holds another run"):
        train(make_config(tmp_path, warm_start=None, train={"max_steps": 1}))
    broken = make_config(tmp_path, model={"path": "nowhere"}, overwrite_output_dir=True)
    with pytest.raises(KvrlError, match="nowhere"):
        train(broken)
    assert (tmp_path / "metrics.jsonl").read_text() == before  # refused before anything was removed
    train(make_config(tmp_path, warm_start=None, train={"max_steps": 2}, overwrite_output_dir=True))
    assert [m["step"] for m in metrics_of(tmp_path)] == [1, 2] and not (tmp_path / "checkpoints").exists()


def test_resume_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(KvrlError, match=r"checkpoint.resume: latest, but .* has none"):
        build(make_config(tmp_path, checkpoint={"resume": "latest"}), lambda text: None)


def test_a_broken_replay_stops_the_run_before_any_update(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    for r in batch.rollouts:  # one lifetime of one layer and head, off by one eviction
        if r.trace.num_events > 1:
            r.trace.events[0, 0, (r.trace.events[0, 0] == 0).nonzero()[0]] = -1
            r.trace.events[0, 0, (r.trace.events[0, 0] == 1).nonzero()[0]] = 0
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(KvrlError):
        trainer.replayed(run, batch)
    monkeypatch.setattr(trainer, "collect", lambda run: (batch, {}))
    with pytest.raises(KvrlError):
        trainer.train_step(run, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("changes", [
    {}, {"grpo": {"num_iterations": 2, "num_minibatches": 2}}, {"method": "dense"},
    {"model": {"gradient_checkpointing": True}},
])  # fmt: skip
def test_the_first_update_shows_parity_without_a_forward_of_its_own(tmp_path, monkeypatch, changes):
    noisy_rewards(monkeypatch)
    run, _ = build(make_config(tmp_path, parity={"dense_every": 0}, **changes), lambda text: None)
    batch, _ = collect(run)
    monkeypatch.setattr(trainer, "collect", lambda run: (batch, {}))
    wanted = trainer.replayed(run, batch)  # of all completions
    monkeypatch.setattr(trainer, "replayed", None)  # would fail
    found = trainer.train_step(run, 1)
    assert 0 < found["parity/mean"] < 1e-6
    if "grpo" not in changes:  # all in the first update
        assert all(found[name] == pytest.approx(value, abs=2e-6) for name, value in wanted.items())


@pytest.mark.parametrize("method", ["shadow_mask", "dense", "naive"])
def test_log_probs_that_the_replay_does_not_give_stop_the_run_before_any_update(tmp_path, monkeypatch, method):
    noisy_rewards(monkeypatch)
    run, _ = build(make_config(tmp_path, method=method), lambda text: None)
    batch, _ = collect(run)
    for r in batch.rollouts:
        r.logprobs.add_(1e-3)
    monkeypatch.setattr(trainer, "collect", lambda run: (batch, {}))
    before = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(ParityError, match="has mean 0.001, over 1e-05"):
        trainer.train_step(run, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{"method": "naive"}, {"method": "corrected"}])
def test_a_learner_in_another_view_is_checked_by_a_replay(tmp_path, changes):
    run, _ = build(make_config(tmp_path, **changes), lambda text: None)
    metrics = trainer.train_step(run, 1)
    assert metrics["parity/mean"] < 1e-6 < 1e-3 < metrics["dense_mismatch"]


def test_parity_is_measured_where_nothing_is_learned(tmp_path):
    config = make_config(
        tmp_path, grpo={"mask_truncated_completions": True}, sampling={"max_completion_length": 9, "eos_token_ids": []}
    )
    run, _ = build(config, lambda text: None)
    metrics = trainer.train_step(run, 1)
    assert metrics["truncated"] == metrics["updates_skipped"] == 1 and metrics["parity/mean"] < 1e-6


def test_parity_tolerances_stop_on_mean_and_p99_alone(tmp_path):
    ok = {"parity/mean": 1e-7, "parity/p99": 1e-6, "parity/max": 1e9}
    trainer.check_parity(ok, (1e-5, 1e-4))
    for name in ("mean", "p99"):
        with pytest.raises(ParityError, match=name):
            trainer.check_parity({**ok, f"parity/{name}": 1e-3}, (1e-5, 1e-4))
        with pytest.raises(ParityError, match=name):
            trainer.check_parity({**ok, f"parity/{name}": float("nan")}, (1e-5, 1e-4))


def test_lora_trains_adapters_alone_and_the_reference_is_the_base(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "lm_head"]}
    config = make_config(tmp_path, lora=lora, warm_start=None, grpo={"beta": 0.1, "num_iterations": 3})
    run, _ = build(config, lambda text: None)
    frozen = {n: p.detach().clone() for n, p in run.model.named_parameters() if not p.requires_grad}
    first = trainer.train_step(run, 1)
    second = trainer.train_step(run, 2)
    assert all(torch.equal(frozen[n], p) for n, p in run.model.named_parameters() if n in frozen)
    assert first["kl/mean"] >= 0 and second["kl/mean"] > 0  # the adapters have left the base
    assert second["parity/max"] < 1e-4  # the sampler sees the adapters, the head's too


@pytest.mark.parametrize("lora", [None, {"r": 4}, {"r": 4, "modules_to_save": ["lm_head"]}])
def test_the_reference_is_the_model_after_the_warm_start(tmp_path, monkeypatch, lora):
    noisy_rewards(monkeypatch)
    changes = {"lora": lora, "grpo": {"num_generations": 4, "beta": 0.1}, "train": {"max_steps": 4}}
    run, _ = build(make_config(tmp_path / "a", checkpoint={"every": 2}, **changes), lambda text: None)
    before = [p.detach().clone() for p in run.model.parameters()]
    batch, _ = collect(run)
    assert update(run, batch, 1)["kl/mean"] == pytest.approx(0.0, abs=1e-7)
    moved = [p.detach().clone() for p in run.model.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    assert update(run, batch, 2)["kl/mean"] > 1e-6
    whole = make_config(tmp_path / "b", checkpoint={"every": 2}, **changes)
    train(whole)
    resumed = make_config(tmp_path / "c", checkpoint={"resume": str(tmp_path / "b/checkpoints/step-000002")}, **changes)
    train(resumed)  # with the reference that lies beside the checkpoints
    kl = [m["kl/mean"] for m in metrics_of(tmp_path / "b") if "kl/mean" in m]
    assert [m["kl/mean"] for m in metrics_of(tmp_path / "c") if "kl/mean" in m] == kl[2:] and kl[2] > 0


def test_a_reward_that_float32_cannot_hold_stops_the_run(tmp_path, monkeypatch):
    def reward(self, completions, **columns):
        return [1e39] + [0.0] * (len(completions) - 1)

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)
    run, _ = build(make_config(tmp_path), lambda text: None)
    with pytest.raises(KvrlError, match=r"reward: 1e\+39 for sample 0 is over what float32 holds"):
        trainer.train_step(run, 1)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_gradient_that_is_no_number_stops_the_run_before_the_update(tmp_path, monkeypatch, algorithm):
    noisy_rewards(monkeypatch)
    run, _ = build(make_config(tmp_path, algorithm=algorithm, **{algorithm: {"num_generations": 4}}), lambda text: None)
    batch, _ = collect(run)
    before = [p.detach().clone() for p in run.model.parameters()]
    monkeypatch.setattr(run.algorithm, "loss", lambda scored, *rest: (scored.logps.sum() * float("nan"), {}))
    with pytest.raises(KvrlError, match="train: the gradient's norm is nan at step 7; the weights were left"):
        update(run, batch, 7)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_the_launchers_accumulation_does_not_divide_gradients(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    norms = []
    for steps in (None, "4"):
        if steps:
            monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        run, _ = build(make_config(tmp_path / str(steps)), lambda text: None)
        norms.append(update(run, collect(run)[0], 1)["grad_norm"])
    assert norms[0] == norms[1]


def test_lora_checkpoint_round_trip(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    changes = {"lora": {"r": 2}, "warm_start": None, "checkpoint": {"every": 1}, "grpo": {"beta": 0.1}}
    train(make_config(tmp_path, **{**changes, "train": {"max_steps": 2}}))
    whole = metrics_of(tmp_path)
    folder = str(tmp_path / "checkpoints" / "step-000001")
    train(make_config(tmp_path, **{**changes, "checkpoint": {"every": 0, "resume": folder}, "train": {"max_steps": 2}}))
    assert metrics_of(tmp_path)[-1]["loss"] == pytest.approx(whole[1]["loss"], rel=1e-6, abs=1e-9)


def test_bf16_updates_smaller_than_its_rounding_are_not_lost():
    from kvrl.train.config import TrainSettings
    from kvrl.train.optimizer import make_optimizer

    layer = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    layer.weight.data.fill_(1.0)
    optimizer = make_optimizer(layer, TrainSettings(learning_rate=1e-4))
    for _ in range(60):  # 60 steps of 1e-4; bf16 rounds at 1 to 2^-8 = 0.0039 downwards
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert optimizer.masters[0].dtype == torch.float32
    assert torch.allclose(optimizer.masters[0], torch.full((4, 4), 1 - 60e-4), atol=1e-5)
    assert torch.equal(layer.weight, optimizer.masters[0].to(torch.bfloat16)) and layer.weight[0, 0] < 1


def test_gradients_of_micro_batches_accumulate_in_fp32():
    from kvrl.train.config import TrainSettings
    from kvrl.train.optimizer import make_optimizer

    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = make_optimizer(layer, TrainSettings())
    for value in (256.0, 1.0, 1.0):  # bf16 has 8 bits: 256 + 1 would stay 256
        layer(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert optimizer.masters[0].grad.item() == 258.0 and layer.weight.grad is None


def test_dynamic_sampling_replaces_groups_without_signal(tmp_path, monkeypatch):
    calls = []

    def reward(self, completions, n, **columns):
        calls.append(len(completions))
        first = len(calls) == 1  # in the first round only the first group differs
        return [float(i == 0 or (not first and i % 2)) for i in range(len(completions))]

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)
    config = make_config(tmp_path, grpo={"dynamic_sampling": {"max_rounds": 3}}, warm_start=None)
    run, _ = build(config, lambda text: None)
    batch, metrics = collect(run)
    assert len(batch.rollouts) == 12 and metrics["sampling_rounds"] == 2 and metrics["position"] == 6
    assert metrics["groups_without_signal"] == 0
    assert metrics["reward"] == pytest.approx((1 + 1 + 6) / 24)  # of all that was sampled
    assert metrics["rewards/task/mean"] == metrics["reward"]
    assert metrics["trace_bytes"] > 1.5 * sum(r.trace.nbytes for r in batch.rollouts)  # of 24 completions


def test_a_step_without_any_reward_is_skipped_and_counted(tmp_path, monkeypatch):
    none = lambda self, completions, **columns: [None] * len(completions)  # noqa: E731
    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", none)
    run, _ = build(make_config(tmp_path, warm_start=None), lambda text: None)
    before = [p.detach().clone() for p in run.model.parameters()]
    batch, _ = collect(run)
    metrics = update(run, batch, 1)
    assert metrics["updates_skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


def test_a_nan_reward_stops_the_run_with_the_sample_named(tmp_path, monkeypatch):
    def reward(self, completions, **columns):
        return [0.0] * (len(completions) - 1) + [float("nan")]

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)
    run, _ = build(make_config(tmp_path, warm_start=None), lambda text: None)
    with pytest.raises(KvrlError, match="sample 11"):
        collect(run)


def test_rewards_read_completions_without_their_eos(tmp_path, monkeypatch):
    seen: list[str] = []

    def reward(self, completions, **columns):
        seen.extend(completions)
        return [0.0] * len(completions)

    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", reward)
    every = list(range(50))  # whatever is drawn ends the completion
    run, _ = build(make_config(tmp_path, warm_start=None, sampling={"eos_token_ids": every}), lambda text: None)
    collect(run)
    assert seen == [""] * 12


def test_a_prompt_that_cannot_be_encoded_is_named(tmp_path, monkeypatch):
    chat = [{"role": "user", "content": "3"}]
    monkeypatch.setattr(
        "kvrl.tasks.recurrence.Recurrence.rows", lambda *_: [{"prompt": chat, "n": 3, "answer": "3"}] * 6
    )
    with pytest.raises(KvrlError, match=r"^prompt 0: prompt: a list of 1 chat messages"):
        build(make_config(tmp_path), lambda text: None)


def test_truncated_completions_leave_the_loss_when_asked(tmp_path):
    config = make_config(tmp_path, grpo={"mask_truncated_completions": True}, warm_start=None,
                         sampling={"max_completion_length": 4, "eos_token_ids": []})  # fmt: skip
    run, _ = build(config, lambda text: None)
    batch, metrics = collect(run)
    assert metrics["truncated"] == 1.0 and not batch.mask.any()


def test_minibatches_hold_whole_groups_and_every_sample_once():
    parts = list(minibatches(24, 3, 4, seed=5))
    assert sorted(i for part in parts for i in part) == list(range(24))
    for part in parts:
        assert [part[i : i + 4] for i in range(0, len(part), 4)] == [list(range(g, g + 4)) for g in part[::4]]
    assert list(minibatches(8, 1, 4, seed=0)) == [list(range(8))]


def test_repetition_rate_by_hand(tmp_path):
    class Fake:
        completion_ids = [1, 2, 3, 4, 1, 2, 3, 4, 1]  # 6 four-grams, of which 4 are new

    assert repetition_rate([Fake()]) == pytest.approx(1 - 4 / 6)


def test_overlong_penalty_lowers_the_reward_before_groups_are_compared(tmp_path):
    config = make_config(tmp_path, grpo={"overlong_penalty": {"cache_length": 10}}, warm_start=None)
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    for rollout, reward in zip(batch.rollouts, batch.rewards, strict=True):
        over = max(0, len(rollout.completion_ids) - 20) / 10
        assert reward.item() == pytest.approx(-min(1.0, over))
    again = Batch.build(batch.rollouts, torch.zeros(12), config)
    assert torch.equal(again.rewards, batch.rewards)


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 0),  # one update: the learner's own, detached
        ({"grpo": {"num_iterations": 2}}, 0),  # the sampler's are the same
        ({"grpo": {"num_iterations": 2, "old_logprobs": "recompute"}}, 1),
        ({"grpo": {"num_iterations": 2}, "method": "naive"}, 1),  # the sampler's are of another view
        ({"grpo": {"num_iterations": 2}, "model": {"dtype": "bfloat16"}}, 1),  # the sampler's have another rounding
    ],
)
def test_old_logprobs_cost_a_forward_only_where_they_must(tmp_path, monkeypatch, changes, forwards):
    noisy_rewards(monkeypatch)
    calls, real = [], updates.score_all
    monkeypatch.setattr(updates, "score_all", lambda *args: calls.append(1) or real(*args))
    run, _ = build(make_config(tmp_path, warm_start=None, **changes), lambda text: None)
    batch, _ = collect(run)
    views = updates.fixed_views(run, batch)
    assert len(calls) == forwards
    if run.config.updates == 1:
        assert views.old is None
    elif forwards == 0:
        assert torch.equal(views.old, views.sampler)
    else:
        assert not torch.equal(views.old, views.sampler)
