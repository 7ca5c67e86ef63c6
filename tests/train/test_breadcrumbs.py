"""`method: breadcrumbs`: reinforcement learning with the full cache, and the same rollouts teach the beacon policy."""

from __future__ import annotations

import contextlib
import copy
import shutil

import pytest
import torch
from pydantic import ValidationError

from kvrl.beacons.config import beacons_for, beacons_of
from kvrl.beacons.insert import insert_drawn
from kvrl.distill import Distillation
from kvrl.errors import KvrlError
from kvrl.eval.run_defaults import teacher_of
from kvrl.learner import Scorer, completion_mask
from kvrl.train.optimizer import POLICY, STUDENT, current_rate, optimized
from kvrl.train.run import build
from kvrl.train.setup import load_model
from kvrl.train.trainer import collect, replayed, train, train_step
from kvrl.train.update import update
from runs import make_beacon_config as make
from runs import metrics_of


def breadcrumbs(folder, **changes):
    return make(folder, **{"method": "breadcrumbs", **changes})


def gradients_of(run, batch, monkeypatch, model=None) -> dict[str, torch.Tensor]:
    """What one update's backward passes leave in the policy, or in `model`, before anything is clipped."""
    found = {}

    def keep(run, parameters, step):
        whose = run.model if model is None else model
        found.update({n: p.grad.clone() for n, p in whose.named_parameters() if p.grad is not None})
        return torch.tensor(1.0)

    monkeypatch.setattr("kvrl.train.update.clip_gradient", keep)
    update(run, batch, 1)
    return found


