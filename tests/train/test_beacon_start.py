"""The beacon policy's start on worked solutions: its first loss computed independently, its effect, a run with it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F

from kvrl.attention.probe import prepare, probe
from kvrl.beacons.config import beacons_of
from kvrl.beacons.insert import insert_drawn
from kvrl.beacons.model import add_beacon
from kvrl.distill import Distillation
from kvrl.errors import KvrlError
from kvrl.learner import Scorer
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks.recurrence import Recurrence
from kvrl.train.beacon_start import as_rollout, beacon_start
from kvrl.train.run import build
from kvrl.train.section import WarmStart
from kvrl.train.supervised import fit
from kvrl.train.trainer import train
from kvrl.views import hidden_states
from runs import make_beacon_config as make

TASK = Recurrence(min_steps=2, max_steps=4, max_start=3, mistake_rate=0.0)


def pupil_and_teacher():
    tokenizer = build_tiny_tokenizer(TASK.vocab)
    model = build_tiny_model(tokenizer, seed=0)
    add_beacon(model, tokenizer, every=(2, 3), positions="shared", token=None, start="mean")
    return Scorer(copy.deepcopy(model)), prepare(model).eval(), tokenizer


def start(pupil, teacher, tokenizer, settings, seed=4, **kwargs):
    distillation = Distillation("dense", weights=lambda: contextlib.nullcontext(teacher))
    return beacon_start(pupil, distillation, beacons_of(teacher), tokenizer, TASK, settings, seed, **kwargs)


def batches_of(tokenizer, settings, seed):
    """What the loop hands to the loss, step by step."""
    seen = []

    def see(examples, rows, step):
        assert rows == sorted(rows, key=lambda row: len(examples[rows.index(row)][0]))
        seen.append([example for _, example in sorted(zip(rows, examples, strict=True))])
        return model.lm_head.weight.sum()

    model = build_tiny_model(tokenizer, seed=0)
    fit(model, tokenizer, TASK, settings, seed, see)
    return seen


def test_first_loss_is_the_mean_kl_to_the_full_context_over_completion_tokens():
    settings = WarmStart(steps=1, batch_size=6)
    (pupil, teacher, tokenizer), total, count = pupil_and_teacher(), 0.0, 0
    with torch.no_grad():
        pupil.model.lm_head.weight.mul_(1.5)
    student = copy.deepcopy(pupil.model)
    done = start(pupil, teacher, tokenizer, settings, temperature=0.7)
    (batch,) = batches_of(tokenizer, settings, seed=4)
    rollouts = insert_drawn(
        [as_rollout(probe(teacher), *example, 0.7) for example in batch], beacons_of(teacher), 4, 0, 1
    )
    assert {r.beacons.windows for r in rollouts} == {(2,), (3,)}
    for r in rollouts:
        with torch.no_grad():
            sparse = hidden_states(student, [r], "sparse", "mask")[0]  # [fed, E]
            reads = student.lm_head(sparse[r.fed.predictor]).double()
            full = teacher(torch.tensor([r.token_ids])).logits[0, len(r.prompt_ids) - 1 : -1].double()
        kept = torch.arange(full.shape[1]) != r.beacons.token_id  # never drawn, so no part of either distribution
        reads, full = ((logits[:, kept] / 0.7).log_softmax(-1) for logits in (reads, full))
        total += F.kl_div(reads, full, log_target=True, reduction="sum").item()
        count += len(r.completion_ids)
    assert done["tokens"] == count
    assert done["first_loss"] == pytest.approx(total / count, rel=1e-5)


def test_it_teaches_repeats_itself_and_leaves_the_teacher():
    settings, results = WarmStart(steps=30, batch_size=16, demonstrations=40), []
    for _ in range(2):
        pupil, teacher, tokenizer = pupil_and_teacher()
        before = copy.deepcopy(teacher.state_dict())
        done = start(pupil, teacher, tokenizer, settings)
        assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
        assert all(parameter.grad is None for parameter in teacher.parameters())
        results.append((done, pupil.model.lm_head.weight.detach().clone()))
    (first, weight), (second, again) = results
    assert first == second and torch.equal(weight, again)
    assert first["last_loss"] < 0.8 * first["first_loss"]


def test_what_it_does_depends_on_no_micro_batch():
    """Windows are drawn by a demonstration's place in its batch, not in its pass."""
    settings, results = WarmStart(steps=2, batch_size=12, learning_rate=0.1), []
    for limit in (1, 100, 16_384):
        pupil, teacher, tokenizer = pupil_and_teacher()
        with torch.no_grad():
            pupil.model.lm_head.weight.mul_(1.5)
        optimizer = torch.optim.SGD(pupil.model.parameters(), lr=1.0)
        done = start(pupil, teacher, tokenizer, settings, optimizer=optimizer, max_tokens=limit)
        results.append((done, pupil.model.lm_head.weight.detach()))
    for done, weight in results[:2]:
        assert done == pytest.approx(results[2][0], rel=1e-5)
        torch.testing.assert_close(weight, results[2][1], rtol=0, atol=1e-6)


