"""What would end or spoil a run, told before the warm start: the model, the first prompts, the held-out ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from kvrl.attention.probe import ModelSpec, causal_lm, check_length, prepare, probe, text_config
from kvrl.beacons.config import beacons_for, beacons_of, check_without, closing, params_of
from kvrl.cache.config import CacheConfig
from kvrl.cache.trace import num_events
from kvrl.errors import KvrlError
from kvrl.eval.evaluate import held_out
from kvrl.footprint import Footprint
from kvrl.tasks import Task
from kvrl.train.algorithms import ALGORITHMS
from kvrl.train.config import Config
from kvrl.train.data import PromptLimits, PromptStream
from kvrl.train.distill_settings import DistillSettings

READ_UNDER = {
    "correction": ("method", "corrected"), "sparse_rl": ("method", "sparse_rl"), "distill": ("method", "shadow_mask"),
    **{name: ("algorithm", name) for name in ALGORITHMS},
}  # fmt: skip
"""section -> the field and the value of it under which the section is read; `breadcrumbs` is refused elsewhere."""


def preflight(config: Config, model: nn.Module, tokenizer: Any, task: Task, say: Callable[[str], object]) -> None:
    """Raise KvrlError for what the first step or the first evaluation would refuse, and warn of what is in vain."""
    spec = check_model(config, model)
    prompts = PromptStream(
        task, tokenizer, seed=config.seed, block=config.train.prompts_per_step * config.train.max_steps,
        limits=PromptLimits.of(config.rollout, config.rollout_cache),
    )  # fmt: skip
    first = prompts.take(config.train.prompts_per_step)
    longest = max(len(row.ids) for row in first)
    named = [(f"prompt {row.number}", row.ids) for row in first]
    if config.eval.n:
        caches = [config.cache.at_budget(budget) for budget in config.eval_budgets]
        _, held = held_out(tokenizer, task, PromptLimits.of(config.rollout, *caches), config.eval.n, config.eval.seed)
        named += [(f"held-out problem {i}", ids) for i, ids in enumerate(held)]
        check_memory(config, model, spec, caches, max(map(len, held)))
        check_positions(config, model, spec, caches, max(map(len, held)))
    check_memory(config, model, spec, [config.rollout_cache], longest)
    check_positions(config, model, spec, [config.replayed_cache], longest)
    if (own := beacons_of(model)) is not None:
        for name, ids in named:
            check_without(own.token_id, ids, name)
    for warning in warnings_of(config, model, longest):
        say(f"warning: {warning}")


def check_memory(config: Config, model: nn.Module, spec: ModelSpec, caches: Sequence[CacheConfig], prompt: int) -> None:
    """Raise KvrlError where `rollout.kv_memory` does not hold one sequence after a prompt of that many tokens."""
    tokens = (config.rollout.max_prompt_length or prompt) + config.sampling.max_completion_length
    run = Footprint(config, model, spec, tokens)
    for cache in caches:
        run.slots(cache)


def check_positions(
    config: Config, model: nn.Module, spec: ModelSpec, caches: Sequence[CacheConfig], prompt: int
) -> None:
    """Raise KvrlError where RoPE would change its factors within the longest sequence after a prompt of that length."""
    new = config.sampling.max_completion_length
    for cache in caches:
        taken = positions_taken(cache, model, new)
        length = max(prompt, config.rollout.max_prompt_length or 0) + new + taken
        check_length(spec.max_length, length, "prompt + sampling.max_completion_length", taken)


def positions_taken(cache: CacheConfig, model: nn.Module, new: int) -> int:
    """Positions that beacons take in a completion of `new` tokens, at most."""
    return beacons_for(cache, model).positions_taken(new) if cache.is_beacon else 0


def check_model(config: Config, model: nn.Module) -> ModelSpec:
    """Raise KvrlError for a model that cannot be replayed; it attends afterwards as it did before."""
    before = text_config(model)._attn_implementation
    try:
        prepare(model)
        return probe(model)
    except KvrlError as error:
        reason = str(error).removeprefix("model: ")
        raise KvrlError(f"model.path: {config.model.path} cannot be trained: {reason}") from None
    finally:
        if text_config(model)._attn_implementation != before:
            causal_lm(model).set_attn_implementation(before)


def unclosed(cache: CacheConfig, new: int) -> list[str]:
    """Windows so long that no completion of `new` tokens ever feeds their beacon."""
    return [
        f"cache.params.every: a window of {c} tokens never closes before the last of sampling.max_completion_length "
        f"({new}) tokens, so its completions keep every entry; {closing(c, new)}"
        for c in params_of(cache).rates or ()
        if c > new - 2
    ]


def unread(config: Config) -> list[str]:
    """Fields that were set to something and that nothing reads, as they are another method's or algorithm's."""
    out = []
    for name, (field, value) in READ_UNDER.items():
        section, own = getattr(config, name), getattr(config, field)
        usual = type(section)()
        changed = [key for key in type(section).model_fields if getattr(section, key) != getattr(usual, key)]
        if own != value and changed:
            out.append(
                f"{name}.{changed[0]}: is read under {field} {value} alone, and {field} is {own}; set {field} to "
                f"{value}, or leave it out"
            )
    distill = config.distill
    if distill.average_decay != DistillSettings().average_decay and distill.teacher_weights != "average":
        out.append(
            f"distill.average_decay: is read where distill.teacher_weights is average alone, and it is "
            f"{distill.teacher_weights}; set distill.teacher_weights to average, or leave it out"
        )
    return out


def warnings_of(config: Config, model: nn.Module, prompt: int) -> list[str]:
    """What runs, but not as it was meant, with a longest prompt of that many tokens."""
    new, cache = config.sampling.max_completion_length, config.replayed_cache
    length = max(prompt, config.rollout.max_prompt_length or 0) + new
    out = unread(config)
    if cache.is_beacon:
        out += unclosed(cache, new)
    elif not cache.is_dense and num_events(length - 1, cache.budget, cache.buffer) == 0:
        out.append(
            f"cache.budget + cache.buffer: {cache.budget} + {cache.buffer} entries hold the longest sequence "
            f"({length - new} prompt tokens + sampling.max_completion_length {new}), so nothing will be evicted; "
            "lower cache.buffer or cache.budget, or set method to dense"
        )
    trained, taken = getattr(text_config(model), "max_position_embeddings", None), positions_taken(cache, model, new)
    if trained is not None and length + taken > trained:
        room = trained - (length - new)
        most = bisect_right(range(1, room + 1), room, key=lambda n: n + positions_taken(cache, model, n))
        beacons = f", with {taken} positions of beacons," if taken else ""
        out.append(
            f"sampling.max_completion_length: {new} after {length - new} prompt tokens{beacons} is over the {trained} "
            f"positions that the model was made for; expect poor text beyond, or lower it to at most {max(1, most)}"
        )
    return out
