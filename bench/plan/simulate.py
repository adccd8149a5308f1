"""Forecast of a training loop against a real one on this machine's CPU, from costs measured before.

    python bench/plan/simulate.py [--measure] [--costs FILE] [--modes sync,async] [--steps N] [--json]

1. `--measure` measures parts alone and writes their costs to FILE: decoding at several numbers of sequences
   and lengths, prefill, training steps of two sizes with their checkpoints, calls through a gateway, launches
   of agents, publication. It takes about half a minute. `afield plan --simulate --costs FILE` reads it, too.
2. Then a short run of `afield train` with the embedded engine and agents with fixed times between calls is
   compared with its forecast. The model is random and never ends a reply early.

The last line with `--json` is JSON; the exit code is 1 if a step differs by more than 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[2]),
        str(Path(__file__).resolve().parents[2] / "tests"),
    ]

import aiohttp
import msgspec
import numpy as np

from afield.planning.architecture import Architecture, read_architecture
from afield.planning.costs import (
    Constant,
    EngineCosts,
    LoopCosts,
    engine_times,
    forward_flops,
    gateway_times,
    publish_s,
    read_costs,
    train_flops,
    train_token_s,
)
from afield.planning.memory import kv_token_bytes
from afield.planning.simulation import AgentLoad, LoopForecast, LoopTimes, Spread, simulate
from afield.settings.train import STALENESS
from bench import ROOT, report
from bench.gpu.loop import tree_cpu

TOLERANCE = 0.15
"""Largest accepted difference of a step's seconds from their forecast."""
TURNS, REPLY, QUESTION, RESULT, TOOL_S = 3, 48, 120, 60, 0.5
TASKS, ROLLOUTS, CONCURRENCY = 4, 4, 16
START_S = 120.0
PREFILL = "embedded engine, prompts of 32 to 2048 tokens"
WORKERS = 2


def constant(value: float, source: str) -> Constant:
    return Constant(value=float(f"{max(0.0, value):.5g}"), basis="measured", source=f"this machine: {source}")


