"""`kvrl plan`: the memory of one device, phase by phase, from a configuration alone.

Counted on the meta device from the code that runs: the model's parameters, the engine's slots, the tensors that the
learner's forward saves (`kvrl.footprint`). Not counted: kernels' workspaces, the device's own libraries, the
allocator's fragments, forwards without gradient (512 tokens of a prompt, one token a slot), and what `notes` names.
Nothing is sharded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from kvrl.attention.probe import find_routers, prepare, probe
from kvrl.cache.memory import slot_width
from kvrl.errors import KvrlError
from kvrl.eval.report import widened
from kvrl.footprint import Footprint
from kvrl.models.shapes import meta_policy
from kvrl.tasks import encode_prompt, get_task
from kvrl.train.config import Config, load_config
from kvrl.train.setup import tiny_tokenizer

PROMPT_LENGTH = 512  # where nothing tells
REMEDIES = {
    "rollout": "lower rollout.slots or set rollout.kv_memory",
    "backward": "lower train.micro_batch_tokens, set model.gradient_checkpointing or train adapters (lora)",
    "optimiser step": "train adapters (lora) or take a smaller model.dtype",
    "evaluation": "lower rollout.slots or eval.n",
}
"""What makes a phase smaller."""


@dataclass(frozen=True)
class Plan:
    """Bytes on one device. A phase needs what is resident and its own items."""

    model: str
    dtype: str
    parameters: int
    trainable: int
    prompt_length: int
    max_tokens: int
    """Of a sequence: prompt and completion."""
    slots: int
    """Sequences that are decoded at once."""
    micro_batch: int
    """Sequences of full length in the largest micro-batch."""
    resident: dict[str, int]
    phases: dict[str, dict[str, int]]
    activations: dict[str, int]
    """Of the largest micro-batch, all `kept` or `checkpointed`: the phase has what the configuration says."""
    kv_per_slot: int
    full_kv_per_slot: int
    trace_per_sequence: int
    """In host memory, for each rollout of a batch."""
    fits: dict[str, int] | None
    """The most slots that a rollout may have in `memory`: with the configured cache, and with the full one."""
    memory: int | None
    notes: list[str]

    @property
    def totals(self) -> dict[str, int]:
        """What each phase needs."""
        fixed = sum(self.resident.values())
        return {name: fixed + sum(items.values()) for name, items in self.phases.items()}


def run_plan(args: argparse.Namespace) -> None:
    """`kvrl plan`: a table, or JSON alone."""
    plan = make_plan(load_config(args.config, args.overrides), memory=args.memory, prompt_length=args.prompt_length)
    if args.json:
        print(json.dumps({**asdict(plan), "totals": plan.totals}, indent=2))
        return
    console = widened(Console(highlight=False))
    console.print(table(plan))
    for line in lines(plan):
        console.print(line, soft_wrap=True)


def make_plan(config: Config, *, memory: int | None = None, prompt_length: int | None = None) -> Plan:
    """The plan of a configuration. prompt_length: tokens of the longest prompt, over what the configuration says.

    Raises KvrlError for a model that cannot be replayed or whose shape cannot be found.
    """
    model = prepare(meta_policy(config))
    if find_routers(model) and config.model.dtype == "float32":
        raise KvrlError(
            "model.dtype: float32 experts cannot be counted (PyTorch's grouped products without data take bfloat16 "
            "alone); plan with --model.dtype bfloat16"
        )
    prompt = prompt_length or config.rollout.max_prompt_length or own_prompts(config) or PROMPT_LENGTH
    run = Footprint(config, model, probe(model), prompt + config.sampling.max_completion_length)
    activations, cache, full = run.activations(), config.rollout_cache, config.cache.as_dense()
    phases = {
        "rollout": run.rollout(cache, run.slots(cache)),
        "backward": {
            "gradients": run.gradients,
            "activations": activations["checkpointed" if config.model.gradient_checkpointing else "kept"],
            "working set": max(run.logits(), activations["working"]),
        },
        # CUDA's AdamW takes all tensors at once and holds an intermediate of each
        "optimiser step": {"gradients": run.gradients, "working set": run.gradients},
    }
    if config.eval.n:
        caches = [config.cache.at_budget(budget) for budget in config.eval_budgets]
        every = [run.rollout(c, min(run.slots(c), config.eval.n)) for c in caches]
        phases["evaluation"] = max(every, key=lambda items: sum(items.values()))
    return Plan(
        model=config.model.path,
        dtype=config.model.dtype,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=run.trainable,
        prompt_length=prompt,
        max_tokens=run.max_tokens,
        slots=slot_width(run.slots(cache)),
        micro_batch=run.rows,
        resident=run.resident(),
        phases=phases,
        activations=activations,
        kv_per_slot=run.kv_per_slot(cache),
        full_kv_per_slot=run.kv_per_slot(full),
        trace_per_sequence=run.trace(cache).nbytes,
        fits=None if memory is None else {"cache": run.most_slots(cache, memory), "full": run.most_slots(full, memory)},
        memory=memory,
        notes=notes(
            config, assumed=not (prompt_length or config.rollout.max_prompt_length or config.model.path == "tiny")
        ),
    )


def own_prompts(config: Config) -> int | None:
    """Tokens of the longest of a task's first prompts in the tiny model's vocabulary, which needs no file."""
    if config.model.path != "tiny":
        return None
    task = get_task(config.task.name, **config.task.params)
    tokenizer = tiny_tokenizer(task)
    return max(len(encode_prompt(tokenizer, row["prompt"])) for row in task.rows("train", 64, config.seed))


def notes(config: Config, *, assumed: bool) -> list[str]:
    """What the plan assumes and what it leaves out."""
    out = []
    if assumed:
        out.append(f"prompts are taken to have up to {PROMPT_LENGTH} tokens: give --prompt_length")
    if config.warm_start is not None:
        out.append(f"not counted: the warm start's batches of {config.warm_start.batch_size} demonstrations")
    out += [f"not counted: the reward model {e.params.get('path')}" for e in config.reward.funcs
            if e.func == "reward_model"]  # fmt: skip
    return out


def size(count: int) -> str:
    """Bytes in three digits or so: 1.46 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.{2 if count < 100 * unit else 0}f} {name}"
    return f"{count} B"


