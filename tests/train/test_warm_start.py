"""The supervised warm start: what it trains on, its first loss computed independently, its effect."""

from __future__ import annotations

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.models.tiny import build_tiny_model, build_tiny_tokenizer
from kvrl.tasks.jsonl import JsonLines
from kvrl.tasks.recurrence import Recurrence
from kvrl.train.config import WarmStart
from kvrl.train.supervised import encode_demonstration, learning_rate
from kvrl.train.warm_start import IGNORED, pad_batch, warm_start

TASK = Recurrence(min_steps=1, max_steps=3, max_start=2, mistake_rate=0.0)
TOKENIZER = build_tiny_tokenizer(TASK.vocab)


def test_labels_are_the_completion_and_its_eos():
    example = encode_demonstration(TOKENIZER, "<bos> #3 3 7", "#3 3 + 7 = 0")
    ids, prompt_length = example
    assert prompt_length == 4
    assert TOKENIZER.decode(ids) == "<bos> #3 3 7 #3 3 + 7 = 0 <eos>"
    input_ids, labels = pad_batch([example, ([1, 5, 6], 2)], pad_id=0, device="cpu")
    assert input_ids.tolist() == [ids, [1, 5, 6] + [0] * 8]
    assert labels.tolist() == [[IGNORED] * 4 + ids[4:], [IGNORED, IGNORED, 6] + [IGNORED] * 8]


def test_first_loss_is_the_mean_over_completion_tokens_of_unpadded_forwards():
    settings = WarmStart(steps=1, batch_size=6)
    model = build_tiny_model(TOKENIZER, seed=0)
    total = count = 0.0
    for prompt, text in TASK.demonstrations(6, seed=4):
        ids, prompt_length = encode_demonstration(TOKENIZER, prompt, text)
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)  # [T, V]
        for t in range(prompt_length, len(ids)):
            total -= logp[t - 1, ids[t]].item()
            count += 1
    metrics = warm_start(model, TOKENIZER, TASK, settings, seed=4)
    assert metrics["tokens"] == count
    assert metrics["first_loss"] == pytest.approx(total / count, abs=1e-5)
    assert metrics["last_loss"] == metrics["first_loss"]


def test_it_learns_repeats_itself_and_leaves_the_mode():
    settings = WarmStart(steps=30, batch_size=16, demonstrations=40)
    results, seen = [], []
    for _ in range(2):
        model = build_tiny_model(TOKENIZER, seed=0).eval()
        seen.clear()
        metrics = warm_start(
            model, TOKENIZER, TASK, settings, seed=1, on_step=lambda step, values: seen.append((step, values))
        )
        results.append((metrics, model.lm_head.weight.detach().clone()))
        assert not model.training
    (first, weight), (second, again) = results
    assert first == second and torch.equal(weight, again)
    assert first["last_loss"] < 0.6 * first["first_loss"]
    assert [step for step, _ in seen] == list(range(1, 31))
    assert seen[-1][1] == {"loss": first["last_loss"], "learning_rate": learning_rate(settings, 30)}


def test_its_own_seed_goes_before_the_runs():
    def tokens(settings: WarmStart, seed: int) -> list[tuple[float, float]]:
        losses = []
        model = build_tiny_model(TOKENIZER, seed=0)
        warm_start(model, TOKENIZER, TASK, settings, seed, on_step=lambda _, values: losses.append(values["loss"]))
        return losses

    own = WarmStart(steps=2, batch_size=4, seed=9)
    assert tokens(own, 1) == tokens(own, 2)
    assert tokens(own, 1) == tokens(own.model_copy(update={"seed": None}), 9)
    assert tokens(own, 1) != tokens(own.model_copy(update={"seed": None}), 1)


def test_learning_rate_rises_stays_and_falls():
    settings = WarmStart(steps=100, learning_rate=2.0)
    rates = [learning_rate(settings, step) for step in (1, 4, 5, 61, 62, 81, 100)]
    assert rates == pytest.approx([0.4, 1.6, 2.0, 2.0, 1.95, 1.0, 0.05])


def test_a_given_optimizer_is_used():
    model = build_tiny_model(TOKENIZER, seed=0)
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD([model.lm_head.weight], lr=1.0)
    warm_start(model, TOKENIZER, TASK, WarmStart(steps=1, batch_size=4), seed=0, optimizer=optimizer)
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"lm_head.weight"}


def test_a_task_without_demonstrations_is_refused():
    with pytest.raises(KvrlError, match="warm_start: task jsonl has no demonstrations"):
        warm_start(build_tiny_model(TOKENIZER, 0), TOKENIZER, JsonLines(path="x.jsonl"), WarmStart(), seed=0)
