"""What a model with beacons answers on star_graph: the right arm, another arm of the graph, or none.

python benchmarks/star_graph_answers.py MODEL [--every 4] [--n 256]
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvrl
from kvrl.tasks import completion_text, encode_prompt, get_task


def arms_of(prompt: str) -> list[list[str]]:
    """The nodes of every arm, from the centre outwards, of `<bos> 4>7 2>4 ... / centre goal`."""
    *edges, _, centre, _ = prompt.removeprefix("<bos>").split()
    after: dict[str, list[str]] = {}
    for edge in edges:
        source, target = edge.split(">")
        after.setdefault(source, []).append(target)
    arms = [[centre, first] for first in after[centre]]
    for arm in arms:
        while arm[-1] in after:
            arm.append(after[arm[-1]][0])
    return arms


def kind(answer: list[str], prompt: str) -> str:
    """What an answer's nodes are."""
    if answer not in arms_of(prompt):
        return "no arm"
    return "right" if answer[-1] == prompt.split()[-1] else "another arm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--n", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    rows = get_task("star_graph").rows("eval", args.n, 0)
    prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]
    rollouts = kvrl.rollout(
        model, prompts, cache=kvrl.CacheConfig(policy="beacon"),
        sampling=kvrl.SamplingConfig(max_completion_length=80), every=[args.every] * len(prompts),
    )  # fmt: skip
    texts = [completion_text(tokenizer, r).removesuffix("<eos>") for r in rollouts]
    print(dict(Counter(kind(t.rpartition("=")[2].split(), row["prompt"]) for t, row in zip(texts, rows, strict=True))))


if __name__ == "__main__":
    main()
