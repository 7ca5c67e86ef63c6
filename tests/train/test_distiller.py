"""The distillation term of a run: its weight, its teacher's weights, and its controller."""

from __future__ import annotations

import pytest
import torch

from kvrl.train import trainer
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
