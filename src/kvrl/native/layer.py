"""Decode steps of a Llama-shaped trunk on a CPU by compiled kernels: all of a layer but its attention in two calls."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvrl.attention.probe import ModelSpec, text_config
from kvrl.attention.seam import AttentionCall, KVContext
from kvrl.head import decoder
from kvrl.native.build import load
from kvrl.native.decode_attention import WIDTH
from kvrl.native.gemm import lanes, multiplies, pack

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of what a layer adds to its input, as norms: a kernel that computes something else is off by far more."""


def _struct(pointers: tuple[str, ...], sizes: tuple[str, ...], floats: tuple[str, ...]) -> type[ctypes.Structure]:
    fields = [*((n, ctypes.c_void_p) for n in pointers), *((n, ctypes.c_int64) for n in sizes),
              *((n, ctypes.c_float) for n in floats)]  # fmt: skip
    return type("Call", (ctypes.Structure,), {"_fields_": fields})


_Before = _struct(
    ("hidden", "norm", "weight", "bias", "q_norm", "k_norm", "cos", "sin", "normed", "q", "k", "v"),
    ("rows", "width", "query_heads", "kv_heads", "dim", "threads"), ("eps", "head_eps"),
)  # fmt: skip
_After = _struct(
    ("hidden", "attended", "out_weight", "norm", "gate_up", "down", "normed", "active"),
    ("rows", "width", "inner", "feed", "threads"), ("eps",),
)  # fmt: skip


def weight_of(linear: Any) -> Tensor:
    """The weight of a linear layer, with the adapters that are at work on it: what `_is_linear` lets through."""
    if type(linear) is nn.Linear:
        return linear.weight
    weight = linear.get_base_layer().weight
    if linear.disable_adapters:
        return weight
    return weight + sum(linear.get_delta_weight(name) for name in linear.active_adapters if name in linear.lora_A)


class PackedLayer:
    """A decoder layer's weights in the order in which the kernel reads them: copies, made anew when weights change."""

    def __init__(self, layer: Any) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        projections = [attn.q_proj, attn.k_proj, attn.v_proj]
        self.qkv = pack(torch.cat(list(map(weight_of, projections))))
        self.bias = None if attn.q_proj.bias is None else torch.cat([p.bias for p in projections]).detach()
        self.out = pack(weight_of(attn.o_proj))
        feed = mlp.gate_proj.weight.shape[0]
        turns = torch.arange(2 * feed).view(2, -1, lanes()).transpose(0, 1).flatten()  # some of the gate, some of up
        self.gate_up = pack(torch.cat([weight_of(mlp.gate_proj), weight_of(mlp.up_proj)]), turns)
        self.down = pack(weight_of(mlp.down_proj))
        self.first, self.second = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attn, "q_norm", None), getattr(attn, "k_norm", None)


