"""Custom training loop without gateway or agent: a policy learns to look up prices in a shop.

python loop.py [STEPS]
"""

import json
import sys
from pathlib import Path

from afield.demo import shop
from afield.demo.agents.openai_agent import SYSTEM, TOOLS
from afield.factory.tuner import open_tuner
from afield.trainers.tinker import SampledReply, Sampling, Tuner

MODEL = Path(shop.__file__).parent / "policy"
SAMPLING = Sampling(temperature=1.0, max_tokens=64)
TASKS, REPLIES = 8, 16


def look_up(task: dict, reply: SampledReply) -> dict:
    """Run the tool that the policy called and return its result as a message."""
    with shop.Shop(task) as store:
        try:
            call = reply.message.tool_calls[0]
            tool = {"get_price": store.price, "get_stock": store.stock}[call.name]
            return {"role": "tool", "content": tool(json.loads(call.arguments)["item"])}
        except (IndexError, KeyError, TypeError, ValueError):
            return {"role": "tool", "content": "This call does not work."}


def step(tuner: Tuner, tasks: list[dict]) -> float:
    batch = [task for task in tasks for _ in range(REPLIES)]
    system = {"role": "system", "content": SYSTEM}
    prompts = [[system, {"role": "user", "content": task["question"]}] for task in batch]
    calls = tuner.sample_all([(prompt, None) for prompt in prompts], SAMPLING, tools=TOOLS)
    results = [([look_up(task, call)], call) for task, call in zip(batch, calls, strict=True)]
    answers = tuner.sample_all(results, SAMPLING, tools=TOOLS)
    rewards = [shop.grade(task, answer.text) for task, answer in zip(batch, answers, strict=True)]
    rows = []
    for first in range(0, len(batch), REPLIES):  # the advantage is relative to the task's mean reward
        group = slice(first, first + REPLIES)
        mean = sum(rewards[group]) / REPLIES
        rows += [a.to_row(r - mean) for a, r in zip(answers[group], rewards[group], strict=True) if r != mean]
    if rows:
        tuner.forward_backward(rows, loss="cispo", num_rollouts=len(batch))
        tuner.optim_step()
    return sum(rewards) / len(rewards)


def main(steps: int = 12) -> None:
    tasks = shop.tasks(0, steps * TASKS)
    with open_tuner(MODEL, lr=2e-3, eps=1e-4, grad_clip=0.1) as tuner:
        for n in range(steps):
            reward = step(tuner, tasks[n * TASKS : (n + 1) * TASKS])
            print(f"step {n + 1:2}  reward {reward:.3f}", flush=True)
        tuner.save_weights("weights")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
