"""`kvrl variance`: the spread of the sequence log-ratio against length, for a dense learner and for replay.

A sequence's importance weight is the product of its tokens' ratios learner / sampler. If E[ratio^2] >= 1 + d at every
token, its variance is at least (1 + d)^L - 1 (arXiv 2605.06850): exponential in the length L for a learner that sees
another context than the sampler did, and nothing to correct for one that replays the sampler's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoTokenizer

from kvrl.attention.probe import text_config
from kvrl.cache.config import CacheConfig
from kvrl.errors import KvrlError
from kvrl.eval.parity import cache_of, subjects
from kvrl.eval.report import check_figure, to_json
from kvrl.eval.variance_plot import plot
from kvrl.learner import logprobs, sampler_logprobs
from kvrl.models.fetch import resolve_model
from kvrl.progress import sampling_bar
from kvrl.sampler.config import SamplingConfig
from kvrl.sampler.request import Progress
from kvrl.sampler.rollout import rollout
from kvrl.sampler.types import Rollout
from kvrl.tasks import encode_prompt, get_task
from kvrl.train.micro_batch import fed_lengths, micro_batches
from kvrl.views import View

MAX_SLOTS = 16  # the noise floor's slots hold the full cache
SCORED_TOKENS, LOGIT_TOKENS = 8192, 256  # of one forward, and whose logits exist at once
NAMES = {"dense": "dense learner", "replay": "replay", "floor": "noise floor"}


@dataclass(frozen=True)
class Spread:
    """One learner at one length: log-ratios log(learner / sampler) of the first `length` tokens of every sample."""

    learner: str
    """`dense`, `replay`, or `floor`: the replay of an uncompressed rollout, so what two kernels differ by."""
    length: int
    mean: float
    """Of the sequence log-ratio over samples, nats."""
    std: float
    """Sample standard deviation of the sequence log-ratio, nats."""
    max_abs: float
    """Largest |sequence log-ratio|, nats."""
    ess_share: float
    """Effective sample size over samples: 1 if all weights are equal, 1/n if one sample has all the weight."""
    d: float
    """Mean over all tokens of ratio^2, less 1: d of the theorem if every token had the mean's."""
    log10_bound: float | None
    """log10 of (1 + d)^length - 1, the theorem's bound on the weight's variance; None if d is not positive."""


def run_variance(args: argparse.Namespace) -> None:
    """`kvrl variance`: sample, score every prefix, print the table (or JSON alone), write the plot."""
    check_figure(Path(args.output))
    if args.n < 2:
        raise KvrlError(f"--n: {args.n} is below 2, and a spread needs two samples; raise --n to at least 2")
    name, model, prompts, cache = load(args)
    lengths, sampling = args.lengths, {"seed": args.seed, "longest": args.lengths[-1]}
    with sampling_bar(Console(stderr=True)) as on_step:
        rollouts = sample(model, prompts, cache, on_step=on_step, **sampling)
    evictions = rollouts[0].trace.num_events
    if not any(bool((r.trace.events >= 0).any()) for r in rollouts):
        raise KvrlError(f"--model: {name} keeps its sliding windows alone, so nothing was evicted; use another model")
    rows = spreads("dense", log_ratios(model, rollouts, "dense"), lengths)
    rows += spreads("replay", log_ratios(model, rollouts, "sparse"), lengths)
    with sampling_bar(Console(stderr=True)) as on_step:
        full = sample(model, prompts, cache.as_dense(), on_step=on_step, **sampling)
    rows += spreads("floor", log_ratios(model, full, "sparse"), lengths)
    result = {
        "model": name, "dtype": args.dtype, "policy": cache.policy, "budget": cache.budget, "buffer": cache.buffer,
        "samples": len(rollouts), "seed": args.seed, "evictions_per_sample": evictions,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    if args.json:
        print(to_json(result, indent=2))
    else:
        print(f"log-ratio of whole sequences, learner against sampler, nats: {title(result)}")
        print(table(rows))
        print("ESS: effective share of the sequences. d: mean ratio^2 of a token, less 1. bound: (1 + d)^length - 1")
    plot(Path(args.output), rows, title(result), len(rollouts))
    if not args.json:
        print(f"plot: {args.output}")


def load(args: argparse.Namespace) -> tuple[str, nn.Module, list[list[int]], CacheConfig]:
    """Name, model, one prompt for each sample, and cache. KvrlError for what no sequence can show."""
    longest = args.lengths[-1]
    if args.policy == "beacon":
        raise KvrlError("--policy: beacon has no budget, which is measured here; name another of `kvrl policies`")
    chosen = "tiny:llama" if args.model == "tiny" else args.model
    given = argparse.Namespace(**{**vars(args), "model": chosen, "prompts": args.n, "max_completion_length": longest})
    subject = next(subjects(given))
    cache = cache_of(args.policy, subject, args)
    prompts = subject.prompts if args.task is None else task_prompts(args)
    if cache.is_dense:
        raise KvrlError("--policy: dense evicts nothing; name one of those that `kvrl policies` lists")
    least = cache.capacity + 2 - min(map(len, prompts))  # the first query after an eviction predicts the last token
    if longest < least:
        raise KvrlError(
            f"--lengths: {longest} at most, and budget {cache.budget} with buffer {cache.buffer} evicts nothing before "
            f"{least} tokens of some completion; raise --lengths to at least {least} or lower --budget"
        )
    limit = getattr(text_config(subject.model), "max_position_embeddings", None)
    most = max(map(len, prompts))
    if limit is not None and most + longest > limit:
        raise KvrlError(
            f"--lengths: {longest} and a prompt of {most} tokens are over the {limit} that {subject.name} was made for "
            f"(max_position_embeddings); lower --lengths to at most {limit - most}"
        )
    return chosen, subject.model, prompts, cache


def task_prompts(args: argparse.Namespace) -> list[list[int]]:
    """The task's held-out prompts in the model's own tokens."""
    if args.model.partition(":")[0] == "tiny":
        raise KvrlError(f"--task: {args.model} is random and has no tokenizer; leave --task out or give a model folder")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(args.model, "--model"))
    rows = get_task(args.task, **args.task_params).rows("eval", args.n, args.seed)
    return [encode_prompt(tokenizer, row["prompt"]) for row in rows]