def text(length: int) -> str:
    """Text of about this many tokens of the model's byte-level tokenizer."""
    return " ".join(f"{n * 104729 % 99991:05d}" for n in range(length // 6 + 1))[:length]


# --- parts measured alone --------------------------------------------------------------------------


class DecodePoint(NamedTuple):
    """Seconds of calls that run at once."""

    sequences: int
    prompt: int
    tokens: int
    seconds: float


async def measure_engine(model: Path, architecture: Architecture) -> EngineCosts:
    from afield.engines.torch.engine import TorchEngine
    from afield.interfaces.engine import GenerateRequest
    from afield.types import Sampling

    rng, numbers = random.Random(0), iter(range(10_000))
    vocabulary = architecture.vocabulary - 10

    async with TorchEngine(model, max_slots=CONCURRENCY) as engine:

        async def call(prompt: int, tokens: int) -> None:
            number = next(numbers)
            request = GenerateRequest(
                id=f"c{number}", session_id=f"s{number}", sampling=Sampling(), max_tokens=tokens, stop_ids=(),
                prompt_ids=tuple(rng.randrange(10, vocabulary) for _ in range(prompt)),
            )  # fmt: skip
            async for _ in engine.generate(request):
                pass

        async def timed(sequences: int, prompt: int, tokens: int) -> DecodePoint:
            seconds: list[float] = []
            for _ in range(3):
                began = time.perf_counter()
                await asyncio.gather(*(call(prompt, tokens) for _ in range(sequences)))
                seconds.append(time.perf_counter() - began)
            return DecodePoint(sequences, prompt, tokens, min(seconds))

        await timed(4, 64, 8)
        prefills = [await timed(n, length, 1) for n, length in ((1, 32), (1, 512), (8, 128), (16, 128))]
        decodes = [await timed(n, length, 65) for n, length in ((1, 64), (4, 64), (16, 64), (16, 400))]
    base_s, prompt_s = fit([[1.0, p.sequences * p.prompt] for p in prefills], [p.seconds for p in prefills])
    prefill_s, prefill_token_s = max(0.0, base_s), max(1e-9, prompt_s)

    def steps_s(point: DecodePoint) -> float:
        return (point.seconds - prefill_s - prefill_token_s * point.sequences * point.prompt) / (
            point.tokens - 1
        )

    step_s, sequence_s, kv_s = fit(
        [[1.0, p.sequences, p.sequences * (p.prompt + p.tokens / 2)] for p in decodes],
        [steps_s(p) for p in decodes],
    )
    reading = kv_token_bytes(architecture, "float32") / max(kv_s, 1e-10)
    bytes_ = (architecture.decoder + architecture.embedding) * 4
    return EngineCosts(
        step_s=constant(step_s - bytes_ / reading, "embedded engine, 1 to 16 sequences"),
        sequence_s=constant(sequence_s, "embedded engine, 1 to 16 sequences"),
        bytes_per_s=constant(reading, "embedded engine, 16 sequences of 64 and of 400 tokens"),
        prefill_s=constant(prefill_s, PREFILL),
        prefill_flops_per_s=constant(
            forward_flops(architecture, 128) / prefill_token_s,
            PREFILL,
        ),
        prefill_tokens=2048,
        own_gateway=True,
    )


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors, without negative coefficients."""
    from scipy.optimize import nnls

    weights = 1 / np.array(seconds)
    return nnls(np.array(rows) * weights[:, None], np.ones(len(seconds)))[0].tolist()


class TrainerPoint(NamedTuple):
    """Seconds of a step with export and checkpoint."""

    tokens: int
    seconds: float


def measure_trainer(model: Path, scratch: Path) -> tuple[list[TrainerPoint], Path]:
    """Two sizes of a step, and exported weights."""
    from afield.trainers.grpo import GRPO
    from afield.types import Trajectory, TurnRange, VersionSpan
    from support.training_groups import finished, group

    trainer = GRPO(model, lr=1e-6)
    rng = random.Random(0)

    def row(length: int) -> Trajectory:
        start = length // 2
        mask = tuple(int(place >= start) for place in range(length))
        return Trajectory(
            token_ids=tuple(rng.randrange(10, 1000) for _ in range(length)),
            loss_mask=mask,
            logprobs=tuple(-7.0 * own for own in mask),
            versions=(VersionSpan(start, length, 0, 0),),
            turns=(TurnRange("t", start, length, 1.0),),
            weight=1.0,
        )

    points: list[TrainerPoint] = []
    for number, (rollouts, length) in enumerate(((8, 128), (8, 128), (32, 256))):
        groups = [
            group(
                *(finished(f"r{n}", float(n % 2), (row(length),), f"g{g}") for n in range(ROLLOUTS)),
                name=f"g{g}",
            )
            for g in range(rollouts // ROLLOUTS)
        ]
        began = time.perf_counter()
        trainer.step(groups)
        trainer.publish(scratch / f"weights-{number}", version=number + 1, dtype="float32")
        (scratch / f"checkpoint-{number}").mkdir()
        trainer.save(scratch / f"checkpoint-{number}")
        points.append(TrainerPoint(rollouts * length, time.perf_counter() - began))
    return points[1:], scratch / "weights-2"


class GatewayPoint(NamedTuple):
    """Costs of calls, publications and launches through a gateway."""

    call_cpu_s: float
    call_s: float
    token_s: float
    publish_s: float
    launch_s: float
    launch_work_s: float


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


async def measure_gateway(model: Path, weights: Path, scratch: Path) -> GatewayPoint:
    command = [sys.executable, "-m", "afield", "gateway", "--json", "--exit-with-parent", "--port", "0"]
    command += ["--model", str(model), "--store", str(scratch / "store"), "--slots", str(CONCURRENCY)]
    with (scratch / "gateway.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment()
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            raise SystemExit((scratch / "gateway.log").read_text(errors="replace")[-3000:])
        started = json.loads(line)
        async with aiohttp.ClientSession() as http:
            whole = await timed_calls(http, started, process.pid, tokens=1, stream=False)
            long = await timed_calls(http, started, process.pid, tokens=REPLY, stream=False)
            streamed = await timed_calls(http, started, process.pid, tokens=REPLY, stream=True)
            admin = {"authorization": f"Bearer {started['admin_key']}"}
            began = time.perf_counter()
            body = {"version": 1, "path": str(weights)}
            async with http.post(f"{started['local_url']}/policy", json=body, headers=admin) as response:
                assert response.status == 200, await response.text()
            published = time.perf_counter() - began
        launch = await asyncio.to_thread(measure_launches, started, scratch)
    finally:
        process.terminate()
        await process.wait()
    return GatewayPoint(whole[0], whole[1], max(0.0, streamed[0] - long[0]) / REPLY, published, *launch)


async def timed_calls(
    http: aiohttp.ClientSession, gateway: dict[str, Any], pid: int, *, tokens: int, stream: bool
) -> tuple[float, float]:
    """Mean CPU seconds of the gateway and mean seconds of sequential calls."""
    calls = 120
    admin = {"authorization": f"Bearer {gateway['admin_key']}"}
    sessions: list[dict[str, Any]] = []
    for _ in range(calls + 4):
        async with http.post(f"{gateway['local_url']}/sessions", json={}, headers=admin) as response:
            sessions.append(await response.json())
    cpu = began = 0.0
    for number, session in enumerate(sessions):
        if number == 4:
            cpu, began = gateway_cpu_s(pid), time.perf_counter()
        content = f"{number} {text(QUESTION)}"
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
        headers = {"authorization": f"Bearer {session['api_key']}"}
        url = f"{session['openai_base_url']}/chat/completions"
        async with http.post(url, json=body | {"stream": stream}, headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
    return (gateway_cpu_s(pid) - cpu) / calls, (time.perf_counter() - began) / calls


def gateway_cpu_s(pid: int) -> float:
    """CPU seconds of the gateway, without the process of its engine."""
    return sum(seconds for name, seconds in tree_cpu(pid).items() if "torch.worker" not in name)


def measure_launches(gateway: dict[str, Any], scratch: Path) -> tuple[float, float]:
    """Seconds of a rollout without calls when it is alone, and per rollout when many begin at once."""
    from afield import RolloutClient

    with RolloutClient.open(
        agent=f"{ROOT / 'bench' / 'plan' / 'paced_agent.py'}:agent", gateway=gateway["local_url"],
        admin_key=gateway["admin_key"], directory=scratch / "launches", workers=WORKERS,
        concurrency=CONCURRENCY,
    ) as client:  # fmt: skip
        task = {"turns": 0}
        client.submit(task).result(START_S)
        began = time.perf_counter()
        for _ in range(5):
            client.submit(task).result(START_S)
        alone = (time.perf_counter() - began) / 5
        began = time.perf_counter()
        for future in [client.submit(task) for _ in range(CONCURRENCY)]:
            future.result(START_S)
        together = time.perf_counter() - began
    return alone, max(0.0, together - alone) / (CONCURRENCY - 1)


async def measure(model: Path, scratch: Path) -> LoopCosts:
    architecture = read_architecture(model)
    engine = await measure_engine(model, architecture)
    (small, large), weights = await asyncio.to_thread(measure_trainer, model, scratch)
    gateway = await measure_gateway(model, weights, scratch)
    token_s = (large.seconds - small.seconds) / (large.tokens - small.tokens)
    reading = engine.bytes_per_s.value
    prompt_flops = forward_flops(architecture, QUESTION / 2) * QUESTION
    in_engine = max(
        engine.prefill_s.value + prompt_flops / engine.prefill_flops_per_s.value,
        engine.step_s.value + (architecture.decoder + architecture.embedding) * 4 / reading,
    )
    steps = f"steps of {small.tokens} and {large.tokens} tokens with export and checkpoint"
    return LoopCosts(
        machine=f"CPU, {os.cpu_count()} cores",
        dtype="float32",
        engines={"torch": engine},
        train_s=constant(small.seconds - token_s * small.tokens, steps),
        train_flops_per_s=constant(train_flops(architecture, 64, 0.5) / max(token_s, 1e-9), steps),
        publish_s=constant(0.0, "in publish_bytes_per_s"),
        publish_bytes_per_s=constant(architecture.parameters * 4 / gateway.publish_s, "one publication"),
        gateway_call_s=constant(
            gateway.call_cpu_s, f"calls of {QUESTION} characters one after the other, CPU"
        ),
        gateway_history_s=constant(0.0, "in gateway_call_s"),
        gateway_token_s=constant(gateway.token_s, f"streams of {REPLY} tokens against whole replies, CPU"),
        gateway_delay_s=constant(
            gateway.call_s - in_engine - gateway.call_cpu_s, "calls one after the other, wall time"
        ),
        launch_s=constant(gateway.launch_s, "a rollout without calls; includes its end"),
        launch_work_s=constant(gateway.launch_work_s, f"{CONCURRENCY} rollouts without calls at once"),
        finish_s=constant(0.0, "in launch_s"),
        poll_s=Constant(
            value=0.125, basis="derived", source="half of the longest pause in orchestrator/state.py"
        ),
        unmeasured=["what agents, trainer and engine take from each other on the same cores"],
    )


# --- a real run -------------------------------------------------------------------------------------


def forecast(
    costs: LoopCosts, architecture: Architecture, mode: Any, steps: int, prompts: list[int]
) -> LoopForecast:
    """Forecast of the run; `prompts` are the tokens that each turn adds."""
    first, added = prompts[0], sum(prompts[1:]) / max(1, len(prompts) - 1)
    length = sum(prompts) + TURNS * REPLY
    staleness = STALENESS[mode]
    return simulate(
        LoopTimes(
            load=AgentLoad(
                agents=CONCURRENCY, tasks_per_step=TASKS, rollouts=ROLLOUTS, turns=Spread(TURNS),
                prompt=Spread(first), reply=Spread(REPLY), added=Spread(added), tool_s=Spread(TOOL_S),
                launch_s=Spread(costs.launch_s.value), launch_work_s=costs.launch_work_s.value, stream=False,
            ),
            engine=engine_times(
                costs, architecture, "torch", replicas=1, max_sequences=CONCURRENCY, context=length / 2
            ),
            gateway=gateway_times(costs, 1),
            train_s=costs.train_s.value,
            train_token_s=train_token_s(
                costs, architecture, 1, context=length / 2, sampled_share=TURNS * REPLY / length
            ),
            publish_s=publish_s(costs, architecture),
            poll_s=costs.poll_s.value,
            mode=mode,
            staleness=staleness,
            warmup=1 + staleness,
            steps=steps,
        )
    )  # fmt: skip


def train(model: Path, mode: str, steps: int, scratch: Path) -> dict[str, float]:
    """Mean seconds of a step of `afield train`, without the first ones."""
    tasks, run = scratch / "tasks.jsonl", scratch / "runs" / mode
    warmup = 1 + STALENESS[mode]
    rows = [
        {"id": f"t{n}", "question": f"{n:03d} {text(QUESTION)}", "result": text(RESULT), "turns": TURNS,
         "tool_s": TOOL_S}
        for n in range(TASKS * (warmup + steps))
    ]  # fmt: skip
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "afield", "train", "--model", str(model), "--tasks", str(tasks)]
    command += ["--agent", f"{ROOT / 'bench' / 'plan' / 'paced_agent.py'}:agent", "--run", mode]
    command += ["--steps", str(warmup + steps), "--tasks-per-step", str(TASKS), "--rollouts", str(ROLLOUTS)]
    command += ["--concurrency", str(CONCURRENCY), "--max-tokens", str(REPLY), "--mode", mode, "--json"]
    command += ["--workers", str(WORKERS), "--engine-slots", str(CONCURRENCY)]
    done = subprocess.run(
        command,
        env=environment() | {"AFIELD_RUNS": str(scratch / "runs")},
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        words = done.stdout[-2000:] + done.stderr[-2000:]
        raise SystemExit(f"afield train ended with {done.returncode}:\n{words}")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    published = {event["value"]: event["t"] for event in events if event["kind"] == "published"}
    taken = {event["value"]: event["seconds"] for event in events if event["kind"] == "published"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][warmup:]
    wall = published[warmup + steps] + taken[warmup + steps] - published[warmup] - taken[warmup]
    return {
        "step_s": wall / steps,
        "collect_s": sum(line["collect_s"] for line in metrics) / steps,
        "weights_s": sum(taken[warmup + n] for n in range(1, steps + 1)) / steps,
        "sampled_per_s": sum(line["sampled_tokens"] for line in metrics) / wall,
    }


def compared(name: str, predicted: LoopForecast, measured: dict[str, float]) -> list[dict[str, Any]]:
    values = {
        "step_s": predicted.step_s,
        "collect_s": predicted.trainer["idle"],
        "weights_s": predicted.trainer["weights"],
        "sampled_per_s": predicted.sampled_per_s,
    }
    return [
        {"point": name, "quantity": key, "predicted": round(value, 3), "measured": round(measured[key], 3),
         "error": round(value / measured[key] - 1, 3), "required": key == "step_s"}
        for key, value in values.items()
    ]  # fmt: skip


def prompt_tokens(model: Path) -> list[int]:
    """Tokens that each turn adds, by the model's template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    question, result = [{"role": "user", "content": f"000 {text(QUESTION)}"}], text(RESULT)

    def length(messages: list[dict[str, str]]) -> int:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(rendered)["input_ids"])

    first = length(question)
    return [first, *[length([{"role": "user", "content": result}]) for _ in range(TURNS - 1)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure the costs of this machine first")
    parser.add_argument("--costs", type=Path, default=Path("costs.json"), help="file of the costs")
    parser.add_argument("--modes", default="sync", help="modes to run, such as sync,async; empty for none")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    import torch

    from bench.gpu.model import write_model

    load_1m = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="afield-plan-") as directory:
        scratch = Path(directory)
        model = write_model(scratch / "m", "tiny", "cpu", torch.float32)
        if args.measure:
            costs = asyncio.run(measure(model, scratch))
            args.costs.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")
            for name, value in costs.constants("torch"):
                print(f"{name} = {value.value:.4g}", file=sys.stderr, flush=True)
        costs, architecture = read_costs(str(args.costs)), read_architecture(model)
        prompts, rows = prompt_tokens(model), list[dict[str, Any]]()
        for mode in filter(None, args.modes.split(",")):
            expected = forecast(costs, architecture, mode, args.steps, prompts)  # before the run
            rows += compared(
                f"{mode}, {CONCURRENCY} agents", expected, train(model, mode, args.steps, scratch)
            )
    cells = [
        (row["point"], row["quantity"], row["predicted"], row["measured"], f"{row['error']:+.1%}")
        for row in rows
    ]
    print(report.table(("run", "quantity", "predicted", "measured", "error"), cells))
    worst = max((abs(row["error"]) for row in rows if row["required"]), default=0.0)
    if args.json:
        print(
            json.dumps({"load_1m": load_1m, "worst_error": worst, "ok": worst <= TOLERANCE, "points": rows})
        )
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
