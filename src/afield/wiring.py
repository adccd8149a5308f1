"""Values to objects; the only module that names a backend.

Backends are imported here when they are chosen, so that a missing library is reported with the extra
that brings it, and a choice that does not exist with the choices that do.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from afield.collect import Collector, Plan, Watcher
from afield.config import TrainConfig, agent_environment
from afield.errors import Unavailable, UsageError
from afield.journal import Journal
from afield.loop import Loop, Recipe, StepLine
from afield.rundir import RunDir
from afield.seams import Engine, EngineInfo, Runtime, Trainer, Transport
from afield.types import Budget, FailureKind, Sampling, Task

EXTRAS = {
    "cli": "train",
    "tokens": "gateway",
    "sdk": "gateway",
    "engines": "train",
    "trainers": "train",
    "gateway": "gateway",
    "runtimes": "gateway",
    "transports": "gateway",
}
ENGINES = {
    "torch": "engines.torch:TorchEngine",
    "scripted": "engines.scripted:ScriptedEngine",
    "vllm": "engines.vllm:VllmEngine",
    "sglang": "engines.sglang:SglangEngine",
}
SERVERS = ("vllm", "sglang")
RUNTIMES = {"process": "runtimes.process:ProcessRuntime", "inline": "runtimes.inline:InlineRuntime"}
TRANSPORTS = {"files": "transports.files:FilesTransport", "memory": "transports.memory:MemoryTransport"}
TRAINERS = {"grpo": "trainers.grpo:GRPO"}
START_TIMEOUT_S = 120.0


def choose(kind: str, name: str, among: dict[str, str]) -> Any:
    if name not in among:
        raise UsageError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(among))}")
    return load(among[name])


def load(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(f"afield.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("afield"):
            raise
        extra = EXTRAS[module.partition(".")[0]]
        raise UsageError(f"{error.name} is not installed: pip install 'afield[{extra}]'") from error


def engine(
    spec: str, model: Path, *, slots: int, seed: int, ledger: Path | None, images: bool = False
) -> Engine:
    """`torch`, `scripted=FILE`, `vllm=URL` or `sglang=URL`."""
    name, _, argument = spec.partition("=")
    made = choose("engine", name, ENGINES)
    if name in SERVERS:
        built: Engine = connect(name, argument, images=images, vocabulary=vocabulary(model))
    elif name == "scripted":
        if not argument:
            raise UsageError("--engine scripted needs a file: scripted=FILE")
        tokenizer = model / "tokenizer.json"
        codec = load("tokens.vocab:Vocabulary")(tokenizer.read_bytes(), tokenizer)
        built = made(load("engines.scripted:read_script")(argument, codec))
    else:
        built = made(model, max_slots=slots, seed=seed)
    return load("engines.ledger:Ledger")(built, ledger) if ledger else built


def connect(kind: str, url: str, *, images: bool = False, vocabulary: int | None = None) -> Engine:
    """An inference server that is running somewhere. SGLang dies of ids that are not in its vocabulary."""
    if kind not in SERVERS:
        raise UsageError(f"unknown kind of worker {kind!r}; choose one of: {', '.join(SERVERS)}")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--engine {kind} needs the server's address, not {url!r}: {kind}=http://HOST:PORT")
    made = choose("engine", kind, ENGINES)
    if kind == "sglang":
        return made(url.rstrip("/"), vocab_size=vocabulary)
    return made(url.rstrip("/"), images=True) if images else made(url.rstrip("/"))


def pool(specs: Sequence[str], model: Path, *, slots: int, seed: int, ledger: Path | None) -> Any:
    """All engines of a gateway as one. Servers are tried out before use; what runs in process is ours."""
    images = sees(model)
    named = [f"{spec.partition('=')[0]}-{n}" for n, spec in enumerate(specs, 1)]
    workers = {
        name: engine(spec, model, slots=slots, seed=seed, ledger=ledger, images=images)
        for name, spec in zip(named, specs, strict=True)
    }
    made = load("gateway.pool:Pool")
    size = vocabulary(model)
    return made(
        workers,
        connect=lambda kind, url: connect(kind, url, images=images, vocabulary=size),
        check=check,
    )


async def check(made: Engine) -> EngineInfo:
    """Whether an engine is fit for use: a server has to show it."""
    return await (load("engines.probe:checked")(made) if getattr(made, "url", "") else made.info())


def sees(model: Path) -> bool:
    """Whether a model was made for images."""
    return "vision_config" in _config(model)


def vocabulary(model: Path) -> int | None:
    """How many ids a model has, where its files say so."""
    config = _config(model)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _config(model: Path) -> dict[str, Any]:
    try:
        return json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}


def runtime(config: TrainConfig, run: RunDir, carrier: Transport) -> Runtime:
    made = choose("runtime", config.runtime, RUNTIMES)
    if config.runtime == "inline":
        agent = load("sdk.serve:load_object")(config.agent)
        if isinstance(agent, load("sdk.app:Entrypoints")):
            raise UsageError(f"{config.agent} is an app: run it with --runtime process")
        return made(agent, deliver=carrier.deliver)
    return made(
        config.agent,
        workers=config.workers,
        fresh=config.fresh_process,
        log_dir=run.logs,
        env=agent_environment(),
    )


def transport(config: TrainConfig, run: RunDir) -> Transport:
    made = choose("transport", config.transport, TRANSPORTS)
    return made() if config.transport == "memory" else made(run.outcomes)


def trainer(config: TrainConfig) -> Trainer:
    if config.freeze_weights:
        return load("trainers.frozen:Frozen")(Path(config.model))
    made = choose("trainer", config.trainer, TRAINERS)
    return made(
        Path(config.model),
        lr=config.lr,
        minibatches=config.minibatches,
        kl=config.kl,
        grad_clip=config.grad_clip,
        eps=config.adam_eps,
        scale=config.scale_advantages,
        seed=config.seed,
    )


def plan(config: TrainConfig, run: RunDir) -> Plan:
    return Plan(
        exp_id=config.exp_id or run.id,
        model_id=Path(config.model).name,
        rollouts=config.rollouts,
        concurrency=config.concurrency,
        deadline_s=config.deadline_s,
        silence_s=min(60.0, config.deadline_s / 2),
        retries={
            FailureKind.TASK: config.retries_task,
            FailureKind.VERIFIER: config.retries_verifier,
            FailureKind.INFRASTRUCTURE: config.retries_infrastructure,
        },
        sampling=Sampling(temperature=config.temperature, max_tokens=config.max_tokens),
        budget=Budget(calls=config.max_calls, context=config.max_context),
    )


def check_choices(config: TrainConfig) -> None:
    """Everything that can be known to be wrong before anything is started."""
    choose("runtime", config.runtime, RUNTIMES)
    choose("transport", config.transport, TRANSPORTS)
    choose("trainer", config.trainer, TRAINERS)
    choose("engine", config.engine.partition("=")[0], ENGINES)
    load("tokens:ChatTokens").load(Path(config.model))
    plan(config, RunDir(Path("check")))
    agent, _, name = config.agent.rpartition(":")
    if not agent or not name:
        raise UsageError(f"agent {config.agent!r} must be path/to/file.py:name or package.module:name")
    if agent.endswith(".py") and not Path(agent).is_file():
        raise UsageError(f"there is no file {agent}")
    if config.transport == "memory" and config.runtime != "inline":
        raise UsageError("--transport memory works with --runtime inline only; use --transport files")


class GatewayChild:
    """A gateway with its engine in a process of its own.

    It watches its standard input: it ends when we do, even after a kill -9.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def died(self) -> Unavailable:
        code = await self._process.wait()
        return Unavailable(f"the gateway ended with code {code}; see {self._log}, then go on with --resume")

    async def ready(self) -> dict[str, str]:
        """Its address and admin key, once it serves."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError as error:
            raise Unavailable(f"no gateway after {START_TIMEOUT_S:g} s; see {self._log}") from error
        if not line:
            text = await asyncio.to_thread(self._log.read_text, errors="replace")
            raise UsageError("the gateway did not start:\n" + "\n".join(text.strip().splitlines()[-5:]))
        return json.loads(line)


@asynccontextmanager
async def gateway_child(config: TrainConfig, run: RunDir) -> AsyncIterator[GatewayChild]:
    command = [sys.executable, "-m", "afield", "gateway", "--json", "--exit-with-parent"]
    command += [
        "--model",
        config.model,
        "--engine",
        config.engine,
        "--port",
        "0",
        "--store",
        str(run.gateway),
    ]
    command += ["--slots", str(config.engine_slots), "--seed", str(config.seed)]
    if config.engine_ledger:
        command += ["--engine-ledger", str(run.path / "engine-ledger.jsonl")]
    run.logs.mkdir(parents=True, exist_ok=True)
    log_path = run.logs / "gateway.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=agent_environment(),
            start_new_session=True,
        )
    try:
        yield GatewayChild(process, log_path)
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.stdin:
        process.stdin.close()


@asynccontextmanager
async def training(
    config: TrainConfig,
    run: RunDir,
    tasks: Sequence[Task],
    watcher: Watcher,
    on_step: Callable[[StepLine], None],
) -> AsyncIterator[Training]:
    """Everything a training run consists of, started; and ended again, in the reverse order."""
    async with AsyncExitStack() as stack:
        journal = stack.enter_context(Journal(run.journal))
        # All three are slow to start and do so at the same time; agents end before their gateway does.
        learner = asyncio.create_task(asyncio.to_thread(trainer, config))
        stack.push_async_callback(_settle, learner)
        child = await stack.enter_async_context(gateway_child(config, run))
        carrier = await stack.enter_async_context(transport(config, run))
        agents = await stack.enter_async_context(runtime(config, run, carrier))
        told = await child.ready()
        client = load("gateway.client:HttpGateway")(told["url"], told["admin_key"])
        gateway = await stack.enter_async_context(client)
        await agents.check()
        collector = Collector(
            plan(config, run),
            gateway=gateway,
            runtime=agents,
            transport=carrier,
            journal=journal,
            watcher=watcher,
        )
        loop = Loop(
            recipe(config),
            tasks=tasks,
            collector=collector,
            trainer=await learner,
            gateway=gateway,
            journal=journal,
            run=run,
            exp_id=config.exp_id or run.id,
            policy=told["model"],
            on_step=on_step,
        )
        yield Training(loop, child)


async def _settle(learner: asyncio.Task[Trainer]) -> None:
    """A thread cannot be stopped; what became of it no longer matters."""
    await asyncio.wait([learner])
    if not learner.cancelled():
        learner.exception()


class Training:
    """A training run that is set up. It ends when it is done, or when its gateway does."""

    def __init__(self, loop: Loop, child: GatewayChild) -> None:
        self._loop = loop
        self._child = child

    async def run(self) -> None:
        running = asyncio.create_task(self._loop.run())
        died = asyncio.create_task(self._child.died())
        try:
            await asyncio.wait((running, died), return_when=asyncio.FIRST_COMPLETED)
            if died.done() and not running.done():
                raise died.result()
            await running
        finally:
            for task in (running, died):
                task.cancel()
            await asyncio.gather(running, died, return_exceptions=True)


def recipe(config: TrainConfig) -> Recipe:
    return Recipe(
        steps=config.steps,
        tasks_per_step=config.tasks_per_step,
        quorum=config.quorum,
        seed=config.seed,
        shuffle=config.shuffle,
        keep_weights=config.keep_weights,
        frozen=config.freeze_weights,
    )
