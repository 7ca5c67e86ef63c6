"""What each part of a run takes, in bytes, from its configuration and the shapes of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvrl.activations import Saved, planned_trace, saved_bytes
from kvrl.attention.probe import ModelSpec, text_config
from kvrl.beacons.config import BeaconSet, params_of
from kvrl.beacons.plan import Beacons
from kvrl.cache.compaction import Compactor
from kvrl.cache.config import CacheConfig
from kvrl.cache.memory import make_memory, slot_bytes, slots_within
from kvrl.cache.slots import KVSlots
from kvrl.cache.trace import KVTrace
from kvrl.train.config import Config
from kvrl.train.setup import DTYPES
from kvrl.views import View

FP32 = 4
# fp32 copies of [tokens, vocabulary] that exist at once, as tests/test_footprint.py counts them
SCORE_COPIES, DISTILL_COPIES = 5, 13
DRAW_COPIES = 5


@dataclass(frozen=True)
class Footprint:
    """The sizes of one run on one device; `model` is prepared and on the meta device."""

    config: Config
    model: nn.Module
    spec: ModelSpec
    max_tokens: int
    """Of a sequence: prompt and completion."""

    # Models and optimiser ---------------------------------------------------------------------------------

    @property
    def weights(self) -> int:
        """Bytes of all parameters; a tied one counts once."""
        return sum(p.nbytes for p in self.model.parameters())

    @property
    def separate_critic(self) -> bool:
        """Whether PPO's critic is a model of its own."""
        return self.config.algorithm == "ppo" and self.config.ppo.critic == "model"

    @property
    def value_head(self) -> int:
        """Numbers of the critic's fp32 value head."""
        return text_config(self.model).hidden_size + 1 if self.config.algorithm == "ppo" else 0

    @property
    def trainable(self) -> int:
        """Numbers that the optimiser updates, those of critic and student included."""
        own = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return own * (1 + self.separate_critic + self.config.separate_student) + self.value_head

    @property
    def gradients(self) -> int:
        """fp32 in every case: over bf16 weights they are gathered in the masters."""
        return FP32 * self.trainable

    def resident(self) -> dict[str, int]:
        """What stays for the whole run: weights, AdamW's two moments (three with fp32 masters), further models."""
        config, distill = self.config, self.config.distillation
        masters = any(p.dtype != torch.float32 for p in self.model.parameters() if p.requires_grad)
        reference = config.settings.beta > 0 or (distill is not None and distill.teacher_weights == "start")
        average = distill is not None and distill.teacher_weights == "average"
        items = {
            "weights": self.weights,
            "optimiser": (3 if masters else 2) * FP32 * self.trainable,
            # LoRA's reference is the model with its adapters off
            "reference": self.weights if reference and config.lora is None else 0,
            "critic": (self.weights if self.separate_critic else 0) + FP32 * self.value_head,
            "student": self.weights * self.config.separate_student,
            "averaged teacher": average * (self.weights + FP32 * sum(p.numel() for p in self.model.parameters())),
        }
        return {name: size for name, size in items.items() if size}

    # The learner ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Sequences of full length in the largest micro-batch: what its tokens allow, one unit at least."""
        config, unit = self.config, 1
        if config.algorithm == "online_dpo":  # a pair stays together, or all pairs of a prompt
            unit = config.settings.num_generations if config.online_dpo.pairs == "all" else 2
        prompts = -(-config.train.prompts_per_step // config.settings.num_minibatches)
        return min(
            max(unit, config.train.micro_batch_tokens // self.max_tokens), prompts * config.settings.num_generations
        )

    @property
    def gradient_views(self) -> list[View]:
        """The view of each forward with a gradient: the policy's, a separate critic's, a distilled view's."""
        own = self.config.learner_view
        views = [own, own] if self.separate_critic else [own]
        if self.config.distillation is not None and self.config.distillation.teacher == own:
            views.append("dense" if own == "sparse" else "sparse")
        return views

    def saved(self, view: View) -> Saved:
        """One sequence's saved tensors. `flex` counts as a fused kernel over the whole sequence."""
        backend = self.config.replay.backend
        trace = None if view == "dense" else self.trace(self.config.replayed_cache)
        length = self.max_tokens if trace is None else trace.num_tokens  # beacons are fed too
        if backend == "flex":
            return saved_bytes(self.model, length, None)
        return saved_bytes(self.model, length, trace, backend)

    def activations(self) -> dict[str, int]:
        """Of the largest micro-batch: all `kept`, or `checkpointed`, and the `working` set of the backward pass.

        The working set is half of the largest layer's saved tensors: more than any supported family needs.
        """
        saved = [self.saved(view) for view in self.gradient_views]
        layer = max(s.layer for s in saved)
        # hidden states [tokens, E] that the head's chunks are made from
        chunks = len(saved) + (self.config.distillation is not None)
        width = text_config(self.model).hidden_size * DTYPES[self.config.model.dtype].itemsize
        scored = chunks * self.config.sampling.max_completion_length * width
        return {
            "kept": self.rows * (sum(s.kept for s in saved) + scored),
            "checkpointed": self.rows * (sum(s.inputs for s in saved) + layer + scored),
            "working": self.rows * layer // 2,
        }

    def logits(self) -> int:
        """One chunk of the learner's logits, and the head's fp32 gradient (and copy, over bf16 weights)."""
        copies = SCORE_COPIES if self.config.distillation is None else DISTILL_COPIES
        tokens = min(self.config.replay.logprob_chunk, self.rows * self.config.sampling.max_completion_length)
        return copies * tokens * self.vocabulary * FP32 + self.head + self.head_copy

    @property
    def vocabulary(self) -> int:
        return text_config(self.model).vocab_size

    @property
    def head(self) -> int:
        """The head's weights in fp32."""
        return FP32 * self.vocabulary * text_config(self.model).hidden_size

    @property
    def head_copy(self) -> int:
        """The head cast to fp32, which fp32 weights need not be."""
        return 0 if self.config.model.dtype == "float32" else self.head

    # Rollouts ---------------------------------------------------------------------------------------------

    def sizes(self, cache: CacheConfig) -> dict[str, Any]:
        """What the size of a slot depends on."""
        new = self.config.sampling.max_completion_length
        rates = params_of(cache).rates if cache.is_beacon else None
        return {
            "max_tokens": self.max_tokens, "dtype": DTYPES[self.config.model.dtype],
            "beacon_slots": rates and BeaconSet(0, rates).slots(self.max_tokens - new, new),
        }  # fmt: skip

    def memory(self, cache: CacheConfig, num_slots: int) -> tuple[KVSlots, Compactor | None]:
        """An engine's memory, as sizes."""
        return make_memory(
            self.spec, cache, num_slots=num_slots, device=torch.device("meta"), **self.sizes(cache)
        )  # fmt: skip

    def rollout(self, cache: CacheConfig, num_slots: int) -> dict[str, int]:
        """What an engine with that many slots allocates, and what drawing a token from each takes."""
        slots, compactor = self.memory(cache, num_slots)
        return {
            "KV slots": slots.kv_bytes,
            "scoring": slots.state_bytes + (compactor.scratch_bytes if compactor else 0),
            "trace": slots.events.nbytes,
            "logits": DRAW_COPIES * slots.num_slots * self.vocabulary * FP32 + self.head_copy,
        }

    def slots(self, cache: CacheConfig) -> int:
        """Sequences that are decoded at once under a cache: as many as are wanted, or as `rollout.kv_memory` holds."""
        limit = self.config.rollout.kv_memory
        if limit is None:
            return self.config.slots
        return min(self.config.slots, slots_within(limit, self.spec, cache, **self.sizes(cache)))

    def kv_per_slot(self, cache: CacheConfig) -> int:
        """K and V of one sequence."""
        return slot_bytes(self.spec, cache, **self.sizes(cache))

    def most_slots(self, cache: CacheConfig, memory: int) -> int:
        """The most slots that a rollout may have beside what is resident; 0 if not even one fits."""
        free = memory - sum(self.resident().values())
        low, high = 0, 1
        while sum(self.rollout(cache, high).values()) <= free:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self.rollout(cache, middle).values()) <= free else (low, middle)
        return low

    def trace(self, cache: CacheConfig) -> KVTrace:
        """A sequence's trace as it comes back from the engine, in host memory."""
        if cache.is_dense:
            return KVTrace.dense(self.spec.num_layers, self.spec.kv_heads, self.max_tokens)
        if cache.is_beacon:  # the shortest windows have most beacons
            rates, new = params_of(cache).rates, self.config.sampling.max_completion_length
            assert rates is not None
            return Beacons(0, rates[:1]).trace(self.spec.num_layers, self.spec.kv_heads, self.max_tokens - new, new)
        return planned_trace(self.spec, self.max_tokens, cache.budget, cache.buffer)
