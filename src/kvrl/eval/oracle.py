"""The oracle: a stock transformers model, token by token, with KV entries physically deleted (contract 11).

It shares no code with the rest of the package (and imports none of it): plain `DynamicCache`, `eager`
attention, plain integer tensors in. What it says is right by construction, and slow.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache


@torch.no_grad()
def oracle_logits(
    model: Any, token_ids: list[int], evicted_at: Tensor | None = None, positions: list[int] | None = None
) -> Tensor:
    """Logits of every position of one sequence, [T, V] in the model's dtype.

    model: a causal LM loaded with `attn_implementation="eager"`.
    evicted_at: int [layers, kv_heads, T], the first query position that no longer sees the entry (any value
    beyond T: it stays); None deletes nothing. Every head of a layer loses as many entries as the others.
    positions: of each token, for RoPE and for sliding windows; None: 0, 1, ...
    """
    where = torch.tensor(list(range(len(token_ids))) if positions is None else positions)
    config = model.config.get_text_config()
    assert config._attn_implementation == "eager", "the oracle wants the reference attention"
    layers = config.num_hidden_layers
    windows = layer_windows(config)
    held: list[Tensor] = [torch.empty(0)] * layers  # positions in the cache, [kv_heads, n]
    now = 0

    def see_what_is_held(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The stock mask counts cache slots; after a deletion only positions tell what a window shows."""
        position, window = held[module.layer_idx], windows[module.layer_idx]  # type: ignore[index]
        mask = None
        if window is not None:
            hidden = where[position] <= where[now] - window  # [kv_heads, n]
            group = config.num_attention_heads // len(position)
            lowest = torch.finfo(model.dtype).min
            mask = torch.zeros(position.shape, dtype=model.dtype).masked_fill(hidden, lowest)
            mask = mask.repeat_interleave(group, dim=0)[None, :, None].to(model.device)  # [1, Hq, 1, n]
        return args, {**kwargs, "attention_mask": mask}

    modules = attention_modules(model)
    handles = [m.register_forward_pre_hook(see_what_is_held, with_kwargs=True) for m in modules]
    cache, rows, training = DynamicCache(), [], model.training
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model.eval()
    try:
        for now, token in enumerate(token_ids):
            for layer in range(layers):
                if now > 0 and evicted_at is not None:
                    held[layer] = _delete(cache.layers[layer], held[layer], evicted_at[layer], now)
                new = torch.full((_kv_heads(config), 1), now)
                held[layer] = torch.cat([held[layer], new], dim=1) if now else new
            ids = torch.tensor([[token]], device=model.device)
            out = model(
                input_ids=ids, position_ids=where[now].view(1, 1).to(model.device), use_cache=True, **{keyword: cache}
            )
            rows.append(out.logits[0, -1])
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


def _delete(layer: Any, position: Tensor, evicted_at: Tensor, now: int) -> Tensor:
    """Delete from one layer's cache what the query at `now` must not see; returns the positions left."""
    alive = evicted_at.gather(1, position) > now  # [H, n]
    count = alive.sum(dim=1)
    assert bool((count == count[0]).all()), "heads of one layer must lose as many entries"
    keep = alive.nonzero()[:, 1].view(len(position), -1)  # [H, kept]
    index = keep[None, :, :, None].to(layer.keys.device)
    layer.keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.shape[-1]))
    layer.values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.shape[-1]))
    return position.gather(1, keep)


def oracle_logprobs(
    model: Any,
    token_ids: list[int],
    prompt_length: int,
    evicted_at: Tensor | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs of the tokens after the prompt under the deletions, [T - prompt_length]."""
    logits = oracle_logits(model, token_ids, evicted_at)
    return completion_logprobs(logits, token_ids, prompt_length, temperature)


def beacon_logprobs(
    model: Any,
    fed_ids: list[int],
    positions: list[int],
    evicted_at: Tensor,
    beacon: int,
    prompt_length: int,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probs of the raw tokens after the prompt, where beacons were fed between them: [raw tokens].

    A raw token is predicted by the raw token (or the prompt's last) before it, over all tokens but the beacon.
    """
    logits = oracle_logits(model, fed_ids, evicted_at, positions)
    logits[:, beacon] = -torch.inf
    raw = [i for i, token in enumerate(fed_ids) if i < prompt_length or token != beacon]
    return completion_logprobs(logits[raw], [fed_ids[i] for i in raw], prompt_length, temperature)


@torch.no_grad()
def full_forward_logprobs(model: Any, token_ids: list[int], prompt_length: int, *, temperature: float = 1.0) -> Tensor:
    """The same from one ordinary forward over the whole sequence without a cache, [T - prompt_length]."""
    training = model.training
    model.eval()
    logits = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0]
    model.train(training)
    return completion_logprobs(logits, token_ids, prompt_length, temperature)


def incremental_error(model: Any, token_ids: list[int], prompt_length: int) -> float:
    """The stock model's own max |log-prob, token by token - log-prob, all at once|: the bar of parity."""
    incremental = oracle_logprobs(model, token_ids, prompt_length)
    return (incremental - full_forward_logprobs(model, token_ids, prompt_length)).abs().max().item()


def completion_logprobs(logits: Tensor, token_ids: list[int], prompt_length: int, temperature: float = 1.0) -> Tensor:
    """Log-probs of token_ids[prompt_length:] from logits [T, V], fp32 (float64 stays).

    The softmax itself is taken in float64: the reference must not bring an error of its own.
    """
    target = torch.tensor(token_ids[prompt_length:], device=logits.device)
    logps = torch.log_softmax(logits[prompt_length - 1 : len(token_ids) - 1].double() / temperature, dim=-1)
    logps = logps.gather(1, target[:, None])[:, 0]
    return logps if logits.dtype == torch.float64 else logps.float()


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention module of every layer, in order."""
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    return sorted(found, key=lambda m: m.layer_idx)  # type: ignore[arg-type, return-value]


def layer_windows(config: Any) -> list[int | None]:
    """Every layer's sliding window as the config states it, None for full attention."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
