"""`kvrl parity`: how far the replayed log-probs are from the sampler's, and both from the stock model's.

Bars (float32): at most 3 times the stock model's own incremental-against-full error, never above 1e-4; on the
tiny models the dense mismatch must also exceed 1e-2, or the figure would prove nothing. bfloat16: against the
noise floor, the same figures for an uncompressed rollout, the mean at most 1.15 and p99 at most 1.3 times it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvrl.attention.probe import probe, text_config
from kvrl.attention.replay import Backend
from kvrl.beacons.config import FIELD, BeaconSet, beacons_of, params_of
from kvrl.cache.config import CacheConfig
from kvrl.cache.policies import POLICIES, make_policy
from kvrl.errors import KvrlError
from kvrl.eval.oracle import beacon_logprobs, full_forward_logprobs, incremental_error, oracle_logprobs
from kvrl.learner import Scorer, completion_mask, sampler_logprobs
from kvrl.models.tiny_families import BOS, FAMILIES, VOCAB, WINDOWED, build_family
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.rollout import rollout
from kvrl.sampler.types import Rollout

ERROR_FACTOR, ERROR_LIMIT, DENSE_MISMATCH = 3.0, 1e-4, 1e-2
MEAN_FACTOR, P99_FACTOR = 1.15, 1.3
NOISE_TOKENS = 4000  # a bfloat16 figure over fewer is not steady
NO_NOISE = 1e-4  # a mean below it means that two bfloat16 computations agreed to the bit almost everywhere
REPLAY_BATCH = 8
BEACON_RATES = (1, 3, 5)

TEXTS = (
    "Explain to a child why the sky is blue during the day and red in the evening.",
    "A farmer has 17 sheep, sells 5 and buys twice as many as he has left. How many has he now?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List the steps to change a bicycle tyre, and say which tools are needed for each.",
    "What were the main causes of the fall of the Roman Empire? Give both sides.",
    "Write a Python function that merges two sorted lists, and explain how long it takes.",
    "Compare tea and coffee: how they are grown, how they are made and what they do to us.",
    "Describe a walk through an old town in the rain, without using the word wet.",
)


@dataclass(frozen=True)
class Figures:
    """|log-prob of the sampler - log-prob of the learner| over all sampled tokens."""

    max: float
    mean: float
    p99: float

    @classmethod
    def of(cls, difference: Tensor) -> Figures:
        ordered = difference.double().sort().values
        return cls(ordered[-1].item(), ordered.mean().item(), ordered[int(0.99 * (len(ordered) - 1))].item())


@dataclass(frozen=True)
class Subject:
    """A model to examine, its weights once more as the stock model, its prompts and its default budget."""

    name: str
    dtype: str
    model: nn.Module
    stock: Any
    prompts: list[list[int]]
    new_tokens: int
    budget: int
    buffer: int
    tiny: bool

    @property
    def exact(self) -> bool:
        return self.dtype == "float32"


@dataclass(frozen=True)
class Report:
    """One policy on one model. The figures are the worst backend's; bars that do not apply are None."""

    model: str
    policy: str
    dtype: str
    budget: int
    buffer: int
    """Budget and buffer are 0 under beacons."""
    tokens: int
    evictions: int
    max_abs_logp_diff: float
    mean_abs_logp_diff: float
    p99_abs_logp_diff: float
    dense_mean_abs_logp_diff: float
    oracle_max_abs_logp_diff: float | None
    stock_error: float | None
    noise_floor: Figures | None
    backends: dict[str, Figures]
    passed: bool
    note: str | None = None
    """Why nothing was evicted, where nothing was."""