class NativeTrunk:
    """What the trunk computes in a decode step, one token a row; `native_trunk` says for which models."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        library = load("layer")
        assert library is not None
        self.library, self.spec = library, spec
        self.trunk = cast(Any, decoder(model))
        self.dtype, self.vocab = next(model.parameters()).dtype, text_config(model).vocab_size
        self.bfloat16 = int(self.dtype == torch.bfloat16)
        self.feed = self.trunk.layers[0].mlp.gate_proj.weight.shape[0]
        self.layers = [PackedLayer(layer) for layer in self.trunk.layers]
        self.rows = 0

    def __call__(self, ids: Tensor, positions: Tensor, context: KVContext) -> Tensor:
        """Hidden states [S, 1, E] of one token a row: ids and positions int64 [S]."""
        hidden = self.trunk.embed_tokens(ids)  # [S, E]
        self._reserve(*hidden.shape)
        cos, sin = self.trunk.rotary_emb(hidden, positions[:, None])  # [S, 1, D]
        for i in range(len(self.layers)):
            self.layer(i, hidden, cos, sin, context)
        return self.trunk.norm(hidden[:, None])

    def layer(self, i: int, hidden: Tensor, cos: Tensor, sin: Tensor, context: KVContext) -> None:
        """Run layer i on hidden [S, E], in place."""
        packed, spec = self.layers[i], self.spec
        self._run("before", _Before, (
            hidden, packed.first.weight, packed.qkv, packed.bias, *(None if n is None else n.weight for n in
            (packed.q_norm, packed.k_norm)), cos.contiguous(), sin.contiguous(), self.normed, self.q, self.k, self.v,
        ), (*hidden.shape, spec.query_heads, spec.kv_heads, spec.head_dim), (
            packed.first.variance_epsilon, 0.0 if packed.q_norm is None else packed.q_norm.variance_epsilon,
        ))  # fmt: skip
        q, k, v = (x[:, :, None] for x in (self.q, self.k, self.v))  # [S, heads, 1, D]
        call = AttentionCall(i, q, k, v, spec.scaling, spec.windows[i], spec.softcap, None)
        attended = context.attend(call).reshape(len(hidden), -1).contiguous()  # [S, Hq * D]
        self._run("after", _After, (
            hidden, attended, packed.out, packed.second.weight, packed.gate_up, packed.down, self.normed, self.active,
        ), (*hidden.shape, attended.shape[1], self.feed), (packed.second.variance_epsilon,))  # fmt: skip

    def _run(
        self, name: str, kind: type[ctypes.Structure], tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:  # fmt: skip
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        call = kind(*pointers, *sizes, torch.get_num_threads(), *floats)
        getattr(self.library, f"kvrl_layer_{name}")(ctypes.byref(call), self.bfloat16)

    def _reserve(self, rows: int, width: int) -> None:
        """The tensors between the kernels, made once for a number of rows."""
        if rows == self.rows:
            return
        spec, self.rows = self.spec, rows
        self.normed, self.active = (torch.empty(rows, n, dtype=self.dtype) for n in (width, self.feed))
        self.q = torch.empty(rows, spec.query_heads, spec.head_dim, dtype=self.dtype)
        self.k, self.v = torch.empty(2, rows, spec.kv_heads, spec.head_dim, dtype=self.dtype)


@torch.no_grad()
def native_trunk(model: nn.Module, spec: ModelSpec) -> NativeTrunk | None:
    """The compiled decode step of a model whose layers are exactly what the kernels compute; None for others.

    Known families alone, made of plain modules (no hooks or quantised weights; LoRA's adapters in float32, where
    adding them to the weights is mere rounding); each layer is compared with its module on random tokens.
    """
    if not _fits(model, spec):
        return None
    trunk = NativeTrunk(model, spec)
    return trunk if agrees(trunk) else None


def _fits(model: nn.Module, spec: ModelSpec) -> bool:
    """Whether the modules are those of the families, of sizes that the kernels take; compiles the kernels."""
    trunk = cast(Any, decoder(model))
    config = text_config(model)
    parameter = next(trunk.parameters())
    dtype = parameter.dtype
    if config.model_type not in FAMILIES or parameter.device.type != "cpu" or dtype not in _TOLERANCE:
        return False
    if torch.is_autocast_enabled("cpu") or spec.head_dim % WIDTH:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks for m in trunk.modules()) or not _is_norm(trunk.norm):
        return False
    if any(p.dtype != dtype for p in trunk.parameters()) or not all(map(_is_plain, trunk.layers)):
        return False
    return multiplies(dtype) and load("layer") is not None


_PARTS = {  # of a layer: attention may also have q_norm and k_norm
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is made of the parts that the kernels stand for, and of nothing around them."""
    children: dict[str, dict[str, Any]] = {path: dict(layer.get_submodule(path).named_children()) for path in _PARTS}
    norms = [m for part in children.values() for name, m in part.items() if name.endswith("norm")]
    linear = [m for part in children.values() for name, m in part.items() if name.endswith("_proj")]
    without_bias = [m for name in ("self_attn", "mlp") for key, m in children[name].items()
                    if key in ("o_proj", "gate_proj", "up_proj", "down_proj")]  # fmt: skip
    return (
        all(set(part) - {"q_norm", "k_norm"} == _PARTS[path] for path, part in children.items())
        and all(map(_is_norm, norms))
        and all(_is_linear(m) and not any(n % WIDTH for n in m.weight.shape) for m in linear)
        and all(m.bias is None for m in without_bias)
        and not list(children["mlp"]["act_fn"].parameters())
    )


def _is_linear(module: Any) -> bool:
    """Whether a module is a linear layer, or one with ordinary LoRA adapters in float32, for `weight_of`."""
    if type(module) is nn.Linear:
        return True
    if not hasattr(module, "lora_A"):
        return False
    from peft.tuners.lora.layer import Linear  # which made the module, so it is imported already

    if type(module) is not Linear or type(module.get_base_layer()) is not nn.Linear or module.merged:
        return False
    exact = module.disable_adapters or module.weight.dtype == torch.float32
    return exact and not any(module.lora_bias.values()) and not module.lora_variant


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


class _Mixture:
    """A context that needs no memory: every number of q, k and v shows in what it returns."""

    def attend(self, call: AttentionCall) -> Tensor:
        group = call.q.shape[1] // call.k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (call.k, call.v))
        return v + torch.tanh(call.q) * torch.tanh(k)


def agrees(trunk: NativeTrunk) -> bool:
    """Whether every layer adds to random tokens' states what its module adds, within rounding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(trunk.vocab, (8, 1), generator=generator)
    positions = torch.arange(8)[:, None] * 5
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out[0] if type(out) is tuple else out)))
        for layer in trunk.trunk.layers
    ]
    try:
        trunk.trunk(input_ids=ids, position_ids=positions, use_cache=False, kv=_Mixture())
    finally:
        for handle in handles:
            handle.remove()
    cos, sin = trunk.trunk.rotary_emb(seen[0][0], positions)
    if cos.shape[-1] != trunk.spec.head_dim:
        return False
    for i, (before, after) in enumerate(seen):
        hidden = before[:, 0].clone()
        trunk._reserve(*hidden.shape)
        trunk.layer(i, hidden, cos, sin, _Mixture())
        error = (hidden - after[:, 0]).float().norm() / (after - before).float().norm()
        if not error <= _TOLERANCE[trunk.dtype]:
            return False
    return True