def sample(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    cache: CacheConfig,
    *,
    seed: int,
    longest: int,
    on_step: Callable[[Progress], None] | None = None,
) -> list[Rollout]:
    """One rollout of exactly `longest` tokens for each prompt: an EOS is a token like any other.

    A rollout's prefix is the rollout of that length: neither log-probs nor evictions look ahead.
    """
    sampling = SamplingConfig(max_completion_length=longest, eos_token_ids=[])
    slots = min(MAX_SLOTS, len(prompts))
    return rollout(model, prompts, cache=cache, sampling=sampling, seed=seed, slots=slots, on_step=on_step)


@torch.no_grad()
def log_ratios(model: nn.Module, rollouts: Sequence[Rollout], view: View) -> Tensor:
    """log-prob of the learner in that view minus the sampler's: f64 [N, L]."""
    recorded = sampler_logprobs(rollouts).double()  # [N, L]
    out = torch.empty_like(recorded)
    for micro in micro_batches(fed_lengths(rollouts), SCORED_TOKENS):
        scored = logprobs(model, [rollouts[i] for i in micro], view=view, chunk=LOGIT_TOKENS)
        out[micro] = scored.double().cpu() - recorded[micro]
    return out


def spreads(learner: str, log_ratio: Tensor, lengths: Sequence[int]) -> list[Spread]:
    """The figures of every prefix length, from the tokens' log-ratios f64 [N, L]."""
    return [spread(learner, log_ratio[:, :length]) for length in lengths]


def spread(learner: str, log_ratio: Tensor) -> Spread:
    """The figures of one length, from the tokens' log-ratios f64 [N, length]."""
    sequence = log_ratio.sum(dim=1)  # [N]
    length, d = log_ratio.shape[1], float(torch.expm1(2 * log_ratio).mean())
    return Spread(
        learner=learner,
        length=length,
        mean=float(sequence.mean()),
        std=float(sequence.std()),
        max_abs=float(sequence.abs().max()),
        ess_share=ess_share(sequence),
        d=d,
        log10_bound=log10_bound(d, length),
    )


def ess_share(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of weights given as logs [n], in logs: e^1000 does not overflow."""
    n = len(log_weights)
    return math.exp(float(2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)) - math.log(n))


def log10_bound(d: float, length: int) -> float | None:
    """log10 of (1 + d)^length - 1; None if that is not positive."""
    if d <= 0:
        return None
    log_moment = length * math.log1p(d)
    return (log_moment + math.log(-math.expm1(-log_moment))) / math.log(10)


def title(result: dict) -> str:
    """What was measured, in one line."""
    return (
        f"{result['model']}, {result['dtype']}, {result['policy']}, budget {result['budget']} + {result['buffer']}, "
        f"{result['samples']} sequences"
    )


def table(rows: Sequence[Spread]) -> str:
    """The figures for the terminal; the bound as a power of ten."""
    out = [
        f"{'learner':13s} {'length':>6s} {'mean':>9s} {'std':>9s} {'max |.|':>9s} {'ESS':>6s} {'d':>9s} {'bound':>8s}"
    ]
    for r in rows:
        bound = "0" if r.log10_bound is None else f"10^{r.log10_bound:.1f}"
        out.append(
            f"{NAMES[r.learner]:13s} {r.length:6d} {r.mean:+9.1e} {r.std:9.1e} {r.max_abs:9.1e} {r.ess_share:6.1%} "
            f"{r.d:+9.1e} {bound:>8s}"
        )
    return "\n".join(out)