def run_parity(args: argparse.Namespace) -> int:
    """`kvrl parity`: a line (or, with --json, an object) for each model and policy; 1 if a bar is missed."""
    names = list(POLICIES) if args.policy == "all" else args.policy.split(",")
    for name in names:
        make_policy(CacheConfig(policy=name))
    if args.every is not None and "beacon" not in names:
        raise KvrlError(f"--every: chooses the windows of beacons, and --policy is {args.policy}; set --policy beacon")
    reports = []
    for subject in subjects(args):
        caches = [cache_of(name, subject, args) for name in names]
        error = stock_error(subject, args.seed) if subject.exact else None
        floor = None if subject.exact else noise_floor(subject, args.seed)
        for cache in caches:
            with beacon_in(subject, cache):
                reports.append(examine(subject, cache, args.seed, error, floor))
            if not args.json:
                print(line(reports[-1]), flush=True)
    passed = all(r.passed for r in reports)
    if args.json:
        print(json.dumps({"passed": passed, "reports": [asdict(r) for r in reports]}, indent=2))
    else:
        print("all bars hold" if passed else f"{sum(not r.passed for r in reports)} of {len(reports)} miss a bar")
    return 0 if passed else 1


def subjects(args: argparse.Namespace) -> Iterator[Subject]:
    """The models that `--model` names: `tiny` is every family, `tiny:NAME` one of them, else a real model."""
    kind, _, family = args.model.partition(":")
    if kind == "tiny":
        for name in [family] if family else FAMILIES:
            for window in (8, 40) if name in WINDOWED else (8,):  # a ring, and one longer than a slot
                yield _tiny(name, window, args)
    else:
        yield _real(args)


