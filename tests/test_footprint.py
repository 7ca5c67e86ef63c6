"""Planned bytes against what the engine allocates, what the optimiser holds and what the learner's peak is."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kvrl
from kvrl.attention.probe import prepare, probe
from kvrl.cache.config import CacheConfig
from kvrl.cache.memory import SCRATCH_BYTES
from kvrl.critic import Critic
from kvrl.distill import Distillation
from kvrl.footprint import DISTILL_COPIES, DRAW_COPIES, SCORE_COPIES, Footprint
from kvrl.head import Head
from kvrl.learner import score_chunk
from kvrl.models.shapes import meta_policy
from kvrl.models.tiny_families import build_family
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.engine import Engine
from kvrl.sampler.sampling import draw
from kvrl.tasks import get_task
from kvrl.train.config import Config
from kvrl.train.optimizer import MasterAdamW, make_optimizer
from kvrl.train.setup import load_policy
from memory import PeakMemory

PROMPT, NEW = 20, 40
CACHE = {"policy": "rkv", "budget": 24, "buffer": 8, "window": 4}


def make_config(**changes) -> Config:
    base = {"cache": CACHE, "sampling": {"max_completion_length": NEW}, "train": {"prompts_per_step": 2}}
    return Config(**{**base, **changes})


def footprint(config: Config, model=None) -> Footprint:
    model = prepare(meta_policy(config) if model is None else copy.deepcopy(model).to("meta"))
    return Footprint(config, model, probe(model), PROMPT + config.sampling.max_completion_length)


def policy_of(config: Config):
    return load_policy(config, get_task("recurrence"), None)[0]


@pytest.mark.parametrize("slots", [3, 6, 40])
@pytest.mark.parametrize("policy", ["rkv", "snapkv", "h2o", "knorm", "dense"])
def test_rollout_bytes_are_the_engines(policy, slots):
    cache = CacheConfig(policy=policy, budget=80, buffer=8)
    config = make_config(sampling={"max_completion_length": 120}, cache=cache.model_dump(), method="dense")
    engine = Engine(
        policy_of(config), cache, config.sampling, num_slots=slots, max_prompt_length=PROMPT,
        scratch_bytes=SCRATCH_BYTES, native_kernels=False,
    )  # fmt: skip
    planned = footprint(config).rollout(cache, slots)
    assert planned["KV slots"] == engine.kv_bytes
    assert planned["scoring"] == engine.scratch_bytes
    assert planned["trace"] == engine.slots.events.nbytes
    full = footprint(config).rollout(cache.as_dense(), slots)["KV slots"]
    assert full == engine.dense_kv_bytes


def test_weights_and_kv_by_hand():
    tiny = footprint(make_config())
    vocab, e, f = tiny.vocabulary, 128, 256
    parameters = 2 * vocab * e + e + 3 * (2 * e + 2 * e * e + 2 * e * e // 2 + 3 * e * f)
    assert tiny.weights == 4 * parameters == sum(p.nbytes for p in policy_of(make_config()).parameters())
    assert tiny.kv_per_slot(tiny.config.cache) == 2 * 3 * 2 * (24 + 8) * 32 * 4
    assert tiny.kv_per_slot(tiny.config.cache.as_dense()) == 2 * 3 * 2 * (PROMPT + NEW) * 32 * 4
    qwen = footprint(make_config(model={"path": "Qwen/Qwen2.5-1.5B", "dtype": "bfloat16"}))
    assert qwen.weights == 2 * 1_543_714_304
    assert qwen.kv_per_slot(CacheConfig(budget=512, buffer=128)) == 2 * 28 * 2 * 640 * 128 * 2
    assert qwen.resident() == {"weights": qwen.weights, "optimiser": 12 * 1_543_714_304}
    assert qwen.gradients == 4 * 1_543_714_304
    trace = qwen.trace(CacheConfig(policy="recent", budget=24, buffer=8))
    assert trace.nbytes == 2 * 28 * 2 * (PROMPT + NEW) + 4 * 4  # int16, and 4 evictions in 59 forwarded tokens


def test_sliding_layers_take_their_window_alone():
    lm = build_family("mistral", window=8)
    assert footprint(make_config(), lm).kv_per_slot(CacheConfig(budget=24, buffer=8)) == 2 * 2 * 2 * 8 * 16 * 4


@pytest.mark.parametrize("critic", ["none", "head", "model"])
@pytest.mark.parametrize("lora", [None, {"r": 4}, {"r": 4, "modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimiser_and_gradients_are_those_of_a_real_step(dtype, lora, critic):
    algorithm = {} if critic == "none" else {"algorithm": "ppo", "ppo": {"critic": critic}}
    config = make_config(model={"dtype": dtype}, lora=lora, **algorithm)
    model = policy_of(config)
    values = None if critic == "none" else Critic(model, own_model=critic == "model")
    optimizer = make_optimizer(model, config.train, None, values)
    own = [p for m in (model, values) if m is not None for p in m.parameters()]
    sum(p.float().sum() for p in own if p.requires_grad).backward()
    masters = optimizer.masters if isinstance(optimizer, MasterAdamW) else []
    held = [p for group in optimizer.param_groups for p in group["params"]]
    run = footprint(config)
    assert run.gradients == sum(p.grad.nbytes for p in held)
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])]
    resident = run.resident()
    assert resident["optimiser"] == sum(t.nbytes for t in [*moments, *masters])
    assert resident["weights"] == sum(p.nbytes for p in model.parameters())
    if values is not None:
        assert resident["critic"] == sum(p.nbytes for p in values.parameters())


def test_further_models():
    def items(**changes):
        return footprint(make_config(**changes)).resident()

    weights = items()["weights"]
    assert items(grpo={"beta": 0.1})["reference"] == weights
    assert "reference" not in items(grpo={"beta": 0.1}, lora={"r": 4})
    assert items(distill={"weight": 0.1, "teacher_weights": "start"})["reference"] == weights
    assert items(distill={"weight": 0.1, "teacher_weights": "average"})["averaged teacher"] == 2 * weights  # fp32 twice
    assert set(items(distill={"weight": 0.1})) == {"weights", "optimiser"}
    beacons = {"method": "breadcrumbs", "cache": {"policy": "beacon", "params": {"every": 2}}}
    alone, beside = (items(**beacons, breadcrumbs={"student": kind}) for kind in ("same", "separate"))
    assert beside == {**alone, "student": alone["weights"], "optimiser": 2 * alone["optimiser"]}


def test_rows_of_the_largest_micro_batch():
    def rows(tokens: int, **changes):
        return footprint(make_config(train={"prompts_per_step": 4, "micro_batch_tokens": tokens}, **changes)).rows

    assert rows(60) == 1 and rows(59) == 1 and rows(60 * 7 + 59) == 7
    assert rows(10_000) == 4 * 8
    assert rows(10_000, grpo={"num_minibatches": 3}) == 2 * 8
    assert rows(60, algorithm="online_dpo") == 2
    assert rows(60, algorithm="online_dpo", online_dpo={"pairs": "all", "num_generations": 4}) == 4


def test_views_with_a_gradient():
    def views(**changes):
        return footprint(make_config(**changes)).gradient_views

    assert views() == ["sparse"] and views(method="naive") == ["dense"]
    assert views(distill={"weight": 0.1}) == ["sparse", "dense"]
    assert views(distill={"weight": 0.1, "teacher": "dense"}) == ["sparse"]
    assert views(algorithm="ppo") == ["sparse"]
    assert views(algorithm="ppo", ppo={"critic": "model"}) == ["sparse", "sparse"]


def test_activations_add_up_over_views_and_rows():
    one, two = (footprint(make_config(distill={"weight": w}, train={"micro_batch_tokens": 60 * 3})) for w in (0, 0.1))
    sparse, dense = one.saved("sparse"), two.saved("dense")
    scored = NEW * 128 * 4
    assert one.activations() == {
        "kept": 3 * (sparse.kept + scored),
        "checkpointed": 3 * (sparse.inputs + sparse.layer + scored),
        "working": 3 * sparse.layer // 2,
    }
    layer = max(sparse.layer, dense.layer)
    assert two.activations() == {
        "kept": 3 * (sparse.kept + dense.kept + 3 * scored),
        "checkpointed": 3 * (sparse.inputs + dense.inputs + layer + 3 * scored),
        "working": 3 * layer // 2,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learners_peak_is_within_the_plan(dtype, checkpointing):
    """Forward and backward of a micro-batch, against activations, working set and gradients."""
    config = make_config(
        model={"dtype": dtype, "gradient_checkpointing": checkpointing}, replay={"logprob_chunk": 64},
        train={"micro_batch_tokens": 60 * 8},
    )  # fmt: skip
    model = policy_of(config)
    sampling = SamplingConfig(max_completion_length=NEW, eos_token_ids=[])
    rollouts = kvrl.rollout(model, [[1] * PROMPT] * 8, cache=config.cache, sampling=sampling)
    model.train()
    make_optimizer(model, config.train)
    with PeakMemory() as memory:
        kvrl.logprobs(model, rollouts, chunk=64).sum().backward()
    run = footprint(config)
    planned = run.activations()
    kept = planned["checkpointed" if checkpointing else "kept"]
    plan = kept + max(planned["working"], run.logits()) + run.gradients
    assert (0.65 if checkpointing else 0.75) * plan <= memory.peak <= plan


P, V, E = 128, 5000, 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kl, top_k", [(None, None), ("forward", None), ("reverse", 16), ("js", None)])
def test_copies_of_a_chunks_logits(dtype, kl, top_k):
    """Counted by operation; what logsumexp holds inside is the one copy that is not seen here."""
    lm = build_family("llama", vocab_size=V, dtype=dtype)
    hidden = torch.randn(P, E, dtype=dtype, requires_grad=True)
    temperature = torch.ones(P)
    if kl is None:
        func = partial(score_chunk, Head(lm), hidden, torch.randint(V, (P,)), temperature, None)
    else:
        func = partial(Distillation("sparse", kl, top_k).chunk, lm, hidden, hidden.detach(), temperature, None)
    with PeakMemory() as memory:
        checkpoint(func, use_reentrant=False)[0].sum().backward()
    copies = SCORE_COPIES if kl is None else DISTILL_COPIES
    heads = (1 if dtype == torch.float32 else 2) * V * E * 4
    assert memory.peak <= (copies - 1) * P * V * 4 + heads
    assert memory.peak >= 0.7 * (copies - 1) * P * V * 4


def test_a_chunk_is_no_longer_than_the_micro_batch():
    small = footprint(make_config(replay={"logprob_chunk": 4096}, train={"micro_batch_tokens": 60 * 2}))
    assert small.logits() == SCORE_COPIES * 2 * NEW * small.vocabulary * 4 + small.head
    bf16 = footprint(make_config(replay={"logprob_chunk": 7}, model={"dtype": "bfloat16"}))
    assert bf16.logits() == SCORE_COPIES * 7 * bf16.vocabulary * 4 + 2 * bf16.vocabulary * 128 * 4


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20}, {"top_p": 0.1}, {"min_p": 0.5}])
def test_copies_when_tokens_are_drawn(truncation):
    sampling, slots = SamplingConfig(**truncation), 16
    hidden, head = torch.randn(slots, 4), torch.randn(4, V)
    with PeakMemory() as memory:
        logits = (3 * hidden) @ head
        draw(logits[torch.arange(slots)], torch.rand(slots), sampling)
    assert 0.5 * DRAW_COPIES <= memory.peak / (slots * V * 4) <= DRAW_COPIES


def test_most_slots_is_the_largest_number_that_fits():
    run = footprint(make_config())
    fixed = sum(run.resident().values())
    for cache in (run.config.cache, run.config.cache.as_dense()):
        for slots in (1, 2, 4, 96):
            need = fixed + sum(run.rollout(cache, slots).values())
            assert run.most_slots(cache, need) == slots
            assert run.most_slots(cache, need - 1) == {1: 0, 2: 1, 4: 3, 96: 92}[slots]
