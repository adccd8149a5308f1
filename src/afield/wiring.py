"""Values to objects; the only module that names a backend.

Backends are imported here when they are chosen, so that a missing library is reported with the extra
that brings it, and a choice that does not exist with the choices that do.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from afield.config import TrainConfig, agent_environment
from afield.deadlines import Deadlines
from afield.errors import UsageError
from afield.limiter import LocalLimiter, Pace, SharedLimiter
from afield.plan import Plan
from afield.rundir import RunDir, write_whole
from afield.seams import Engine, EngineInfo, Runtime, Trainer, Transport
from afield.types import Budget, FailureKind, Sampling, Task
from afield.window import Window

log = logging.getLogger("afield.wiring")

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
START_TIMEOUT_S = 120.0
SERVERS = ("vllm", "sglang")
RUNTIMES = {
    "process": "runtimes.process:ProcessRuntime",
    "sandbox": "runtimes.sandbox:SandboxRuntime",
    "container": "runtimes.container:ContainerRuntime",
    "agentcore": "runtimes.agentcore:AgentCoreRuntime",
    "kubernetes": "runtimes.kube:KubernetesRuntime",
    "ray": "runtimes.raytasks:RayRuntime",
    "inline": "runtimes.inline:InlineRuntime",
    "served": "runtimes.served:ServedRuntime",
}
# What `--runtime NAME=VALUE` says for short.
IN_SHORT = {"container": "image", "agentcore": "arn", "kubernetes": "image", "ray": "address"}
TOLD = ("sandbox", "container", "agentcore", "kubernetes", "ray")  # those with options of their own
TAKES_TARGET = ("process", "sandbox", "ray", "inline")  # the others run an image, or are served elsewhere
LIBRARIES = {
    "docker": "container",
    "kubernetes_asyncio": "kubernetes",
    "ray": "ray",
    "boto3": "aws",
    "botocore": "aws",
}
TRANSPORTS = {"files": "transports.files:FilesTransport", "memory": "transports.memory:MemoryTransport"}
TRAINERS = {"grpo": "trainers.grpo:GRPO"}
LEARNING = ("torch", "transformers", "safetensors")
HEAVY: dict[str, tuple[str, ...]] = {"engines.torch": LEARNING, "trainers.grpo": LEARNING}


def choose(kind: str, name: str, among: dict[str, str]) -> Any:
    check_name(kind, name, among)
    return load(among[name])


def check_name(kind: str, name: str, among: dict[str, str]) -> None:
    if name not in among:
        raise UsageError(f"unknown {kind} {name!r}; choose one of: {', '.join(sorted(among))}")


def check_heavy(kind: str, name: str, among: dict[str, str], *, used: bool) -> None:
    """As `choose`, but nothing is loaded: it takes seconds, which all parts spend at the same time later."""
    check_name(kind, name, among)
    module = among[name].partition(":")[0]
    for library in HEAVY.get(module, ()) if used else ():
        if find_spec(library) is None:
            extra = EXTRAS[module.partition(".")[0]]
            raise UsageError(f"{library} is not installed: pip install 'afield[{extra}]'")


def load(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(f"afield.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("afield"):
            raise
        extra = LIBRARIES.get((error.name or "").partition(".")[0]) or EXTRAS[module.partition(".")[0]]
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
    """Where agents run; what is launched there is noted in the run's roster."""
    made = _runtime(config, run, carrier, run.id)
    return _rostered(made, run, config.place, lambda: guard(config, run))


def verifiers(config: TrainConfig, run: RunDir, carrier: Transport) -> Runtime | None:
    """Where verifiers run: the same kinds of places, each for one verifier alone."""
    if not config.verifier:
        return None
    judging = structs.replace(
        config,
        agent=config.verifier,
        runtime=config.verifier_runtime,
        fresh_process=True,
        workers=1,
        verifier="",
        deliver="auto",
    )
    home = RunDir(run.path / "verifiers")
    return _rostered(_runtime(judging, home, carrier, f"{run.id}.verifiers"), home, judging.place)


def _rostered(made: Runtime, run: RunDir, name: str, guard: Any = None) -> Runtime:
    return load("runtimes.roster:Rostered")(made, load("runtimes.roster:Roster")(run.sessions), name, guard)