@pytest.mark.parametrize("rl", [True, False])
def test_the_loss_is_the_objectives_and_the_distillations(tmp_path, rl, monkeypatch):
    """Gradient = that of method dense on the same batch (with rl) + weight * that of the mean KL."""
    config = breadcrumbs(tmp_path, breadcrumbs={"weight": 0.7, "rl": rl}, train={"learning_rate": 1e-9})
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    batch.rewards[:] = torch.linspace(0, 1, len(batch.rewards))
    batch = type(batch).build(batch.rollouts, batch.rewards, config)
    rollouts = insert_drawn(batch.rollouts, beacons_for(config.cache, run.model), config.seed, 1)
    model = copy.deepcopy(run.model)
    mask = completion_mask(rollouts)
    scored = Scorer(model, backend="mask")(rollouts, view="dense", distill=Distillation("dense"))
    (0.7 * scored.divergence[mask].mean()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if rl:
        plain, _ = build(make(tmp_path, method="dense", train={"learning_rate": 1e-9}), lambda text: None)
        plain.model.load_state_dict(run.model.state_dict())
        for name, gradient in gradients_of(plain, batch, monkeypatch).items():
            expected[name] = expected[name] + gradient
    found = gradients_of(run, batch, monkeypatch)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() < 1e-5 * max(1, float(expected[name].abs().max())), name


def scored_batch(config):
    """A run, and a batch of it whose rewards differ."""
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    batch.rewards[:] = torch.linspace(0, 1, len(batch.rewards))
    return run, type(batch).build(batch.rollouts, batch.rewards, config)


@pytest.mark.parametrize("rl", [True, False])
def test_a_separate_student_learns_from_the_policy_alone(tmp_path, rl, monkeypatch):
    """Its gradient is that of the KL to the policy's dense view; the policy's is that of method dense, or none."""
    own = {"student": "separate", "weight": 0.7, "rl": rl}
    config = breadcrumbs(tmp_path, breadcrumbs=own, train={"learning_rate": 1e-9})
    run, batch = scored_batch(config)
    with torch.no_grad():
        for parameter in run.student.parameters():
            parameter.mul_(1.1)
    student, policy = copy.deepcopy(run.student), copy.deepcopy(run.model)
    rollouts = insert_drawn(batch.rollouts, beacons_for(config.cache, run.model), config.seed, 1)
    teaches = Distillation("dense", weights=lambda: contextlib.nullcontext(policy))
    scored = Scorer(student, backend="mask")(rollouts, view="sparse", distill=teaches)
    (0.7 * scored.divergence[completion_mask(rollouts)].mean()).backward()
    found = gradients_of(run, batch, monkeypatch, run.student)
    expected = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() < 1e-5 * max(1, float(expected[name].abs().max())), name
    run.optimizer.zero_grad(set_to_none=True)
    of_policy = gradients_of(run, batch, monkeypatch, run.model)
    if not rl:
        assert of_policy == {}
        return
    plain, _ = build(make(tmp_path, method="dense", train={"learning_rate": 1e-9}), lambda text: None)
    plain.model.load_state_dict(run.model.state_dict())
    for name, gradient in gradients_of(plain, batch, monkeypatch).items():
        assert (gradient - of_policy[name]).abs().max() < 1e-5 * max(1, float(gradient.abs().max())), name


@pytest.mark.parametrize("rl", [True, False])
def test_a_separate_student_takes_steps_of_its_own(tmp_path, rl, monkeypatch):
    """After the policy's one, on parts of the batch that hold every completion once; the schedule counts one step."""
    kl = []
    for parts in (1, 4):
        own = {"student": "separate", "num_minibatches": parts, "rl": rl, "learning_rate": 1e-9}
        run, batch = scored_batch(breadcrumbs(tmp_path, breadcrumbs=own, train={"learning_rate": 1e-9}))
        stepped, step = [], run.optimizer.step

        def noting(stepped=stepped, step=step, run=run):
            stepped.append([role for role in (POLICY, STUDENT) if any(
                p.grad is not None for p in optimized(run.optimizer, role)
            )])  # fmt: skip
            step()

        monkeypatch.setattr(run.optimizer, "step", noting)
        kl.append(update(run, batch, 1)["distill/kl/mean"])
        assert stepped == [[POLICY]] * rl + [[STUDENT]] * parts
        assert run.scheduler.scheduler.last_epoch == 1
    assert kl[0] == pytest.approx(kl[1], rel=1e-4)


def test_parts_that_cannot_be(tmp_path):
    with pytest.raises(ValidationError, match="breadcrumbs.num_minibatches: 13 is above the 12 completions"):
        breadcrumbs(tmp_path, breadcrumbs={"student": "separate", "num_minibatches": 13})
    with pytest.raises(ValidationError, match="breadcrumbs.num_minibatches: is that of a separate student"):
        breadcrumbs(tmp_path, breadcrumbs={"num_minibatches": 2})


@pytest.mark.parametrize("student", ["same", "separate"])
def test_distillation_alone_needs_no_reward(tmp_path, student, monkeypatch):
    """Samples without a reward teach like any other, and nothing else of an algorithm has a part in it."""
    none = lambda self, completions, **columns: [None] * len(completions)  # noqa: E731
    monkeypatch.setattr("kvrl.tasks.recurrence.Recurrence.reward", none)
    own = {"breadcrumbs": {"rl": False, "student": student}, "algorithm": "ppo", "ppo": {
        "num_generations": 4, "critic_warmup_steps": 9,
    }}  # fmt: skip
    run, _ = build(breadcrumbs(tmp_path, grpo={"num_generations": 4}, **own), lambda text: None)
    before = [p.detach().clone() for p in (run.student or run.model).parameters()]
    metrics = update(run, collect(run)[0], 1)
    assert metrics["updates_skipped"] == 0 and metrics["distill/kl/mean"] > 0
    after = (run.student or run.model).parameters()
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("student", ["same", "separate"])
def test_the_policy_waits_for_its_critic_and_a_separate_student_does_not(tmp_path, student):
    own = {"algorithm": "ppo", "ppo": {"num_generations": 4, "critic_warmup_steps": 9}}
    run, batch = scored_batch(breadcrumbs(tmp_path, breadcrumbs={"student": student}, **own))
    before = [p.detach().clone() for p in run.model.parameters()]
    metrics = update(run, batch, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert ("distill/kl/mean" in metrics) == ("breadcrumbs/seconds" in metrics) == (student == "separate")


def test_a_run_with_a_separate_student(tmp_path):
    """`model` reads beacons and was taught, `teacher` learned by the rewards; each is evaluated where it decodes."""
    own = {"student": "separate", "learning_rate": 1e-3, "rl": False}
    train(breadcrumbs(tmp_path, breadcrumbs=own, eval={"n": 3}))
    student, teacher = (load_model(str(tmp_path / name), "float32")[0] for name in ("model", "teacher"))
    start, _ = build(breadcrumbs(tmp_path / "again", breadcrumbs=own), lambda text: None)
    same = [torch.equal(a, b) for a, b in zip(teacher.parameters(), start.model.parameters(), strict=True)]
    assert all(same) and beacons_of(student) == beacons_of(start.model)
    assert not torch.equal(student.model.layers[0].mlp.up_proj.weight, teacher.model.layers[0].mlp.up_proj.weight)
    done = [m for m in metrics_of(tmp_path) if "budget" in m]
    assert [m["budget"] for m in done] == ["c=2", "c=3", "full"] * 2
    assert done[2]["accuracy"] == done[5]["accuracy"] and done[2]["mean_length"] == done[5]["mean_length"]
    steps = [m for m in metrics_of(tmp_path) if "reward" in m]
    assert all(m["grad_norm"] > 0 and m["distill/kl/mean"] > 0 for m in steps)
    assert teacher_of(str(tmp_path / "model")) == str(tmp_path / "teacher")
    train(breadcrumbs(tmp_path, overwrite_output_dir=True, train={"max_steps": 1}))
    assert not (tmp_path / "teacher").exists() and teacher_of(str(tmp_path / "model")) is None


@pytest.mark.parametrize("rl", [True, False])
def test_a_separate_student_learns_at_the_rate_at_which_the_batch_began(tmp_path, rl):
    """Of one linear step the schedule is at 1 before and at 0 after the policy's update."""
    own = {"student": "separate", "learning_rate": 5e-3, "rl": rl}
    config = breadcrumbs(tmp_path, breadcrumbs=own, train={"max_steps": 1, "lr_scheduler": "linear"})
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    before = copy.deepcopy(run.student.state_dict())
    metrics = update(run, batch, 1)
    moved = max((p - before[n]).abs().max() for n, p in run.student.state_dict().items())
    assert 0.004 < moved < 0.006  # Adam's first step is the learning rate
    assert metrics["learning_rate"] == 0 and current_rate(run.optimizer, STUDENT) == 0


def test_the_logged_rate_is_that_of_the_model_that_learns(tmp_path):
    own = {"student": "separate", "learning_rate": 5e-3, "rl": False}
    run, _ = build(breadcrumbs(tmp_path, breadcrumbs=own, train={"learning_rate": 1e-4}), lambda text: None)
    assert train_step(run, 1)["learning_rate"] == 5e-3


def test_a_separate_student_goes_on_where_it_was(tmp_path):
    own = {"breadcrumbs": {"student": "separate", "learning_rate": 1e-3}, "checkpoint": {"every": 1}}
    train(breadcrumbs(tmp_path, **own))
    whole = load_model(str(tmp_path / "model"), "float32")[0]
    shutil.rmtree(tmp_path / "checkpoints" / "step-000002")
    train(breadcrumbs(tmp_path, **{**own, "checkpoint": {"resume": "latest"}}))
    teacher = tmp_path / "checkpoints" / "step-000001" / "teacher"
    teacher.rename(tmp_path / "elsewhere")
    with pytest.raises(KvrlError, match=r"^checkpoint.resume: .*step-000001/teacher is missing"):
        build(breadcrumbs(tmp_path, **{**own, "checkpoint": {"resume": str(teacher.parent)}}), lambda text: None)
    for name in ("model", "teacher"):
        again = load_model(str(tmp_path / name), "float32")[0]
        assert name == "teacher" or all(map(torch.equal, again.parameters(), whole.parameters()))
    assert not all(map(torch.equal, again.parameters(), whole.parameters()))  # the teacher is not the student


def test_a_run(tmp_path):
    train(breadcrumbs(tmp_path, eval={"n": 3}))
    steps = [m for m in metrics_of(tmp_path) if "reward" in m]
    for m in steps:
        assert m["evictions"] == 0 and m["parity/max"] < 1e-4 and m["distill/kl/mean"] > 0 and m["distill/weight"] == 1
        rest = m["seconds"] - m["breadcrumbs/seconds"]
        assert 0 < m["breadcrumbs/seconds"] < m["seconds"]
        assert m["breadcrumbs/overhead"] == pytest.approx(m["breadcrumbs/seconds"] / rest, rel=0.05)
    assert [m["budget"] for m in metrics_of(tmp_path) if "budget" in m] == ["c=2", "c=3", "full"] * 2


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_where_the_start_alone_teaches_it_writes_the_texts(tmp_path, lora):
    """Whatever the learning weights have become; a live teacher writes what it is."""
    from kvrl.models.tiny import make_tiny
    from kvrl.tasks import get_task

    start = {"path": str(make_tiny(tmp_path / "start", get_task("recurrence").vocab, 0))}
    written = {}
    for teacher in ("start", "live"):
        own = {"breadcrumbs": {"rl": False, "teacher": teacher}, "lora": lora, "model": start, "warm_start": None}
        run, _ = build(breadcrumbs(tmp_path / teacher, **own), lambda text: None)
        with torch.no_grad():
            for parameter in run.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.3)
        batch, _ = collect(run)
        written[teacher] = [r.completion_ids for r in batch.rollouts]
        assert replayed(run, batch)["parity/max"] < 1e-4
    untouched, _ = build(breadcrumbs(tmp_path / "untouched", **own), lambda text: None)
    first = [r.completion_ids for r in collect(untouched)[0].rollouts]
    assert written["start"] == first != written["live"]


def test_distillation_alone_teaches(tmp_path):
    """Without rewards the KL of one fixed batch falls, and nothing of the objective is logged."""
    config = breadcrumbs(tmp_path, breadcrumbs={"rl": False, "teacher": "start"}, train={"learning_rate": 3e-4})
    run, _ = build(config, lambda text: None)
    batch, _ = collect(run)
    seen = [update(run, batch, 1) for _ in range(20)]
    kl = [m["distill/kl/mean"] for m in seen]
    assert kl[-1] < 0.7 * kl[0] and "ratio/mean" not in seen[0] and "breadcrumbs/seconds" not in seen[0]
    assert all(torch.isfinite(torch.tensor(m["grad_norm"])) for m in seen)


@pytest.mark.parametrize("changes", [
    {"breadcrumbs": {"teacher": "start"}, "lora": {"r": 2}},
    {"breadcrumbs": {"teacher": "average", "kl": "js", "top_k": 5, "warmup_steps": 2}},
    {"breadcrumbs": {"kl": "reverse"}, "algorithm": "rloo"},
    {"breadcrumbs": {"student": "separate", "teacher": "start"}, "model": {"dtype": "bfloat16"}},
    {"breadcrumbs": {"student": "separate", "teacher": "average"}, "algorithm": "ppo"},
])  # fmt: skip
def test_options(tmp_path, changes):
    run, _ = build(breadcrumbs(tmp_path, **changes, warm_start=None), lambda text: None)
    metrics = [train_step(run, step) for step in (1, 2)]
    assert all(m["distill/kl/mean"] > 0 for m in metrics)
    if changes["breadcrumbs"].get("warmup_steps"):
        assert [m["distill/weight"] for m in metrics] == [0.5, 1.0]


@pytest.mark.parametrize("changes, message", [
    ({"cache": {"policy": "rkv"}}, "cache.policy: rkv has no beacons, which method breadcrumbs teaches"),
    ({"breadcrumbs": {"weight": 0}}, "breadcrumbs.weight: 0 teaches no beacon"),
    ({"breadcrumbs": {"student": "separate"}, "lora": {"r": 2}}, "breadcrumbs.student: separate would copy the base"),
    ({"breadcrumbs": {"learning_rate": 1e-3}}, "breadcrumbs.learning_rate: is that of a separate student"),
    ({"method": "shadow_mask", "breadcrumbs": {"kl": "js"}}, "breadcrumbs.kl: has no meaning under method shadow_mask"),
])  # fmt: skip
def test_mistakes(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):  # pydantic's wraps it where no file is read
        breadcrumbs(tmp_path, **changes)