def test_a_solution_that_holds_the_beacon_is_refused():
    pupil, teacher, tokenizer = pupil_and_teacher()
    pupil.model.config.kvrl_beacons["token_id"] = tokenizer.convert_tokens_to_ids("=")
    with pytest.raises(KvrlError, match="demonstration 0: holds the beacon's id [0-9]+, which only the engine feeds"):
        start(pupil, teacher, tokenizer, WarmStart(steps=1, batch_size=4))


def test_in_a_run_it_moves_the_student_alone_and_is_not_repeated(tmp_path):
    own = {"student": "separate", "learning_rate": 1e-3, "warm_start": {"steps": 2, "batch_size": 4}}
    said: list[str] = []
    run, _ = build(make(tmp_path, method="breadcrumbs", breadcrumbs=own), said.append)
    plain, _ = build(make(tmp_path, method="breadcrumbs", breadcrumbs={**own, "warm_start": None}), said.append)
    assert sum("beacons' warm start: 2 steps, loss" in line for line in said) == 1
    assert all(map(torch.equal, run.model.parameters(), plain.model.parameters()))
    assert all(map(torch.equal, run.model.parameters(), plain.student.parameters()))
    assert not torch.equal(run.student.lm_head.weight, run.model.lm_head.weight)
    config = make(tmp_path, method="breadcrumbs", breadcrumbs=own, train={"max_steps": 1}, checkpoint={"every": 1})
    train(config)
    said.clear()
    more = {"train": {"max_steps": 2}, "checkpoint": {"resume": "latest"}}
    build(make(tmp_path, method="breadcrumbs", breadcrumbs=own, **more), said.append)
    assert not any("warm start" in line for line in said)


def test_a_run_teaches_at_the_samplings_temperature(tmp_path):
    """Softer distributions are nearer to each other, and only the temperature differs."""

    def first_loss(temperature: float) -> float:
        own = {"student": "separate", "warm_start": {"steps": 1, "batch_size": 4}}
        changes = {"breadcrumbs": own, "sampling": {"temperature": temperature}}
        said: list[str] = []
        build(make(tmp_path, method="breadcrumbs", **changes), said.append)
        (line,) = (text for text in said if "beacons' warm start: 1 steps, loss" in text)
        return float(line.split("loss ")[1].split()[0])

    assert first_loss(3.0) < 0.5 * first_loss(1.0)


def test_the_policys_own_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"breadcrumbs.warm_start: is that of a separate student"):
        make(tmp_path, method="breadcrumbs", breadcrumbs={"warm_start": {"steps": 2}})


def test_a_task_without_demonstrations_is_told_before_anything_is_made(tmp_path):
    rows = [f'{{"prompt": "<bos> #{i} 3 7", "answer": "1"}}\n' for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    own = {"student": "separate", "warm_start": {"steps": 2}}
    task = {"name": "jsonl", "params": {"path": str(tmp_path / "rows.jsonl")}}
    changes = {"breadcrumbs": own, "task": task, "warm_start": None, "eval": {"n": 0}}
    config = make(tmp_path / "run", method="breadcrumbs", **changes)
    with pytest.raises(KvrlError, match="^breadcrumbs.warm_start: task jsonl has no demonstrations; leave breadcrumbs"):
        build(config, lambda text: None)