@asynccontextmanager
async def guard(config: TrainConfig, run: RunDir) -> AsyncIterator[None]:
    """A process that ends what we leave running if we are killed, unless another of us takes it over."""
    if not run.config.exists():  # it has to know the places it reaps in
        write_whole(run.config, msgspec.json.encode(config), private=True)
    run.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "afield", "reap", str(run.path), "--when-stdin-ends"]
    with (run.logs / "guard.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def _runtime(config: TrainConfig, run: RunDir, carrier: Transport, called: str) -> Runtime:
    """`called`: what its sessions are found by in a place that others share."""
    name, _, argument = config.runtime.partition("=")
    if name == "sandbox" and config.sandbox.without_bubblewrap == "process" and not shutil.which("bwrap"):
        log.warning("there is no bubblewrap here: agents run in plain processes, as you allowed")
        config, name = structs.replace(config, fresh_process=True), "process"
    made = choose("runtime", name, RUNTIMES)
    if name == "served":
        return made(addresses(argument))
    if name == "inline":
        return made(_function(config), **({"deliver": carrier.deliver} if config.delivery == "store" else {}))
    if name == "process":
        return made(
            config.agent,
            workers=config.workers,
            fresh=config.fresh_process,
            log_dir=run.logs,
            env=agent_environment(),
        )
    options = getattr(config, name)
    if argument:
        options = structs.replace(options, **{IN_SHORT[name]: argument})
    if name == "sandbox":
        return made(config.agent, options, log_dir=run.logs)
    if name == "agentcore":
        return made(options, name=called, ledger=run.path / "agentcore.sqlite")
    target = (config.agent,) if name in TAKES_TARGET else ()
    return made(*target, options, name=called, log_dir=run.logs)


def _function(config: TrainConfig) -> Any:
    agent = load("sdk.serve:load_object")(config.agent)
    if isinstance(agent, load("sdk.app:Entrypoints")):
        raise UsageError(f"{config.agent} is an app: run it with --runtime process")
    return agent


def addresses(given: str) -> list[str]:
    """Those of `served=URL,URL`."""
    urls = [url.strip().rstrip("/") for url in given.split(",") if url.strip()]
    for url in urls or [""]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UsageError(f"runtime served={given} needs addresses: served=http://HOST:PORT,...")
    return urls


def transport(config: TrainConfig, run: RunDir) -> Transport:
    """`files`, `memory`, or a specification such as `s3://BUCKET?sqs=URL`."""
    if "://" in config.outcomes:
        return load("transports.parse:from_spec")(config.outcomes, run.outcomes)
    made = choose("transport", config.transport, TRANSPORTS)
    return made() if config.transport == "memory" else made(run.outcomes)


def limiter(config: TrainConfig) -> LocalLimiter | SharedLimiter:
    pace = Pace(rate_per_s=config.launch_rate, start_s=config.cold_start_s, starting=config.launching)
    if config.place == "agentcore":  # its quotas, unless told otherwise
        told = config.agentcore
        pace = Pace(
            rate_per_s=config.launch_rate or told.rate,
            stop_per_s=told.stop_rate,
            start_s=config.cold_start_s or told.cold_start_s,
            starting=config.launching,
        )
    if config.limiter_file:
        return SharedLimiter(pace, Path(config.limiter_file))
    return LocalLimiter(pace)


def trainer(config: TrainConfig) -> Trainer:
    if config.freeze_weights:
        return load("trainers.frozen:Frozen")(Path(config.model))
    made = choose("trainer", config.trainer, TRAINERS)
    told = structs.asdict(config.learn)
    if told["devices"] > 1:
        made = load("trainers.sharded:Sharded")
    else:
        del told["devices"]
    told["device"] = told["device"] or None
    told["length"] = told["length"] or config.max_tokens * (config.max_calls or 1)
    return made(
        Path(config.model),
        lr=config.lr,
        minibatches=config.minibatches,
        kl=config.kl,
        grad_clip=config.grad_clip,
        eps=config.adam_eps,
        scale=config.scale_advantages,
        advantage=config.advantage,
        seed=config.seed,
        **told,
    )


def plan(config: TrainConfig, run: RunDir) -> Plan:
    return Plan(
        exp_id=config.exp_id or run.id,
        model_id=Path(config.model).name,
        rollouts=config.rollouts,
        val_rollouts=config.val_rollouts,
        quorum=config.quorum,
        extra=config.extra,
        straggler_s=config.straggler_s,
        straggler_after=config.straggler_after,
        baseline=config.advantage == "remax",
        concurrency=config.concurrency,
        deadlines=deadlines(config),
        retries={
            FailureKind.TASK: config.retries_task,
            FailureKind.VERIFIER: config.retries_verifier,
            FailureKind.INFRASTRUCTURE: config.retries_infrastructure,
        },
        sampling=Sampling(temperature=config.temperature, max_tokens=config.max_tokens),
        budget=Budget(calls=config.max_calls, context=config.max_context),
        deliver=config.delivery,
        judged=bool(config.verifier),
        rewards=() if config.freeze_weights else tuple(config.learn.rewards),
        sweep_s=config.sweep_s,
        patience_s=config.patience_s,
    )


def deadlines(config: TrainConfig) -> Deadlines:
    same = ("queue_s", "start_s", "first_call_s", "silence_s", "grade_s", "upload_s", "teardown_s", "life_s")
    return Deadlines(
        run_s=config.deadline_s,
        active_s=min(60.0, config.deadline_s / 2),
        dead_s=config.dead_s,
        **{name: getattr(config, name) for name in same},
    )


def window(config: TrainConfig, tasks: Sequence[Task]) -> Window:
    groups = config.steps * config.tasks_per_step
    if config.epochs is not None:
        groups = config.epochs * len(tasks)
    return Window(
        mode=config.mode,
        groups=groups,
        batch=config.tasks_per_step,
        staleness=config.staleness,
        strict=config.on_stale == "drop",
    )


def check_choices(config: TrainConfig) -> None:
    """Everything that can be known to be wrong before anything is started."""
    check_place(config)
    check_reach(config)
    transport(config, RunDir(Path("check")))
    check_heavy("trainer", config.trainer, TRAINERS, used=not config.freeze_weights)
    check_heavy("engine", config.engine.partition("=")[0], ENGINES, used=not config.gateway)
    load("tokens:ChatTokens").load(Path(config.model))
    plan(config, RunDir(Path("check")))
    if config.transport == "memory" and (config.runtime != "inline" or config.verifier):
        raise UsageError("--transport memory works with --runtime inline only; use --transport files")


def check_place(config: TrainConfig) -> None:
    """Where agents and verifiers run, and whether that place was told what it needs."""
    name, _, argument = config.runtime.partition("=")
    choose("runtime", name, RUNTIMES)
    if name == "served":
        addresses(argument)
    elif argument and name not in IN_SHORT:
        raise UsageError(f"runtime {name} takes nothing after '=', not {argument!r}")
    if name in TAKES_TARGET:
        _check_target("agent", config.agent)
    elif name != "served":
        _check_image(name, config, argument)
    if config.verifier:
        _check_target("verifier", config.verifier)
        where = config.verifier_runtime
        if where not in ("process", "sandbox", "ray"):
            raise UsageError(f"verifier_runtime {where!r} must be one of: process, sandbox, ray")


def check_reach(config: TrainConfig) -> None:
    """Agents on other machines need a gateway of ours that can be reached from there."""
    away = config.place == "kubernetes" or (
        config.place == "agentcore" and not _is_loopback(urlsplit(config.agentcore.endpoint_url).hostname)
    )
    if away and not (config.gateway or config.gateway_url) and _is_loopback(config.gateway_host):
        raise UsageError(
            f"agents on {config.place} cannot reach a gateway that listens at {config.gateway_host}: set"
            " gateway_host = '0.0.0.0', and gateway_port and gateway_url if they know this machine by"
            " another address; or name a gateway that runs elsewhere with --gateway"
        )


def _is_loopback(host: str | None) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def _check_target(what: str, target: str) -> None:
    place, _, name = target.rpartition(":")
    if not target:
        raise UsageError(f"{what} is missing: give path/to/file.py:name or package.module:name")
    if not place or not name:
        raise UsageError(f"{what} {target!r} must be path/to/file.py:name or package.module:name")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"there is no file {place}")


def _check_image(name: str, config: TrainConfig, argument: str) -> None:
    options = getattr(config, name)
    if name == "agentcore":
        made = options.agent_name and options.container_uri and options.role_arn
        if not (argument or options.arn or made):
            raise UsageError(
                "runtime agentcore needs a runtime that exists (--runtime agentcore=ARN), or in"
                " [train.agentcore] agent_name, container_uri and role_arn to make one of"
            )
    elif not (argument or options.image):
        raise UsageError(
            f"runtime {name} needs an image: --runtime {name}=IMAGE, or --set {name}.image=IMAGE"
        )
