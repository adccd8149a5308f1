"""A training loop of your own: no gateway, no agent, no run; a policy learns to look things up in a shop.

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
HOW = Sampling(temperature=1.0, max_tokens=64)
TASKS, REPLIES = 8, 16


def look_up(task: dict, reply: SampledReply) -> dict:
    """The answer of the tool that the policy called, if it did."""
    with shop.Shop(task) as opened:
        try:
            call = reply.message.tool_calls[0]
            found = {"get_price": opened.price, "get_stock": opened.stock}[call.name]
            return {"role": "tool", "content": found(json.loads(call.arguments)["item"])}
        except (IndexError, KeyError, TypeError, ValueError):
            return {"role": "tool", "content": "This call does not work."}


def step(tuner: Tuner, tasks: list[dict]) -> float:
    asked = [task for task in tasks for _ in range(REPLIES)]
    system = {"role": "system", "content": SYSTEM}
    prompts = [[system, {"role": "user", "content": task["question"]}] for task in asked]
    calls = tuner.sample_all([(prompt, None) for prompt in prompts], HOW, tools=TOOLS)
    found = [([look_up(task, call)], call) for task, call in zip(asked, calls, strict=True)]
    answers = tuner.sample_all(found, HOW, tools=TOOLS)
    rewards = [shop.grade(task, answer.text) for task, answer in zip(asked, answers, strict=True)]
    data = []
    for first in range(0, len(asked), REPLIES):  # a task's replies are compared with each other
        group = slice(first, first + REPLIES)
        mean = sum(rewards[group]) / REPLIES
        data += [a.to_row(r - mean) for a, r in zip(answers[group], rewards[group], strict=True) if r != mean]
    if data:
        tuner.forward_backward(data, loss="cispo", num_rollouts=len(asked))
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
