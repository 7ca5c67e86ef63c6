"""Log-probs of rollouts under a view, in chunks: the logits of a whole sequence never exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvrl.attention.probe import check_length, prepare, rope_limit, text_config
from kvrl.attention.replay import Backend, ReplayContext
from kvrl.errors import KvrlError
from kvrl.head import Head, check_head, decoder
from kvrl.sampler.types import Rollout

View = Literal["sparse", "dense"]


@dataclass(frozen=True)
class Targets:
    """Which tokens of a batch are scored, and from which hidden state: P scored tokens in all.

    Every predictor is explicit, as a token is not always predicted by the one before it (beacons).
    """

    row: Tensor  # int64 [P], row of the batch
    predictor: Tensor  # int64 [P], position whose hidden state predicts the token
    column: Tensor  # int64 [P], index in the completion
    token: Tensor  # int64 [P]
    support: Tensor | None  # int64 [P, max kept], -1 beyond; None if nothing was cut


def completion_mask(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Tensor:
    """bool [N, max C]: the tokens that the policy sampled."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts), dtype=torch.bool)
    for i, r in enumerate(rollouts):
        out[i, : len(r.loss_mask)] = r.loss_mask
    return out.to(device)


def sampler_logprobs(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Tensor:
    """f32 [N, max C]: the log-probs that the sampler recorded, 0 beyond and at inserted tokens."""
    out = torch.zeros(len(rollouts), max(len(r.completion_ids) for r in rollouts))
    for i, r in enumerate(rollouts):
        out[i, : len(r.logprobs)] = r.logprobs
    return out.to(device)


def logprobs(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    *,
    view: View = "sparse",
    backend: Backend = "segments",
    chunk: int = 1024,
) -> Tensor:
    """Log-probs of the sampled tokens: f32 [N, max C], differentiable, 0 at padding and inserted tokens.

    view: `sparse` replays each rollout's trace, `dense` attends to the full context. All rollouts go through
    the model in one batch; chunk bounds the tokens whose logits exist at once.
    Raises KvrlError for a trace that does not fit its tokens or a model that cannot be replayed.
    """
    return Scorer(model, backend=backend, chunk=chunk)(list(rollouts), view=view)[0]


class Scorer(nn.Module):
    """The module that a trainer wraps (DDP, FSDP): trunk and chunked head inside one forward."""

    def __init__(self, model: nn.Module, *, backend: Backend = "segments", chunk: int = 1024) -> None:
        super().__init__()
        if chunk < 1:
            raise KvrlError(f"replay.logprob_chunk: {chunk} is below 1; give the tokens whose logits may exist at once")
        self.model = prepare(model)
        check_head(model)
        self.backend, self.chunk = backend, chunk

    def forward(
        self, rollouts: Sequence[Rollout], *, view: View = "sparse", entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs f32 [N, max C] and, if asked, the entropies in nats without gradient, of the same shape."""
        hidden = self.hidden_states(rollouts, view)  # [N, T, E]
        device = hidden.device
        targets = make_targets(rollouts, device)
        temperature = torch.tensor([r.temperature for r in rollouts], device=device)
        head = Head(self.model)
        logps, entropies = [], []
        for start in range(0, len(targets.token), self.chunk):
            part = slice(start, start + self.chunk)
            row = targets.row[part]
            support = None if targets.support is None else targets.support[part]
            given = (head, hidden[row, targets.predictor[part]], targets.token[part], temperature[row], support)
            # Recomputed in the backward pass, so that no chunk's logits outlive it
            grad = torch.is_grad_enabled()
            lp, ent = checkpoint(score_chunk, *given, use_reentrant=False) if grad else score_chunk(*given)
            logps.append(lp)
            entropies.append(ent)
        shape = (len(rollouts), max(len(r.completion_ids) for r in rollouts))
        index = (targets.row, targets.column)
        if not logps:  # nothing was sampled: zeros that still hang on the model's graph
            logps, entropies = [hidden.flatten()[:0].float()], [hidden.flatten()[:0].float()]
        out = hidden.new_zeros(shape, dtype=logps[0].dtype).index_put(index, torch.cat(logps))
        if not entropy:
            return out, None
        return out, out.detach().new_zeros(shape).index_put(index, torch.cat(entropies))

    def hidden_states(self, rollouts: Sequence[Rollout], view: View = "sparse") -> Tensor:
        """The trunk's last hidden states under a view, [N, T, E], right-padded."""
        if view not in get_args(View):
            raise KvrlError(f"view: {view!r} is not one of {', '.join(get_args(View))}")
        if not rollouts:
            raise KvrlError("rollouts: is empty; give at least one")
        device, config = next(self.model.parameters()).device, text_config(self.model)
        check_traces(rollouts, config)
        length = max(r.num_tokens for r in rollouts)
        check_length(rope_limit(config), length, "rollouts")
        ids = torch.zeros(len(rollouts), length, dtype=torch.long)
        for i, r in enumerate(rollouts):
            ids[i, : r.num_tokens] = torch.tensor(r.token_ids)
        traces = [r.trace for r in rollouts] if view == "sparse" else None
        context = ReplayContext(traces, length, backend=self.backend, device=device)
        positions = torch.arange(length, device=device).expand(len(rollouts), -1)
        trunk = decoder(self.model)
        return trunk(input_ids=ids.to(device), position_ids=positions, use_cache=False, kv=context).last_hidden_state


def check_traces(rollouts: Sequence[Rollout], config: Any) -> None:
    """Raise KvrlError for a trace that belongs to other tokens or to another model."""
    shape = (config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    for i, r in enumerate(rollouts):
        if r.trace.num_tokens != r.num_tokens:
            raise KvrlError(
                f"rollouts[{i}]: its trace covers {r.trace.num_tokens} tokens, the rollout has {r.num_tokens}; "
                "decisions and tokens of different samples were paired"
            )
        if tuple(r.trace.events.shape[:2]) != shape:
            raise KvrlError(
                f"rollouts[{i}]: its trace has {tuple(r.trace.events.shape[:2])} layers and KV heads, the model "
                f"{shape}; it was sampled from another model"
            )


def make_targets(rollouts: Sequence[Rollout], device: torch.device | str) -> Targets:
    """The sampled tokens of a batch, rollout by rollout."""
    rows, columns, predictors, tokens, supports = [], [], [], [], []
    for i, r in enumerate(rollouts):
        column = r.loss_mask.nonzero()[:, 0]
        rows.append(torch.full_like(column, i))
        columns.append(column)
        predictors.append(column + len(r.prompt_ids) - 1)
        tokens.append(torch.tensor(r.completion_ids)[column])
        if r.support is not None:
            offsets = r.support.offsets.tolist()
            supports += [r.support.ids[offsets[c] : offsets[c + 1]].long() for c in column.tolist()]
    support = None
    if supports:
        if any(r.support is None for r in rollouts):
            raise KvrlError("rollouts: some were sampled from a truncated distribution and some not; score them apart")
        support = nn.utils.rnn.pad_sequence(supports, batch_first=True, padding_value=-1).to(device)
    row, predictor, column, token = (torch.cat(x).to(device) for x in (rows, predictors, columns, tokens))
    return Targets(row, predictor, column, token, support)


def score_chunk(
    head: Head, hidden: Tensor, tokens: Tensor, temperature: Tensor, support: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probs [P] and entropies [P] of tokens [P] from hidden states [P, E], over the recorded support.

    support [P, max kept] holds the kept ids, -1 beyond: the learner renormalises on them, never recomputes them.
    """
    logits = head(hidden) / temperature[:, None]  # [P, V]
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    if support is not None:
        logits = logits.gather(-1, support.clamp(min=0)).masked_fill(support < 0, float("-inf"))
    logps = logits - logits.logsumexp(dim=-1, keepdim=True)
    with torch.no_grad():
        entropy = torch.special.entr(logps.exp()).sum(dim=-1)
    return chosen - logits.logsumexp(dim=-1), entropy
