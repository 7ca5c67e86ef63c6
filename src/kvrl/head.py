"""The language-model head in fp32, equal to `model(...).logits` for every family, without the whole logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvrl.attention.probe import causal_lm, text_config
from kvrl.beacons.config import beacons_of
from kvrl.errors import KvrlError
from kvrl.native.head import PackedHead, packable

CHECKED = 8  # tokens of `check_head`
TRIES = 8  # looks for noise in a model that draws random numbers in training mode


def decoder(model: nn.Module) -> nn.Module:
    """The trunk, which returns hidden states."""
    return causal_lm(model).base_model


class Head:
    """fp32 logits of hidden states: the head's modules (adapters included), its scale and its soft-cap.

    The weights are read when called, so that gradients reach them; `frozen()` reads them once for sampling.
    A model's beacon has the logit -inf: it is fed, never drawn, and takes no probability.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module = causal_lm(model).get_output_embeddings()
        config = text_config(model)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)
        self.divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        beacons = beacons_of(model)
        self.banned = None if beacons is None else beacons.token_id
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
        """hidden [..., E] -> fp32 logits [..., V] (float64 stays), under autocast too."""
        if self._packed is not None and hidden.dtype == torch.bfloat16:
            return self.without_beacon(self.finish(self._packed(hidden)))
        hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
        weights = self._weights if self._weights is not None else self._cast()
        with torch.autocast(hidden.device.type, enabled=False):
            return self.without_beacon(self.finish(functional_call(self.module, weights, (hidden,))))

    def without_beacon(self, logits: Tensor) -> Tensor:
        """The same logits, in place, with the beacon's at -inf."""
        if self.banned is not None:
            logits[..., self.banned] = -torch.inf
        return logits

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


class _Stock(NamedTuple):
    """What the model's own forward did at its head."""

    hidden: Tensor
    product: Tensor
    known: Tensor
    """What took the product's place."""
    logits: Tensor


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise KvrlError unless the trunk's hidden states under `Head` are what the model computes, in every mode.

    The stock forward runs on a few tokens: the trunk alone must give the head's input to the bit (no layer between
    them, nothing that a wrapper adds), and training mode what evaluation mode gives (no noise). The head's product is
    replaced by known numbers up to +-100, where an ignored soft-cap or scale cannot hide.
    """
    head, kind = Head(model), text_config(model).model_type
    ids = torch.arange(CHECKED)[None] % text_config(model).vocab_size
    ids = ids.to(next(model.parameters()).device)
    with _as_found(model), torch.compiler.set_stance("force_eager"):
        model.eval()
        stock = _stock(model, head.module, ids, kind)
        inside = decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
        if not _same(inside, stock.hidden):
            raise KvrlError(_what_differs(model, head.module, ids, inside, kind))
        for _ in range(TRIES):
            before = _random_state(ids.device)
            model.train()
            if not _same(_stock(model, head.module, ids, kind).product, stock.product):
                raise KvrlError(
                    f"model: {_first_noise(model, ids)} gives other values in training mode than in evaluation mode; "
                    "the sampler runs in evaluation mode: take out its dropout or other noise"
                )
            if torch.equal(before, _random_state(ids.device)):
                break  # no random number was drawn: one look is enough
    expected = head.finish(stock.known.to(stock.logits.dtype))
    if not torch.allclose(stock.logits, expected, rtol=2e-2 if stock.logits.dtype == torch.bfloat16 else 1e-5):
        raise KvrlError(_unknown_logits(kind))


def _stock(model: nn.Module, head: nn.Module, ids: Tensor, kind: str) -> _Stock:
    """The model's own forward with the head's product replaced. Raises KvrlError if the head is not called once."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def replace(module: nn.Module, args: Any, product: Tensor) -> Tensor:
        known = torch.linspace(-100.0, 100.0, product.shape[-1], device=product.device).expand(product.shape)
        seen.append((args[0], product, known))
        return known.to(product.dtype)

    handle = head.register_forward_hook(replace)
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(seen) != 1:
        raise KvrlError(_unknown_logits(kind))
    return _Stock(*seen[0], logits)


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit; what is not a number (broken weights, found while sampling) is the same as itself."""
    return a.shape == b.shape and torch.allclose(a.to(b), b, rtol=0.0, atol=0.0, equal_nan=True)


def _unknown_logits(kind: str) -> str:
    return (
        f"model: {kind} changes its logits after the head in a way that kvrl does not know; its log-probs would be "
        "wrong, so it is refused (kvrl/head.py lists the known ways)"
    )


def _what_differs(model: nn.Module, head: nn.Module, ids: Tensor, inside: Tensor, kind: str) -> str:
    """The reason why the head's input is not the trunk's output: the wrapper's doing, or the model's."""
    lm = causal_lm(model)
    if lm is not model:
        alone = _stock(lm, head, ids, kind).hidden
        if _same(inside, alone):
            return (
                f"model: {type(model).__name__} acts outside the {kind} model that it wraps, where kvrl does not run; "
                "use adapters of the model's own layers, such as LoRA"
            )
    return (
        f"model: {kind} changes the trunk's hidden states before its head, which kvrl does not do; its log-probs would "
        "be wrong, so it is refused: use a model whose head is one product (docs/models.md)"
    )


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[None]:
    """Inside, adapters that start at zero act; after, modes, weights and the global random state are as before."""
    modes = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    # By .data: autograd need not know, as each is back before anyone differentiates
    zeros = [p.data for p in model.parameters() if hasattr(model, "peft_config") and p.requires_grad and not p.any()]
    try:
        for p in zeros:
            p.fill_(0.01)
        with torch.random.fork_rng(devices):
            yield
    finally:
        for p in zeros:
            p.zero_()
        for module, training in modes.items():
            module.training = training


def _random_state(device: torch.device) -> Tensor:
    """The states of the random generators that a forward on the device may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _first_noise(model: nn.Module, ids: Tensor) -> str:
    """The innermost module whose output differs first between the modes, by name; the model's if chance hides it."""

    def outputs() -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def keep(name: str, module: nn.Module, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor):
                seen[name] = first

        handles = [m.register_forward_hook(partial(keep, name)) for name, m in model.named_modules() if name]
        try:
            model(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    model.eval()
    quiet = outputs()
    for _ in range(TRIES):
        model.train()
        for name, out in outputs().items():
            if not _same(out, quiet[name]):
                return name
    return type(model).__name__
