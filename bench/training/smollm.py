"""GRPO on SmolLM2-135M-Instruct through the gateway: sampler and trainer agreement.

    python -m bench.training.smollm --json [--engine torch|vllm] [--model DIR] [--steps N] [--rollouts N]
        [--out FILE]

The model runs behind `afield gateway` with the embedded engine or vLLM, in bfloat16 on a GPU and float32 on
a CPU.
Each step collects rollouts of three turns of a plain-text agent, makes a GRPO step and publishes the weights.
It reports the mean difference of sampler's and trainer's log-probabilities, and the control: the difference
between that dtype and float32 with the weights that sampled.

Progress goes to standard error; the last line is JSON. The exit code is 0 when every step differs by at most
1.5 times the control or, in float32, by at most 1e-4 for any token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch

from afield.gateway.client import HttpGateway
from afield.interfaces.gateway import SessionRecord, SessionSpec
from afield.trainers.grpo import GRPO
from afield.types import Group, Outcome, Policy, Rollout, RolloutResult, Sampling, Split, Task
from bench import ROOT

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "models"
MODEL = HOME / "smollm2-135m-instruct"
CALLS, TIMES, EXACT, START_S = 3, 1.5, 1e-4, 300.0
ITEMS = ("mug", "lamp", "chair", "table", "book", "clock", "plate", "spoon", "shirt", "hat", "rope", "bell")
SYSTEM = (
    "You work in a shop. To find out how many there are of something, answer only with LOOKUP and its name,"
    " such as LOOKUP pen. When you know, answer with the number."
)


def say(*words: object) -> None:
    print(f"[{time.strftime('%H:%M:%S')}]", *words, file=sys.stderr, flush=True)


# --- the agent ------------------------------------------------------------------------------------


def question(item: str) -> dict[str, str]:
    return {"role": "user", "content": f"How many {item}s are there?"}


def solved_example(item: str, count: int) -> list[dict[str, str]]:
    """A model this small calls a tool only after it has seen it done."""
    return [
        question(item),
        {"role": "assistant", "content": f"LOOKUP {item}"},
        {"role": "user", "content": f"RESULT: {count} in stock. How many {item}s are there?"},
        {"role": "assistant", "content": str(count)},
    ]


class Shop(NamedTuple):
    item: str
    count: int

    def messages(self) -> list[dict[str, str]]:
        system = {"role": "system", "content": SYSTEM}
        return [system, *solved_example("pen", 5), *solved_example("cup", 12), question(self.item)]


async def visit(http: aiohttp.ClientSession, url: str, key: str, shop: Shop) -> float:
    """What the model looks up is looked up, and comes back as the next message; the reward at the end."""
    messages, replies = shop.messages(), list[str]()
    for _ in range(CALLS):
        async with http.post(
            f"{url}/chat/completions",
            json={"model": "m", "messages": messages},
            headers={"authorization": f"Bearer {key}"},
        ) as response:
            reply = await response.json()
        if response.status != 200:
            raise SystemExit(f"the gateway answers {response.status}: {reply}")
        replies.append(reply["choices"][0]["message"]["content"] or "")
        called = re.match(r"LOOKUP (\w+)", replies[-1])
        there = called is not None and called[1].lower().startswith(shop.item)
        result = f"{shop.count} in stock" if there else "nothing of that name"
        messages += [
            {"role": "assistant", "content": replies[-1]},
            {"role": "user", "content": f"RESULT: {result}. How many {shop.item}s are there?"},
        ]
    right = sum(words.strip().rstrip(".") == str(shop.count) for words in replies)
    return right / CALLS + 1 / (10 + sum(map(len, replies)))


class Collector:
    def __init__(self, gateway: HttpGateway, http: aiohttp.ClientSession, sampling: Sampling) -> None:
        self._gateway, self._http, self._sampling = gateway, http, sampling

    async def rollout(self, name: str, shop: Shop) -> tuple[float, SessionRecord]:
        ticket = await self._gateway.open(SessionSpec(id=f"{name}.1", sampling=self._sampling))
        reward = await visit(self._http, ticket.openai_base_url, ticket.api_key, shop)
        return reward, await self._gateway.finalize(f"{name}.1")

    async def group(self, name: str, shop: Shop, size: int) -> Group:
        names = [f"{name}-{n}" for n in range(size)]
        ended = await asyncio.gather(*(self.rollout(one, shop) for one in names))
        finished = [
            RolloutResult(
                rollout=Rollout(id=one, exp_id="smollm", group_id=name, task=Task(shop.item, {})),
                outcome=Outcome(rollout_id=one, attempt=1, reward=reward + n / 1000),
                trajectories=record.trajectories,
                turns=record.turns,
            )
            for n, (one, (reward, record)) in enumerate(zip(names, ended, strict=True))
        ]
        return Group(id=name, task_id=shop.item, epoch=0, split=Split.TRAIN, finished=tuple(finished))


# --- the gateway ----------------------------------------------------------------------------------


@asynccontextmanager
async def gateway(
    model: Path, engine: str, slots: int, dtype: str, scratch: Path
) -> AsyncIterator[HttpGateway]:
    """`afield gateway`, as a user starts it; a refused model ends the program with its words."""
    command = [sys.executable, "-m", "afield", "gateway", "--json", "--exit-with-parent", "--port", "0"]
    command += ["--model", str(model), "--store", str(scratch / "store")]
    if engine == "torch":
        command += ["--slots", str(slots), "--engine-dtype", dtype]
    else:  # the trainer shares its GPU
        command += ["--engine", engine, "--vllm-memory", "0.4", "--vllm-args=--enforce-eager"]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    with (scratch / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            text = await asyncio.to_thread((scratch / "gateway.log").read_text, errors="replace")
            raise SystemExit(f"the gateway did not start:\n{text[-4000:]}")
        started = json.loads(line)
        async with HttpGateway(
            started["local_url"], started["admin_key"], unavailable_timeout_s=60.0
        ) as client:
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        text = await asyncio.to_thread((scratch / "gateway.log").read_text, errors="replace")
        for line in text.splitlines()[-5:]:
            say("gateway:", line)


# --- the program ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON (always so)")
    parser.add_argument("--model", type=Path, default=MODEL, help="model directory (default: SmolLM2)")
    parser.add_argument("--steps", type=int, default=6 if cuda else 2)
    parser.add_argument("--rollouts", type=int, default=256 if cuda else 4, help="in each step")
    parser.add_argument("--group", type=int, default=16 if cuda else 4, help="rollouts of one task")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--engine", default="torch", help="torch (embedded), vllm, or vllm=URL")
    parser.add_argument("--engine-dtype", default="auto", help="of the embedded engine")
    parser.add_argument("--rounding", default="stochastic", choices=("stochastic", "nearest"))
    parser.add_argument("--out", type=Path, help="write the result here, too, after every step")
    return parser.parse_args()


def result(chosen: argparse.Namespace, dtype: str, steps: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "accepted": True,
        "engine": chosen.engine.partition("=")[0],
        "engine_dtype": dtype,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "rounding": chosen.rounding,
        "rollouts": chosen.rollouts,
        "turns": CALLS,
        "logprob_diff": max(step["logprob_diff"] for step in steps),
        "logprob_diff_max": max(step["logprob_diff_max"] for step in steps),
        "control": max(step["control"] for step in steps),
        "times_control": max(step["times_control"] for step in steps),
        "update_kept": min(step["update_kept"] for step in steps),
        "steps": steps,
    }


def met(outcome: dict[str, Any]) -> bool:
    if outcome["engine_dtype"] == "float32":
        return outcome["logprob_diff_max"] <= EXACT
    return outcome["times_control"] <= TIMES


async def run(chosen: argparse.Namespace, scratch: Path) -> int:
    if not chosen.model.is_dir():
        raise SystemExit(f"{chosen.model} is not there; make it with examples/smollm/get.py, or give --model")
    limit = aiohttp.ClientTimeout(total=600)
    async with (
        gateway(
            chosen.model, chosen.engine, min(chosen.rollouts, 256), chosen.engine_dtype, scratch
        ) as client,
        aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        dtype = await client.engine_dtype()
        say(f"the model is accepted; the engine serves it in {dtype}")
        trainer = await asyncio.to_thread(GRPO, chosen.model, lr=chosen.lr, rounding=chosen.rounding)
        await asyncio.to_thread(trainer.publish, scratch / "v0", version=0, dtype=dtype)
        collector = Collector(client, http, Sampling(max_tokens=24, temperature=0.7))
        steps: list[dict[str, float]] = []
        for step in range(1, chosen.steps + 1):
            steps.append(await one_step(chosen, step, client, collector, trainer, scratch, dtype))
            if chosen.out:
                chosen.out.write_text(json.dumps(result(chosen, dtype, steps)) + "\n")
    outcome = result(chosen, dtype, steps)
    print(json.dumps(outcome), flush=True)
    return 0 if met(outcome) else 1


def control_of(published: Path, trainer: GRPO, groups: list[Group], dtype: str) -> float | None:
    sampler = GRPO(published, lr=0.0, device=str(trainer.device))
    return sampler.optimizer.control_logprob_diff(trainer.batch(groups).rows, getattr(torch, dtype)) or None


async def one_step(
    chosen: argparse.Namespace,
    step: int,
    client: HttpGateway,
    collector: Collector,
    trainer: GRPO,
    scratch: Path,
    dtype: str,
) -> dict[str, float]:
    wild = random.Random(step)
    began = time.monotonic()
    shops = [
        Shop(wild.choice(ITEMS), wild.randint(2, 99)) for _ in range(max(1, chosen.rollouts // chosen.group))
    ]
    groups = await asyncio.gather(
        *(collector.group(f"s{step}g{n}", shop, chosen.group) for n, shop in enumerate(shops))
    )
    collected = time.monotonic()
    control = await asyncio.to_thread(control_of, scratch / f"v{step - 1}", trainer, groups, dtype)
    report = await asyncio.to_thread(trainer.step, groups)
    trained = time.monotonic()
    directory = scratch / f"v{step}"
    publication = await asyncio.to_thread(trainer.publish, directory, version=step, dtype=dtype)
    await client.publish(Policy(chosen.model.name, step), str(directory))
    seen = report.metrics
    rewards = [f.outcome.reward or 0.0 for group in groups for f in group.finished]
    line = {
        "step": float(step),
        "reward": round(sum(rewards) / len(rewards), 4),
        "tokens": float(report.tokens),
        "logprob_diff": seen["logprob_diff"],
        "logprob_diff_max": seen["sampler_trainer_logprob_diff_max"],
        "control": control or seen["logprob_diff_control"],
        "times_control": seen["logprob_diff"] / (control or seen["logprob_diff_control"]),
        "control_in_the_step": seen["logprob_diff_control"],
        "importance_truncated_share": seen["importance_truncated_share"],
        "update_kept": publication["update_kept"],
        "rounding_noise_norm": publication["rounding_noise_norm"],
        "collect_s": round(collected - began, 1),
        "train_s": round(trained - collected, 1),
        "publish_s": round(time.monotonic() - trained, 1),
    }
    say(" ".join(f"{name}={value:.4g}" for name, value in line.items()))
    return line


def main() -> int:
    chosen = arguments()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="afield-smollm-") as scratch:
        return asyncio.run(run(chosen, Path(scratch)))


if __name__ == "__main__":
    sys.exit(main())
