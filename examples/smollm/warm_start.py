"""Warm start: a few supervised steps on the help desk's conversations, with the embedded trainer.

    python warm_start.py MODEL OUT --tasks train.jsonl

The pretrained model does not know the tool format. A script that is often wrong shows it: each of its two
decisions, which order and which field, is right with probability `--right`. OUT is a model directory with the
chat template of this folder. A step is the trainer's gradient step with an advantage of 1 for every reply.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from agent import TOOLS
from langchain_core.utils.function_calling import convert_to_openai_tool
from tasks import FIELDS, SYSTEM, Task, find_orders, get_order
from transformers import AutoTokenizer

from afield.batches.rows import Row
from afield.trainers.diagnostics import BatchDiagnostics
from afield.trainers.grpo import GRPO
from afield.trainers.losses import Objective, compute_loss, token_weights
from afield.types import Trajectory, TurnRange, VersionSpan

TEMPLATE = Path(__file__).parent / "chat_template.jinja"
Message = dict[str, Any]


def call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(task: Task, rng: random.Random, right: float) -> list[Message]:
    """A conversation in the right format, whose decisions are right with probability `right`."""
    order = next(order for order in task["orders"] if order["id"] == task["order"])
    field = task["field"]
    if rng.random() >= right:
        order = rng.choice([other for other in task["orders"] if other is not order])
    if rng.random() >= right:
        field = rng.choice([other for other in FIELDS if other != field])
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
        call("find_orders", customer=task["customer"]),
        {"role": "tool", "content": find_orders(task, task["customer"])},
        call("get_order", order_id=order["id"]),
        {"role": "tool", "content": get_order(task, order["id"])},
        {"role": "assistant", "content": f"{field}: {order[field]}"},
    ]


def to_row(tokenizer: Any, messages: list[Message], name: str) -> Row:
    """Training row of a conversation, with the token ids that the gateway would give it."""
    render = partial(
        tokenizer.apply_chat_template, tools=[convert_to_openai_tool(tool) for tool in TOOLS], tokenize=False
    )
    ids: list[int] = []
    turns: list[TurnRange] = []
    text = ""
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:n], add_generation_prompt=True)
        whole = render(messages[: n + 1])
        reply = whole[len(prompt) :].rstrip("\n")  # up to the token that ends the turn
        ids += tokenizer(prompt[len(text) :], add_special_tokens=False).input_ids
        start = len(ids)
        ids += tokenizer(reply, add_special_tokens=False).input_ids
        turns.append(TurnRange(f"{name}-{n}", start, len(ids), temperature=1.0))
        text = prompt + reply
    owned = [0] * len(ids)
    for turn in turns:
        owned[turn.start : turn.end] = [1] * (turn.end - turn.start)
    trajectory = Trajectory(
        token_ids=tuple(ids),
        loss_mask=tuple(owned),
        logprobs=(0.0,) * len(ids),
        versions=tuple(VersionSpan(turn.start, turn.end, 0, 0) for turn in turns),
        turns=tuple(turns),
        weight=1.0,
    )
    return Row(rollout_id=name, trajectory=trajectory, advantages=(1.0,) * len(turns))


def train(trainer: GRPO, rows: Sequence[Row], batch: int, seed: int) -> None:
    """One pass over the rows; the learning rate falls linearly to zero."""
    rows = random.Random(seed).sample(rows, len(rows))
    optimizer, loss = trainer.optimizer, partial(compute_loss, objective=Objective(importance="off"))
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        tokens = sum(row.owned for row in part)
        weights = partial(token_weights, aggregate="token", rollouts=len(part), tokens=tokens, length=1)
        diagnostics = BatchDiagnostics()
        optimizer.zero_grad()
        optimizer.backward(part, loss, weights, diagnostics)
        optimizer.clip_and_step(trainer.lr * (1 - start / len(rows)))
        # The sampler's log-probabilities are zeros, so the difference is the negative log-likelihood.
        nll = diagnostics.summary()["sampler_trainer_logprob_diff_mean"]
        print(f"{start + len(part)} conversations: {nll:.3f} nats per token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct; get.py makes it")
    parser.add_argument("out", type=Path, help="model directory to write")
    parser.add_argument("--tasks", type=Path, required=True, help="training tasks of tasks.py")
    parser.add_argument("--conversations", type=int, default=192, help="number of demonstrations")
    parser.add_argument("--right", type=float, default=0.5, help="share of right decisions")
    parser.add_argument("--batch", type=int, default=8, help="conversations in each step")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the first step")
    parser.add_argument("--seed", type=int, default=0, help="seed of decisions and order")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    began = time.monotonic()
    chosen.out.mkdir(parents=True, exist_ok=True)
    base = chosen.out / "base"
    shutil.copytree(chosen.model, base, dirs_exist_ok=True)
    shutil.copy(TEMPLATE, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rng = random.Random(chosen.seed)
    tasks = [json.loads(line) for line in chosen.tasks.read_text().splitlines()][: chosen.conversations]
    rows = [to_row(tokenizer, demonstration(task, rng, chosen.right), task["id"]) for task in tasks]
    trainer = GRPO(base, lr=chosen.lr)
    train(trainer, rows, chosen.batch, chosen.seed)
    trainer.export(chosen.out / "model")
    print(f"{chosen.out / 'model'} written after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