def _tiny(name: str, window: int, args: argparse.Namespace) -> Subject:
    model: nn.Module = build_family(name, window=window, dtype=getattr(torch, args.dtype)).to(_device())
    new = args.max_completion_length or 40
    generator = torch.Generator().manual_seed(args.seed)
    lengths = [(4, 18, 42)[i % 3] for i in range(_prompt_count(args, 3, new))]
    prompts = [[BOS, *torch.randint(3, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]
    label = f"{name}/window{window}" if name in WINDOWED else name
    return Subject(label, args.dtype, model, stock_of(model), prompts, new, 24, 8, tiny=True)


def _real(args: argparse.Namespace) -> Subject:
    from kvrl.train.setup import load_model

    model, tokenizer = load_model(args.model, args.dtype, merge=True, field="--model")
    model = model.to(_device())
    new = args.max_completion_length or 512
    prompts = [tokenizer(TEXTS[i % len(TEXTS)])["input_ids"] for i in range(_prompt_count(args, 2, new))]
    return Subject(args.model, args.dtype, model, stock_of(model), prompts, new, 128, 32, tiny=False)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def stock_of(model: nn.Module) -> Any:
    """A copy that kvrl does not touch, with transformers' reference attention."""
    stock: Any = copy.deepcopy(model).eval()
    stock.set_attn_implementation("eager")
    return stock


def _prompt_count(args: argparse.Namespace, default: int, new: int) -> int:
    """As many prompts as asked for, else as many as the figure needs."""
    return args.prompts or (-(-NOISE_TOKENS // new) if args.dtype == "bfloat16" else default)


def cache_of(policy: str, subject: Subject, args: argparse.Namespace) -> CacheConfig:
    """The cache section of one policy: the flags over the subject's defaults."""
    if policy == "beacon":
        return CacheConfig(policy=policy, params={} if args.every is None else {"every": args.every})
    budget = args.budget or subject.budget
    given = {name: getattr(args, name) for name in ("window", "sinks") if getattr(args, name) is not None}
    params = {"prompt_window": min(64, budget // 2)} if policy == "snapkv" else {}
    cache = CacheConfig(policy=policy, budget=budget, buffer=args.buffer or subject.buffer, params=params, **given)
    make_policy(cache)
    return cache


@contextlib.contextmanager
def beacon_in(subject: Subject, cache: CacheConfig) -> Iterator[None]:
    """Inside, a model without a beacon takes the last token that no prompt has for one, under policy `beacon`.

    An untrained beacon says as much about exactness as a trained one.
    """
    if not cache.is_beacon or beacons_of(subject.model) is not None:
        yield
        return
    config = text_config(subject.model)
    every = params_of(cache).rates or BEACON_RATES
    free = set(range(config.vocab_size)).difference(*subject.prompts)
    setattr(config, FIELD, BeaconSet(max(free), every).as_config())
    try:
        yield
    finally:
        delattr(config, FIELD)


def sample(subject: Subject, cache: CacheConfig, seed: int) -> list[Rollout]:
    """Rollouts of full length, whatever the model's EOS."""
    sampling = SamplingConfig(max_completion_length=subject.new_tokens, eos_token_ids=[])
    return rollout(subject.model, subject.prompts, cache=cache, sampling=sampling, seed=seed)


def stock_error(subject: Subject, seed: int) -> float:
    """The stock model's own incremental-against-full error, on a full-cache rollout of every prompt."""
    rollouts = sample(subject, CacheConfig(policy="dense"), seed)
    return max(incremental_error(subject.stock, r.token_ids, len(r.prompt_ids)) for r in rollouts)


def noise_floor(subject: Subject, seed: int) -> Figures:
    """The figures of an uncompressed rollout: what two kernels differ by.

    Where sampler and replay run one and the same kernel (soft-caps, learned sinks) their difference is 0 and
    says nothing: there the floor is the difference to the stock model's forward.
    """
    rollouts = sample(subject, CacheConfig(policy="dense"), seed)
    floor = Figures.of(torch.cat([_difference(subject, rollouts, b) for b in backends(subject)]))
    if floor.mean > NO_NOISE:
        return floor
    difference = [
        full_forward_logprobs(subject.stock, r.token_ids, len(r.prompt_ids)).cpu() - r.logprobs for r in rollouts
    ]
    return Figures.of(torch.cat(difference).abs())


def backends(subject: Subject) -> list[Backend]:
    """Every replay that this device and model have."""
    found: list[Backend] = ["mask", "segments"]
    cuda = next(subject.model.parameters()).device.type == "cuda"
    sinks = any(name.endswith(".sinks") for name, _ in subject.model.named_parameters())
    return [*found, "flex"] if cuda and not sinks else found


def _batches(rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
    for start in range(0, len(rollouts), REPLAY_BATCH):
        yield rollouts[start : start + REPLAY_BATCH]


@torch.no_grad()
def _replayed(subject: Subject, rollouts: Sequence[Rollout], backend: Backend, dense: bool = False) -> Tensor:
    """The learner's log-probs of every sampled token, in order: f32 [tokens]."""
    scorer = Scorer(subject.model, backend=backend)
    out = []
    for batch in _batches(rollouts):
        scores = scorer(batch, view="dense" if dense else "sparse")[0].cpu()
        out.append(scores[completion_mask(batch)])
    return torch.cat(out)


def _difference(subject: Subject, rollouts: Sequence[Rollout], backend: Backend, dense: bool = False) -> Tensor:
    recorded = torch.cat([sampler_logprobs(b)[completion_mask(b)] for b in _batches(rollouts)])
    return (_replayed(subject, rollouts, backend, dense) - recorded).abs()


def examine(subject: Subject, cache: CacheConfig, seed: int, error: float | None, floor: Figures | None) -> Report:
    """Sample under one policy, replay with every backend, compare with the oracle, and judge."""
    rollouts = sample(subject, cache, seed)
    recorded = torch.cat([r.logprobs for r in rollouts])
    replays = {backend: _replayed(subject, rollouts, backend) for backend in backends(subject)}
    figures = {backend: Figures.of((replay - recorded).abs()) for backend, replay in replays.items()}
    worst = Figures(*(max(getattr(f, name) for f in figures.values()) for name in ("max", "mean", "p99")))
    dense = Figures.of(_difference(subject, rollouts, "segments", dense=True))
    oracle = None
    if subject.exact:
        truth = torch.cat([oracle_of(subject.stock, r) for r in rollouts]).cpu()
        oracle = max((given - truth).abs().max().item() for given in (recorded, *replays.values()))
    evicted = any(bool((r.trace.events >= 0).any()) for r in rollouts)
    idle, note = (True, None) if evicted else why_idle(subject, cache, max(r.num_tokens for r in rollouts))
    if error is not None and oracle is not None:
        bar = min(ERROR_LIMIT, ERROR_FACTOR * error)
        telling = dense.mean > DENSE_MISMATCH or not evicted or not subject.tiny
        passed = worst.max <= bar and oracle <= bar and telling
    else:
        assert floor is not None
        passed = worst.mean <= MEAN_FACTOR * floor.mean and worst.p99 <= P99_FACTOR * floor.p99
    return Report(
        model=subject.name,
        policy=cache.policy,
        dtype=subject.dtype,
        budget=0 if cache.is_beacon else cache.budget,
        buffer=0 if cache.is_beacon else cache.buffer,
        tokens=len(recorded),
        evictions=sum(r.trace.num_events for r in rollouts) if evicted else 0,
        max_abs_logp_diff=worst.max,
        mean_abs_logp_diff=worst.mean,
        p99_abs_logp_diff=worst.p99,
        dense_mean_abs_logp_diff=dense.mean,
        oracle_max_abs_logp_diff=oracle,
        stock_error=error,
        noise_floor=floor,
        backends={str(backend): f for backend, f in figures.items()},
        passed=passed and idle,
        note=note,
    )


def oracle_of(stock: Any, r: Rollout) -> Tensor:
    """The oracle's log-probs of a rollout's completion, [C]."""
    prompt, evicted_at = len(r.prompt_ids), r.trace.evicted_at()
    if r.beacons is None:
        return oracle_logprobs(stock, r.token_ids, prompt, evicted_at, temperature=r.temperature)
    return beacon_logprobs(
        stock, r.fed.ids.tolist(), r.fed.positions.tolist(), evicted_at, r.beacons.token_id, prompt,
        temperature=r.temperature,
    )  # fmt: skip


def why_idle(subject: Subject, cache: CacheConfig, longest: int) -> tuple[bool, str]:
    """Whether a rollout without evictions may pass, and the words for it. KvrlError where the budget is the cause."""
    if cache.is_dense:
        return True, "nothing was evicted: policy dense keeps every entry"
    if cache.is_beacon:
        raise KvrlError(
            f"--every: no window of {subject.name}'s completions of {subject.new_tokens} tokens closes; lower --every "
            "or raise --max_completion_length"
        )
    windows = probe(subject.model).windows
    if all(window is not None and window <= cache.capacity for window in windows):
        return True, "nothing was evicted: every layer keeps its sliding window alone, within a slot"
    if longest <= cache.capacity:
        raise KvrlError(
            f"--budget: {cache.budget} and buffer {cache.buffer} hold {cache.capacity} entries, and {subject.name}'s "
            f"longest sequence has {longest} tokens, so nothing is evicted; lower --budget or raise "
            "--max_completion_length"
        )
    return False, "nothing was evicted"


def line(r: Report) -> str:
    """A report in one line."""
    text = (
        f"{r.model:20s} {r.policy:10s} max {r.max_abs_logp_diff:.1e}  mean {r.mean_abs_logp_diff:.1e}  "
        f"p99 {r.p99_abs_logp_diff:.1e}  dense mean {r.dense_mean_abs_logp_diff:.1e}"
    )
    if r.oracle_max_abs_logp_diff is not None:
        text += f"  oracle {r.oracle_max_abs_logp_diff:.1e}  stock {r.stock_error:.1e}"
    if r.noise_floor is not None:
        text += f"  floor mean {r.noise_floor.mean:.1e} p99 {r.noise_floor.p99:.1e}"
    verdict = "ok" if r.passed else "MISSED"
    return f"{text}  {verdict}" + (f"  ({r.note})" if r.note else "")
