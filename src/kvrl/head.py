"""The language-model head in fp32, equal to `model(...).logits` for every family, without the whole logits."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvrl.attention.probe import causal_lm, text_config
from kvrl.errors import KvrlError
from kvrl.native.head import PackedHead, packable


def decoder(model: nn.Module) -> nn.Module:
    """The trunk, which returns hidden states."""
    return causal_lm(model).base_model


class Head:
    """fp32 logits of hidden states: the head's modules (adapters included), its scale and its soft-cap.

    The weights are read when called, so that gradients reach them; `frozen()` reads them once for sampling.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module = causal_lm(model).get_output_embeddings()
        config = text_config(model)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        self._weights: dict[str, Tensor] | None = None
        self._packed: PackedHead | None = None

    def frozen(self, *, native: bool = False) -> Head:
        """A head that casts its weights to fp32 once, without gradient.

        native: packs bfloat16 weights for the compiled CPU kernel, where there is one for them.
        """
        with torch.no_grad():
            if native and packable(self.module):
                self._packed = PackedHead(cast(Tensor, self.module.weight))
            else:
                self._weights = self._cast()
        return self

    def _cast(self) -> dict[str, Tensor]:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {
            name: t.float() if t.is_floating_point() and t.dtype != torch.float64 else t for name, t in tensors.items()
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> fp32 logits [..., V] (float64 stays)."""
        if self._packed is not None:
            return self.finish(self._packed(hidden))
        hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
        weights = self._weights if self._weights is not None else self._cast()
        return self.finish(functional_call(self.module, weights, (hidden,)))

    def finish(self, logits: Tensor) -> Tensor:
        """What the family does to the product: Cohere multiplies, Granite divides, Gemma soft-caps."""
        logits = logits * self.scale / self.divisor if self.scale != 1.0 or self.divisor != 1.0 else logits
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def restrict(logits: Tensor, support: Tensor | None) -> Tensor:
    """Logits [P, V] of the ids that a truncated distribution kept, [P, max kept]; all of them without `support`.

    support [P, max kept] holds the kept ids, -1 beyond: the learner renormalises on them, never recomputes them.
    """
    if support is None:
        return logits
    return logits.gather(-1, support.clamp(min=0)).masked_fill(support < 0, float("-inf"))


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise KvrlError unless `Head.finish` is what the model does to its head's output.

    The stock forward runs on one token with the product replaced by known numbers up to +-100, where an
    ignored soft-cap or scale cannot hide.
    """
    head, seen = Head(model), []

    def replace(module: nn.Module, args: Any, product: Tensor) -> Tensor:
        known = torch.linspace(-100.0, 100.0, product.shape[-1], device=product.device)
        seen.append(known.expand(product.shape))
        return seen[-1].to(product.dtype)

    device = next(model.parameters()).device
    handle = head.module.register_forward_hook(replace)
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    expected = head.finish(seen[0].to(logits.dtype)) if seen else logits
    if len(seen) != 1 or not torch.allclose(logits, expected, rtol=2e-2 if logits.dtype == torch.bfloat16 else 1e-5):
        raise KvrlError(
            f"model: {text_config(model).model_type} changes its logits after the head in a way that kvrl does not "
            "know; its log-probs would be wrong, so it is refused (kvrl/head.py lists the known ways)"
        )