def table(plan: Plan) -> Table:
    """Phases in columns; what is resident stands in each."""
    out = Table(title=f"{plan.model}, {plan.dtype}, {plan.parameters:,} parameters ({plan.trainable:,} trained)")
    out.add_column("")
    for name in plan.phases:
        out.add_column(name, justify="right")
    for name, count in plan.resident.items():
        out.add_row(name, *[size(count)] * len(plan.phases))
    out.add_section()
    for name in dict.fromkeys(item for items in plan.phases.values() for item in items):
        out.add_row(name, *(size(items[name]) if name in items else "" for items in plan.phases.values()))
    out.add_section()
    out.add_row("total", *map(size, plan.totals.values()))
    return out


def lines(plan: Plan) -> list[str]:
    """What the table does not say."""
    kept, checkpointed = (size(plan.activations[name]) for name in ("kept", "checkpointed"))
    share = plan.kv_per_slot / plan.full_kv_per_slot
    out = [
        f"sequences of up to {plan.prompt_length} + {plan.max_tokens - plan.prompt_length} tokens: {plan.slots} slots, "
        f"{plan.micro_batch} in a micro-batch",
        f"KV of a sequence: {size(plan.kv_per_slot)}, {share:.0%} of the full cache's {size(plan.full_kv_per_slot)}",
        f"trace of a sequence, in host memory: {size(plan.trace_per_sequence)}",
        f"activations: {kept}, with gradient checkpointing {checkpointed}",
    ]
    if plan.memory is not None and plan.fits is not None:
        over = [name for name, total in plan.totals.items() if total > plan.memory]
        fitting = "; ".join(f"{name} does not fit: {REMEDIES[name]}" for name in over) or "everything fits"
        out.append(f"in {size(plan.memory)}: {fitting}")
        out.append(f"most slots: {plan.fits['cache']} with this cache, {plan.fits['full']} with the full one")
    return out + plan.notes
