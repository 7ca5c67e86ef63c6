"""The rollout engine: batched sampling over fixed slots, each request in a fixed KV budget."""

from __future__ import annotations

import contextlib
import math
import operator
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvrl.attention.probe import check_length, counted, prepare, probe, text_config
from kvrl.attention.sampler import DecodeContext, PrefillContext
from kvrl.beacons.config import beacons_for, beacons_of, check_limit
from kvrl.cache.config import CacheConfig
from kvrl.cache.memory import make_memory, slots_within
from kvrl.cache.policies import make_policy
from kvrl.cache.trace import occupancy
from kvrl.cuda_graph import Captured
from kvrl.errors import KvrlError
from kvrl.head import Head, check_head, decoder
from kvrl.native.decode_attention import supported
from kvrl.native.layer import native_trunk
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.inputs import check_beacons, check_prompts, token_ids
from kvrl.sampler.record import make_rollout
from kvrl.sampler.request import Continue, Progress, Prompt, Request
from kvrl.sampler.routing import RoutingRecorder
from kvrl.sampler.sampling import Drawn, draw
from kvrl.sampler.types import FinishReason, Rollout
from kvrl.streams import fold, stream_key, uniform


class Engine:
    """Samples completions over `num_slots` fixed slots. Build once, use for one batch of prompts at a time.

    max_prompt_length bounds the prompts to come. kv_memory bounds the bytes of K and V, and so the
    slots. scratch_bytes bounds the policy's scoring, prefill_chunk the
    tokens of a prompt that go through the model at once. native_kernels: on a CPU decode attention is a compiled
    kernel. cuda_graphs: on CUDA the decode step of a model without experts and the
    compaction of full slots are captured once a run.
    Raises KvrlError for a model that cannot be replayed, an unknown policy or a budget too small for it.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: CacheConfig,
        sampling: SamplingConfig,
        *,
        num_slots: int,
        max_prompt_length: int,
        tokenizer: Any = None,
        kv_memory: int | None = None,
        scratch_bytes: int | None = None,
        prefill_chunk: int = 512,
        native_kernels: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        if num_slots < 1:
            raise KvrlError(f"slots: {num_slots} is below 1; give the number of sequences to decode together")
        if sampling.stop and tokenizer is None:
            raise KvrlError("sampling.stop: stop strings need a tokenizer to read the text; pass tokenizer=")
        self.model, self.cache, self.sampling, self.tokenizer = prepare(model), cache, sampling, tokenizer
        check_head(model)
        self.spec = probe(model)
        self.policy = make_policy(cache)
        self.prefill_chunk = prefill_chunk
        self.max_prompt_length = max_prompt_length
        new = sampling.max_completion_length
        self.max_tokens = max_prompt_length + new
        self.beacons = beacons_for(cache, model) if cache.is_beacon else None
        taken = 0
        if self.beacons is not None:
            check_limit(self.beacons.every, new)
            taken = self.beacons.positions_taken(new)
        longest = self.max_tokens + taken
        check_length(self.spec.max_length, longest, "prompt + sampling.max_completion_length", taken)
        trained = getattr(text_config(model), "max_position_embeddings", None)
        if trained is not None and longest > trained:
            warnings.warn(
                f"prompt + sampling.max_completion_length: {counted(longest, taken)} are over the {trained} that the "
                "model was made for (max_position_embeddings); expect poor text beyond",
                stacklevel=2,
            )
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cuda_graphs = cuda_graphs and self.device.type == "cuda"
        self.native = native_kernels and supported(parameter.dtype, self.device, self.spec.head_dim)
        given: dict[str, Any] = {
            "max_tokens": self.max_tokens, "dtype": parameter.dtype,
            "beacon_slots": None if self.beacons is None else self.beacons.slots(max_prompt_length, new),
        }  # fmt: skip
        if kv_memory is not None:
            num_slots = min(num_slots, slots_within(kv_memory, self.spec, cache, **given))
        self.slots, self.compactor = make_memory(
            self.spec, cache, num_slots=num_slots, device=self.device, scratch_bytes=scratch_bytes, native=self.native,
            **given,
        )  # fmt: skip
        self.num_slots, self.budget, self.buffer = self.slots.num_slots, self.slots.budget, self.slots.buffer
        self.running = False
        own = beacons_of(model)
        self.banned = None if own is None else own.token_id
        self.vocab = text_config(model).vocab_size
        self.eos = frozenset(sampling.eos_token_ids if sampling.eos_token_ids is not None else eos_ids(model))
        if sampling.eos_token_ids is None and self.banned in self.eos:
            raise KvrlError(
                f"model: token {self.banned} is its beacon, which is never drawn, and ends completions too; restore "
                "the model's config, or set sampling.eos_token_ids"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V as allocated, buffer and staging row included: known before the run (contract 9)."""
        return self.slots.kv_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside K and V: positions, the policy's state and the most that scoring holds at once."""
        return self.slots.state_bytes + (self.compactor.scratch_bytes if self.compactor else 0)

    @property
    def dense_kv_bytes(self) -> int:
        """Bytes that K and V of as many slots (and the staging row) would take with the full cache."""
        spec = self.spec
        entries = sum(min(w or self.max_tokens, self.max_tokens) for w in spec.windows)
        return 2 * entries * (self.num_slots + 1) * spec.kv_heads * spec.head_dim * self.slots.k.element_size()

    @torch.no_grad()
    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        request_ids: Sequence[int] | None = None,
        every: Sequence[int | Sequence[int]] | None = None,
        on_turn: Continue | None = None,
        on_step: Callable[[Progress], None] | None = None,
    ) -> list[Rollout]:
        """Sample `num_generations` completions of each prompt; they are consecutive in the result.

        request_ids names each prompt's random stream (its index by default): with seed and sample index it
        alone decides the randomness. every: the beacons' window for each prompt, or its windows in turn; None: as the
        cache section says, draws being by each request's stream. on_step is called after each decode step. Raises
        KvrlError for prompts that do not fit.
        """
        if self.running:
            raise KvrlError("engine: is running; sample from inside a run (on_turn) with another Engine")
        prepare(self.model)  # its attention may have been set to another implementation since
        prompts = [token_ids(f"prompts[{i}]", prompt, self.vocab) for i, prompt in enumerate(prompts)]
        check_prompts(prompts, self.max_prompt_length, self.cache, self.policy, self.banned)
        check_beacons(self.beacons, len(prompts), every, on_turn)
        ids = list(range(len(prompts))) if request_ids is None else [operator.index(i) for i in request_ids]
        if len(ids) != len(prompts):
            raise KvrlError(f"request_ids: {len(ids)} for {len(prompts)} prompts; give one for each")
        n = self.sampling.num_generations
        waiting = deque(
            Prompt(list(p), i, deque(Request(list(p), i, g, stream_key(seed, ids[i], g)) for g in range(n)))
            for i, p in enumerate(prompts)
        )
        requests = [request for prompt in waiting for request in prompt.waiting]
        if self.beacons is not None:
            new = self.sampling.max_completion_length
            for r in requests:
                r.beacons = (
                    self.beacons.draw(r.stream, new) if every is None else self.beacons.plan(every[r.prompt_index])
                )
        done: dict[int, Rollout] = {}
        active: dict[int, Request] = {}
        start = time.perf_counter()
        with self._sampling_mode() as routing:
            self.routing = routing
            self.head = Head(self.model).frozen(native=self.native)
            self.trunk = native_trunk(self.model, self.spec) if self.native and routing is None else None
            # Not kept: it refers to the engine, whose slots would stay until the garbage collector came round
            captured = self.cuda_graphs and routing is None
            decode = self._decode_step(captured=captured)
            if captured and self.compactor is not None and self.slots.events.numel():  # some run may evict
                self.compactor.capture()
            staged: Prompt | None = None
            steps = tokens = 0
            staged_logits = torch.empty(0)
            while waiting or staged or active:
                free = [row for row in range(self.num_slots) if row not in active]
                while free and (staged or waiting):
                    if staged is None:
                        staged = waiting.popleft()
                        staged_logits, staged_routing = self._prefill_prompt(
                            staged, stream_key(seed, ids[staged.index])
                        )
                    row, request = free.pop(0), staged.waiting.popleft()
                    self.slots.copy_row(self.num_slots, row)
                    request.forwarded = request.held = len(request.prompt_ids)
                    request.routing.extend(staged_routing)
                    active[row] = request
                    self._accept({row: request}, self._draw({row: request}, staged_logits, [row]), on_turn)
                    staged = staged if staged.waiting else None
                    self._retire(active, done)
                    if row not in active:
                        free.insert(0, row)
                if active:
                    steps, tokens = steps + 1, tokens + self._step(active, decode, on_turn)
                    busy = len(active)
                    self._retire(active, done)
                    if on_step is not None:
                        left = len(requests) - len(done) - len(active)
                        on_step(Progress(steps, busy, left, len(done), len(requests), tokens))
        seconds = time.perf_counter() - start
        out = [done[id(request)] for request in requests]
        tokens = sum(len(r.completion_ids) for r in out)
        stats = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "kv_bytes": float(self.kv_bytes),
            "scratch_bytes": float(self.scratch_bytes),
            "dense_kv_bytes": float(self.dense_kv_bytes),
            "held_entries": sum(r.seen for r in requests) / max(1, sum(r.steps for r in requests)),
            "held_entries_max": float(max((r.most_held for r in requests), default=0)),
        }
        return [replace(r, stats=stats) for r in out]

    # One step of every slot -------------------------------------------------------------------------------

    def _step(self, active: dict[int, Request], decode: Callable[[Tensor], Tensor], on_turn: Continue | None) -> int:
        """Forward the newest token of every slot, let full slots be compacted, draw the next tokens; how many.

        A slot whose window has closed forwards its beacon instead, and draws nothing.
        """
        tokens, positions, at = [0] * self.num_slots, [0] * self.num_slots, [0] * self.num_slots
        due = [row for row, request in active.items() if request.beacon_is_due]
        for row, request in active.items():
            tokens[row], positions[row] = request.next_fed()
            at[row] = self._held(request)
            request.count(at[row] + 1)
        logits = decode(torch.tensor([tokens, positions, at], device=self.device))  # [S, V]
        for row, request in active.items():
            request.forwarded += 1
            request.held += 1
            if self.routing:
                request.routing.append(self.routing.at(row, width=self.num_slots))
        self._compact(list(active.items()), in_prompt=False)
        self._close_windows([(row, active[row]) for row in due])
        drawing = {row: active[row] for row in sorted(active) if row not in due}
        if drawing:
            self._accept(drawing, self._draw(drawing, logits, list(drawing)), on_turn)
        return len(drawing)

    def _held(self, request: Request) -> int:
        """Entries that a request's slot holds, which is the place of the next one."""
        if request.beacons is None:
            return occupancy(request.forwarded, self.budget, self.buffer)
        if not request.beacon_is_due:  # a closed window keeps its raw entries until its beacon was fed
            assert request.held == request.beacons.held(len(request.prompt_ids), request.raw)
        return request.held

    def _close_windows(self, rows: list[tuple[int, Request]]) -> None:
        """Let the beacon just forwarded take the first place of its window, whose raw entries go."""
        if not rows:
            return
        source = [r.held - 1 for _, r in rows]
        for _, r in rows:
            assert r.beacons is not None
            r.held -= r.beacons.size(r.fed_beacons)
            r.fed_beacons += 1
        given = [[row for row, _ in rows], source, [r.held - 1 for _, r in rows]]
        self.slots.move(*torch.tensor(given, device=self.device))

    def _decode_step(self, *, captured: bool) -> Callable[[Tensor], Tensor]:
        """What takes every slot's token id, position and storage slot, int64 [3, S], to logits f32 [S, V]."""

        def decode(inputs: Tensor) -> Tensor:
            ids, position, slots_at = inputs
            context = DecodeContext(self.slots, position, slots_at, native=self.native)
            if self.trunk is not None:
                return self.head(self.trunk(ids, position, context)[:, -1])
            return self.head(self._forward(ids[:, None], position[:, None], context)[:, -1])

        if not captured:
            return decode
        return Captured(decode, (3, self.num_slots), self.device, "the model's decode step")

    def _forward(self, ids: Tensor, positions: Tensor, context: DecodeContext | PrefillContext) -> Tensor:
        return decoder(self.model)(input_ids=ids, position_ids=positions, use_cache=False, kv=context).last_hidden_state

    def _compact(self, rows: list[tuple[int, Request]], *, in_prompt: bool) -> None:
        """Compact the rows whose occupancy has just reached budget + buffer."""
        if self.compactor is None or not self.slots.managed:  # nothing to evict where every layer has a ring
            return
        full = [
            (row, r) for row, r in rows
            if r.forwarded >= self.slots.capacity and (r.forwarded - self.slots.capacity) % self.buffer == 0
        ]  # fmt: skip
        if full:
            self.compactor.compact(
                [row for row, _ in full],
                [r.forwarded for _, r in full],
                [len(r.prompt_ids) for _, r in full],
                [r.stream for _, r in full],
                in_prompt=in_prompt,
            )

    def _draw(self, requests: dict[int, Request], logits: Tensor, rows: list[int]) -> dict[int, Drawn]:
        """Draw a token for every row of logits [rows or S, V], each from its request's own stream."""
        at = rows if len(logits) > len(rows) else range(len(rows))
        streams, counts = [0] * len(logits), [0] * len(logits)
        for i, row in zip(at, rows, strict=True):
            streams[i], counts[i] = requests[row].stream, len(requests[row].completion_ids)
        stream, count = torch.tensor([streams, counts], device=self.device)
        if len(rows) < len(logits):  # idle slots repeat an active one: what they would draw must not matter
            pick = torch.full((len(logits),), rows[0], device=self.device)
            pick[rows] = torch.tensor(rows, device=self.device)
            logits = logits[pick]
        drawn = draw(logits, uniform(fold(stream, count)), self.sampling).cpu()
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise KvrlError(
                "model: its logits are not finite while sampling; check the weights, or use model.dtype float32"
            )
        return {row: Drawn(tokens[i], logprobs[i], drawn.support_of(i)) for i, row in zip(at, rows, strict=True)}

    def _accept(self, requests: dict[int, Request], drawn: dict[int, Drawn], on_turn: Continue | None) -> None:
        """Append the drawn tokens and see which requests end or take a turn."""
        for row, one in drawn.items():
            request = requests[row]
            self._append(request, one)
            while on_turn is not None and request.finish_reason in ("eos", "stop"):
                if not self._take_turn(row, request, on_turn):
                    break

    def _finish_reason(self, request: Request) -> FinishReason | None:
        if request.completion_ids[-1] in self.eos:
            return "eos"
        if self.sampling.stop and self._stopped(request.completion_ids):
            return "stop"
        if len(request.completion_ids) >= self.sampling.max_completion_length:
            return "length"
        return None

    def _stopped(self, ids: list[int]) -> bool:
        """Whether the newest token completed a stop string (every token holds a byte at least)."""
        longest = max(len(s.encode()) for s in self.sampling.stop)
        text = self.tokenizer.decode(ids[-longest - 4 :])
        before = self.tokenizer.decode(ids[-longest - 4 : -1])
        return any(text.count(s) > before.count(s) for s in self.sampling.stop)

    def _take_turn(self, row: int, request: Request, on_turn: Continue) -> bool:
        """Insert tokens that the policy did not sample and draw the next one after them (contract 12).

        False if the completion ends as it is.
        """
        given = on_turn(request)
        if given is None:
            return False
        inserted = token_ids("on_turn", given, self.vocab)
        if not inserted:
            return False
        if len(inserted) >= self.sampling.max_completion_length - len(request.completion_ids):
            request.finish_reason = "length"
            return False
        pending = [request.completion_ids[-1], *inserted]
        request.completion_ids.extend(inserted)
        request.logprobs.extend([0.0] * len(inserted))
        request.sampled.extend([False] * len(inserted))
        if self.sampling.truncates:
            request.support.extend([torch.empty(0, dtype=torch.int32)] * len(inserted))
        logits = self._prefill(row, request, pending, in_prompt=False)
        self._append(request, self._draw({row: request}, logits, [row])[row])
        return True

    def _append(self, request: Request, drawn: Drawn) -> None:
        """Append a drawn token and see whether it ends the completion."""
        request.completion_ids.append(drawn.token)
        request.logprobs.append(drawn.logprob)
        request.sampled.append(True)
        if drawn.support is not None:
            request.support.append(drawn.support)
        request.finish_reason = self._finish_reason(request)

    # Prefill ----------------------------------------------------------------------------------------------

    def _prefill_prompt(self, prompt: Prompt, stream: int) -> tuple[Tensor, list[Tensor]]:
        """Run a prompt alone into the staging row; returns the last token's logits [1, V] and its routing."""
        self.slots.reset(self.num_slots)
        request = Request(prompt.ids, prompt.index, 0, stream)
        return self._prefill(self.num_slots, request, prompt.ids, in_prompt=True), request.routing

    def _prefill(self, row: int, request: Request, ids: list[int], *, in_prompt: bool) -> Tensor:
        """Forward tokens of one request alone, in fixed chunks that end where a compaction is due; [1, V] logits."""
        hidden = torch.empty(0)
        while ids:
            held = occupancy(request.forwarded, self.budget, self.buffer)
            if not self.slots.managed:
                held = 0
            size = min(len(ids), self.prefill_chunk, self.slots.capacity - held)
            chunk, ids = ids[:size], ids[size:]
            context = PrefillContext(self.slots, row, request.forwarded, held, size)
            positions = torch.arange(request.forwarded, request.forwarded + size, device=self.device)[None]
            hidden = self._forward(torch.tensor([chunk], device=self.device), positions, context)
            request.forwarded += size
            if self.routing:
                request.routing.extend(self.routing.at(i, width=size) for i in range(size))
            self._compact([(row, request)], in_prompt=in_prompt)
        return self.head(hidden[:, -1])

    # Bookkeeping ------------------------------------------------------------------------------------------

    def _retire(self, active: dict[int, Request], done: dict[int, Rollout]) -> None:
        for row in [row for row, request in active.items() if request.finish_reason]:
            request = active.pop(row)
            done[id(request)] = make_rollout(self.slots, row, request, self.sampling)

    @contextlib.contextmanager
    def _sampling_mode(self) -> Iterator[RoutingRecorder | None]:
        """Evaluation mode and, for mixtures of experts, kernels and a record of their routing; undone after."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        self.running = True
        try:
            with RoutingRecorder.attached(self.model, batch_invariant=True) as recorder:
                yield recorder
        finally:
            self.running = False
            for module, training in modes:
                module.training = training


def eos_ids(model: Any) -> list[int]:
    """Every EOS id of the model's generation config."""
    ids = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
