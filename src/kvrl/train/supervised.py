"""Steps on a task's worked solutions: the order of the examples, the learning rate and the loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from kvrl.beacons.config import beacons_of, check_without
from kvrl.errors import KvrlError
from kvrl.tasks import Task, encode_prompt
from kvrl.train.micro_batch import MAX_TOKENS, micro_batches
from kvrl.train.optimizer import optimized
from kvrl.train.section import WarmStart

Example = tuple[list[int], int]  # token ids, and how many of them are the prompt
OnStep = Callable[[int, dict[str, float]], None]
LossOf = Callable[[list[Example], list[int], int], Tensor]
"""Of some examples of a batch, with their rows in it and the step: the sum over their completions' tokens, in nats."""

# With AdamW's usual 0.999 and no warm-up the tiny model's result is chance: two seeds ended at 2% and 43%
# accuracy, against 51% and 70% so.
BETAS = (0.9, 0.95)
WARMUP_SHARE, DECAY_SHARE = 0.05, 0.4


def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    settings: WarmStart,
    seed: int,
    loss_of: LossOf,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: OnStep | None = None,
    max_tokens: int = MAX_TOKENS,
) -> dict[str, float]:
    """Train the model in place on the task's worked solutions, by `loss_of`, on average over a batch's tokens.

    max_tokens: padded tokens of one pass; a longer example goes alone.
    optimizer: any torch optimiser, so that a bfloat16 model can keep float32 masters; by default AdamW. Its
    learning rate follows `learning_rate`.
    on_step(step, {"loss", "learning_rate"}) is called after each step, counted from 1.
    Returns the first and last step's loss and the number of tokens trained on.
    """
    seed = seed if settings.seed is None else settings.seed
    wanted = settings.demonstrations or settings.steps * settings.batch_size
    examples = [encode_demonstration(tokenizer, *pair) for pair in task.demonstrations(wanted, seed)]
    if (own := beacons_of(model)) is not None:
        for i, (ids, _) in enumerate(examples):
            check_without(own.token_id, ids, f"demonstration {i}")
    if optimizer is None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=0.0)
    was_training = model.training
    model.train()
    losses: list[float] = []
    tokens = 0
    for step, batch in enumerate(_batches(examples, settings, seed), start=1):
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        count, loss = completion_tokens(batch), 0.0
        for rows in micro_batches([len(ids) for ids, _ in batch], max_tokens):
            part = loss_of([batch[row] for row in rows], rows, step) / count
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(optimized(optimizer), 1.0)  # the masters' gradients, where there are masters
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        tokens += count
        if on_step is not None:
            on_step(step, {"loss": losses[-1], "learning_rate": rate})
    model.train(was_training)
    return {"first_loss": losses[0], "last_loss": losses[-1], "tokens": float(tokens)}


def completion_tokens(examples: list[Example]) -> int:
    """Tokens that are trained on: the completions' and their EOS."""
    return sum(len(ids) - prompt for ids, prompt in examples)


def check_demonstrations(task: Task, field: str) -> None:
    """Raise KvrlError, naming the section of the configuration, for a task without worked solutions."""
    try:
        task.demonstrations(1, 0)
    except KvrlError as error:
        raise KvrlError(str(error).replace("warm_start", field)) from None


def learning_rate(settings: WarmStart, step: int) -> float:
    """Of step 1, 2, ...: up over the first 5% of the steps, level, linearly towards 0 over the last 40%."""
    up = step / (settings.steps * WARMUP_SHARE)
    down = (settings.steps - step + 1) / (settings.steps * DECAY_SHARE)
    return settings.learning_rate * min(1.0, up, down)


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, prompt, completion: str) -> Example:
    """Token ids of prompt, completion and EOS; the two parts are encoded apart, as a sampler meets them."""
    prompt_ids = encode_prompt(tokenizer, prompt)
    completion_ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    return [*prompt_ids, *completion_ids, tokenizer.eos_token_id], len(prompt_ids)


def _batches(examples: list[Example], settings: WarmStart, seed: int) -> Iterator[list[Example]]:
    """`steps` batches, passing over the examples in a new order each time."""
    rng = random.Random(f"{seed}-order")
    queue: list[Example] = []
    for _ in range(settings.steps):
        while len(queue) < settings.batch_size:
            queue += rng.sample(examples, len(examples))
        yield queue[: settings.batch_size]
        del queue[: settings.batch_size]
