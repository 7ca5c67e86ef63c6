"""One NVIDIA GPU, under five minutes: parity of the backends, decode speed, the learner's cost. Prints one table.

    python benchmarks/gpu.py [--model FOLDER] [--quick]

Needs kvrl, PyTorch and transformers (with Triton, for `flex`). Without --model it takes random weights in the shape of
SmolLM2-135M, which cost the same and need no download. --quick shrinks every case: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kvrl
from kvrl.attention.probe import prepare
from kvrl.attention.replay import Backend
from kvrl.bench.learner import synthetic_rollout
from kvrl.bench.machine import Machine, median_seconds, versions
from kvrl.bench.rollout import decode_speed
from kvrl.learner import Scorer, completion_mask
from kvrl.models.tiny_families import build_family

SHAPE = LlamaConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=65_536, tie_word_embeddings=True, rope_theta=100_000.0,
)  # fmt: skip
BACKENDS: tuple[Backend, ...] = ("mask", "segments", "flex")
BUDGET, BUFFER = 512, 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a model folder")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.quick:
        print("gpu.py: no CUDA device; --quick runs small cases on the CPU", file=sys.stderr)
        return 2
    print(json.dumps(versions()))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else LlamaForCausalLM(SHAPE)
    model = prepare(model.to(device, torch.bfloat16))
    machine = Machine.measure(torch.bfloat16, device)
    print(f"bandwidth {machine.bandwidth / 1e9:.0f} GB/s, matrix rate {machine.matrix_rate / 1e12:.2f} TFLOP/s, bf16")
    parity(device)
    decode(model, machine, args.quick)
    learner(model, device, args.quick)
    return 0


def backends(device: torch.device) -> tuple[Backend, ...]:
    return BACKENDS if device.type == "cuda" else ("mask", "segments")


def parity(device: torch.device) -> None:
    """|log-prob of the sampler - of the replay| on tiny models with large weights, a rollout of 200 tokens each."""
    print(f"{'parity':34s}" + "".join(f"{b + ' mean':>16s}{'max':>10s}" for b in backends(device)))
    for family in ("llama", "qwen3", "gemma2", "mistral"):
        for dtype in (torch.float32, torch.bfloat16):
            lm = copy.deepcopy(build_family(family, window=8, dtype=dtype)).to(device)
            prompt = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(0)).tolist()
            rollouts = kvrl.rollout(
                lm, [prompt] * 4, cache=kvrl.CacheConfig(policy="rkv", budget=48, buffer=16),
                sampling=kvrl.SamplingConfig(max_completion_length=160, eos_token_ids=[]),
            )  # fmt: skip
            mask, cells = completion_mask(rollouts), ""
            for backend in backends(device):
                with torch.no_grad():
                    replayed = kvrl.logprobs(lm, rollouts, backend=backend).cpu()
                gap = (replayed - kvrl.sampler_logprobs(rollouts))[mask].abs()
                cells += f"{gap.mean():16.1e}{gap.max():10.1e}"
            print(f"{family:12s}{str(dtype)[6:]:22s}{cells}", flush=True)


def decode(model: torch.nn.Module, machine: Machine, quick: bool) -> None:
    """Tokens per second, and the share of the roofline: dense and compressed, with and without captured steps."""
    cuda = next(model.parameters()).device.type == "cuda"
    widths, context, steps = ((4,), 64, 4) if quick else ((64, 256, 1024), 2048, BUFFER + 2)
    compressed = kvrl.CacheConfig(policy="rkv", budget=BUDGET, buffer=BUFFER)
    print(f"{'decode':12s}{'slots':>8s}{'graphs':>8s}{'tokens/s':>12s}{'step ms':>10s}{'roofline':>10s}{'KV GB':>8s}")
    for name, cache in (("dense", kvrl.CacheConfig(policy="dense")), ("rkv", compressed)):
        for slots in widths:
            for graphs in (False, True) if cuda else (False,):
                speed = decode_speed(
                    model, machine, cache, slots=slots, context=context, cuda_graphs=graphs,
                    steps=min(steps, 40) if name == "dense" else steps,
                )  # fmt: skip
                print(
                    f"{name:12s}{slots:8d}{str(graphs):>8s}{speed.tokens_per_second:12.0f}"
                    f"{1e3 * speed.step_seconds:10.2f}{speed.roofline_share:10.0%}{speed.kv_bytes / 1e9:8.1f}",
                    flush=True,
                )


def learner(model: torch.nn.Module, device: torch.device, quick: bool) -> None:
    """Forward and backward over one sequence with gradient checkpointing, and the most memory above the weights'."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.train()
    lengths = (700,) if quick else (16_384, 32_768)
    print(f"{'learner':12s}{'tokens':>8s}{'view':>10s}{'seconds':>10s}{'peak GB':>10s}")
    for length in lengths:
        rollout = synthetic_rollout(model, length, BUDGET, BUFFER)
        for view, backend in (("dense", "segments"), ("sparse", "segments"), ("sparse", "flex")):
            if backend not in backends(device):
                continue
            scorer = Scorer(model, backend=backend)  # type: ignore[arg-type]

            def step(scorer: Scorer = scorer, view: str = view, rollout: kvrl.Rollout = rollout) -> None:
                scorer([rollout], view=view).logps.mean().backward()  # type: ignore[arg-type]
                model.zero_grad(set_to_none=True)

            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            seconds = median_seconds(step, 3, device)
            peak = (torch.cuda.max_memory_allocated() - before) / 1e9 if device.type == "cuda" else float("nan")
            label = view if view == "dense" else backend
            print(f"{'':12s}{length:8d}{label:>10s}{seconds:10.3f}{peak:10.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
