"""The distillation term of a run: its weight, its teacher's weights, and its controller."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from kvrl.train import trainer
from kvrl.train.distill_settings import DistillSettings
from kvrl.train.distiller import Average
from kvrl.train.run import build
from kvrl.train.trainer import collect
from kvrl.train.update import update
from runs import make_config, noisy_rewards


def run_of(folder, distill, **changes):
    return build(make_config(folder, distill=distill, **changes), lambda text: None)[0]


def test_weight_zero_computes_one_view(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 0.0})
    assert run.distiller is None
    assert not any(name.startswith("distill") for name in trainer.train_step(run, 1))


@pytest.mark.parametrize("method", ["dense", "naive", "corrected"])
def test_other_methods_have_no_second_view(tmp_path, method):
    assert run_of(tmp_path, {"weight": 0.1}, method=method).distiller is None


def test_the_term_is_the_mean_over_response_tokens_times_its_weight(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    losses = {}
    for weight in (0.0, 0.3):
        for tokens in (10_000, 1):
            run = run_of(tmp_path / f"{weight}-{tokens}", {"weight": weight}, train={"micro_batch_tokens": tokens})
            losses[weight, tokens] = update(run, collect(run)[0], 1)
    for tokens in (10_000, 1):
        term = losses[0.3, tokens]["loss"] - losses[0.0, tokens]["loss"]
        assert losses[0.3, tokens]["distill/kl/mean"] > 1e-4
        assert term == pytest.approx(0.3 * losses[0.3, tokens]["distill/kl/mean"], rel=1e-3)
    assert losses[0.3, 1]["grad_norm"] == pytest.approx(losses[0.3, 10_000]["grad_norm"], rel=1e-4)


def test_the_weight_warms_up(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 0.4, "warmup_steps": 4}, train={"max_steps": 6})
    batch, _ = collect(run)
    assert [update(run, batch, step)["distill/weight"] for step in (1, 2, 4, 6)] == pytest.approx([0.1, 0.2, 0.4, 0.4])


def test_only_positive_advantages_teach(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 0.1, "positive_only": True})
    batch, _ = collect(run)
    taught = run.distiller.mask(batch.mask, batch.advantages.values)
    rows = taught.any(-1)
    assert rows.tolist() == [a > 0 for a in batch.advantages.values.tolist()] and 0 < int(rows.sum()) < 12
    assert torch.equal(taught[rows], batch.mask[rows])


def test_the_controller_holds_the_ratio_of_the_two_gradients(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 1e-3, "grad_ratio": 0.05}, train={"max_steps": 99, "learning_rate": 1e-9})
    batch, _ = collect(run)
    for step in range(1, 60):
        update(run, batch, step)  # at this learning rate the same gradients every time
    alone = {}
    for name, weight in (("rl", 0.0), ("both", 1.0)):
        other = run_of(tmp_path / name, {"weight": weight})
        alone[name] = other
    rl, kl = gradients(alone["rl"], batch), gradients(alone["both"], batch)
    kl = [b - a for a, b in zip(rl, kl, strict=True)]
    norms = [float(torch.stack([g.norm() for g in part]).norm()) for part in (rl, kl)]
    assert run.distiller.weight * norms[1] / norms[0] == pytest.approx(0.05, rel=0.05)


def test_the_controller_does_not_see_how_the_batch_is_cut(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    weights = []
    for tokens in (10_000, 80, 1):
        run = run_of(tmp_path / str(tokens), {"weight": 0.1, "grad_ratio": 0.01}, train={"micro_batch_tokens": tokens})
        update(run, collect(run)[0], 1)
        weights.append(run.distiller.weight)
    assert weights[0] != pytest.approx(0.1) and weights == pytest.approx([weights[0]] * 3, rel=1e-4)


def test_the_weight_that_is_logged_is_the_one_that_was_used(tmp_path, monkeypatch):
    """The controller has moved on when the metrics are written; several steps on a batch are averaged."""
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 0.1, "grad_ratio": 0.01}, grpo={"num_iterations": 2, "num_generations": 4})
    batch, _ = collect(run)
    used = [0.1]
    after_update = run.distiller.after_update

    def noting():
        after_update()
        used.append(run.distiller.weight)

    monkeypatch.setattr(run.distiller, "after_update", noting)
    assert update(run, batch, 1)["distill/weight"] == pytest.approx((used[0] + used[1]) / 2)
    assert used[1] != pytest.approx(0.1) and len(used) == 3


def test_nothing_is_taught_while_the_policy_waits_for_the_critic(tmp_path, monkeypatch):
    """What it would learn would be thrown away, and the controller must not balance against the value loss."""
    noisy_rewards(monkeypatch)
    own = {"critic_warmup_steps": 1, "num_generations": 4, "num_iterations": 1}
    run = run_of(tmp_path, {"weight": 0.1, "grad_ratio": 0.01}, algorithm="ppo", ppo=own)
    batch, _ = collect(run)
    assert not any(name.startswith("distill") for name in update(run, batch, 1)) and run.distiller.weight == 0.1
    assert update(run, batch, 2)["distill/weight"] == 0.1 and run.distiller.weight != pytest.approx(0.1)


def test_the_papers_setting_has_a_name():
    """0.1 KL(dense || sparse), its gradient through the dense side: `reverse`, the sparse view teaching."""
    paper = DistillSettings(preset="paper")
    assert (paper.weight, paper.teacher, paper.kl, paper.teacher_weights) == (0.1, "sparse", "reverse", "live")
    assert DistillSettings(preset="paper", weight=0.3).weight == 0.3


@pytest.mark.parametrize(("section", "message"), [
    ({"teacher": "dense"}, "distill.teacher: has no effect, as distill.weight is 0 by default; set distill.weight"),
    ({"grad_ratio": 0.1}, "distill.grad_ratio: has no effect"),
    ({"grad_ratio": 0.1, "weight": 0.0}, "distill.weight: 0 is where the controller of distill.grad_ratio starts"),
    ({"grad_ratio": 0.1, "weight": 5.0}, "distill.weight: 5 is where"),
])  # fmt: skip
def test_a_term_that_would_be_off_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        DistillSettings(**section)
    assert DistillSettings(weight=0.0, teacher="dense").weight == 0  # switched off by name: a sweep does so


def gradients(run, batch) -> list[torch.Tensor]:
    seen = []
    run.optimizer.step = lambda: seen.extend(p.grad.clone() for p in run.model.parameters())
    run.accelerator.clip_grad_norm_ = lambda *args: torch.zeros(())
    update(run, batch, 1)
    return seen


def test_the_start_teaches_with_the_weights_of_the_start(tmp_path, monkeypatch):
    noisy_rewards(monkeypatch)
    run = run_of(tmp_path, {"weight": 0.1, "teacher": "dense", "teacher_weights": "start"})
    start = [p.detach().clone() for p in run.model.parameters()]
    trainer.train_step(run, 1)
    with run.distiller.distillation.weights() as teacher:
        assert all(torch.equal(a, b) for a, b in zip(start, teacher.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(start, run.model.parameters(), strict=True))


def test_the_average_follows_the_policy_in_fp32():
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    average = Average(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(2000):
        average.follow(model)
    # 2 - 0.999^2000; in bf16 one step of 0.001 would be rounded away
    assert float(average.masters[0][0, 0]) == pytest.approx(2 - 0.999**2000, abs=1e-3)
    with average.active() as teacher:
        assert teacher.weight.dtype == torch.bfloat16
        assert float(teacher.weight[0, 0]) == pytest.approx(2 - 0.999**2000, abs=0.01)
