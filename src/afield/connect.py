"""Names to a client: what `RolloutClient.open` takes.

Everything is a value that can be written down: which agent, which gateway, where agents run, how outcomes
come back. A name that does not exist is refused with those that do. Nothing is started here.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from afield import factory
from afield.client import RolloutClient
from afield.errors import UsageError
from afield.interfaces import Runtime, Transport
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.state import RunDirectory
from afield.ratelimit import RateLimits
from afield.settings import Environment, TrainConfig, converted, located

Agent = str | Callable[..., Any]
LATE = Deadlines.__struct_fields__
PLANNED = tuple(
    name for name in RolloutConfig.__struct_fields__ if name not in ("exp_id", "model_id", "deadlines")
)


def client(
    *,
    gateway: str,
    agent: Agent | None = None,
    admin_key: str | None = None,
    runtime: str | None = None,
    transport: str | None = None,
    exp_id: str | None = None,
    directory: str | Path | None = None,
    model_id: str = "policy",
    workers: int = 2,
    process_per_rollout: bool = False,
    pace: RateLimits | None = None,
    limiter_file: str | Path | None = None,
    watcher: RolloutObserver | None = None,
    options: Mapping[str, Any] | None = None,
    **values: Any,
) -> RolloutClient:
    """`values` are fields of `RolloutConfig` (concurrency, retries, sampling) and of `Deadlines`
    (attempt_timeout_s, rollout_timeout_s);
    `options` what the runtime is told, such as {"limits": {"memory_mb": 512}} for a sandbox.

    An agent that is a function of this program runs in its threads; one that is named, in processes of
    its own; one that others serve, or that is an image, needs no name. The admin key may come from
    AFIELD_ADMIN_KEY. An experiment with a name, started again on the same directory (runs/EXP_ID unless told
    otherwise), goes on where it was.
    """
    environment = Environment.read()
    key = admin_key or environment.admin_key
    if not key:
        raise UsageError("no admin key: give admin_key, or set AFIELD_ADMIN_KEY; the gateway prints it")
    if not str(gateway).startswith(("http://", "https://")):
        raise UsageError(f"gateway {gateway!r} must be its address, such as http://127.0.0.1:8400")
    exp_id = exp_id or f"exp-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
    run = RunDirectory(Path(directory) if directory else environment.runs / exp_id)
    how = {
        "workers": workers,
        "process_per_rollout": process_per_rollout,
        "deliver": values.get("deliver", "auto"),
    }
    config = _config(agent, runtime, transport, options, how)
    plan = _plan(exp_id, model_id, {**values, "deliver": config.delivery})
    carrier, agents = _parts(agent, config, run)
    return RolloutClient(
        plan,
        gateway=factory.load("gateway.client:HttpGateway")(
            gateway, key, delivers=config.delivery == "gateway"
        ),
        runtime=agents,
        transport=carrier,
        run=run,
        observer=watcher,
        limiter=factory.limiter(config, pace, limiter_file),
    )


def _plan(exp_id: str, model_id: str, values: dict[str, Any]) -> RolloutConfig:
    known = (*PLANNED, *LATE)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"unknown value {name!r}; {hint}")
    planned = {name: value for name, value in values.items() if name in PLANNED}
    deadlines = converted({name: values[name] for name in LATE if name in values}, Deadlines, "open")
    named = {"exp_id": exp_id, "model_id": model_id, "deadlines": deadlines}
    return converted(planned | named, RolloutConfig, "open")


def _config(
    agent: Agent | None,
    runtime: str | None,
    transport: str | None,
    options: Mapping[str, Any] | None,
    how: dict[str, Any],
) -> TrainConfig:
    named = isinstance(agent, str)
    runtime = runtime or ("process" if named or agent is None else "inline")
    transport = transport or ("files" if runtime != "inline" else "memory")
    place = runtime.partition("=")[0]
    _check(agent, runtime, transport)
    where = located("agent", agent, Path.cwd()) if named else ""
    values = {"agent": where, "model": "", "runtime": runtime, "transport": transport, **how}
    if options is not None:
        if place not in factory.TOLD:
            raise UsageError(f"runtime {place!r} takes no options; those that do: {', '.join(factory.TOLD)}")
        values[place] = dict(options)
    config = converted(values, TrainConfig, "open")
    if not callable(agent):
        factory.check_place(config)
    return config


def _parts(agent: Agent | None, config: TrainConfig, run: RunDirectory) -> tuple[Transport, Runtime]:
    carrier = factory.transport(config, run)
    if not callable(agent):
        return carrier, factory.runtime(config, run, carrier)
    return carrier, factory.load(factory.RUNTIMES["inline"])(agent, deliver=carrier.deliver)


def _check(agent: Agent | None, runtime: str, transport: str) -> None:
    if agent is None and runtime.partition("=")[0] in factory.TAKES_TARGET:
        raise UsageError(f"runtime {runtime!r} needs an agent: path/to/file.py:name or package.module:name")
    if isinstance(agent, str) and ":" not in agent:
        raise UsageError(f"agent {agent!r} must be path/to/file.py:name or package.module:name")
    if callable(agent) and runtime != "inline":
        raise UsageError(f"a function runs inline only; for {runtime!r} name it as path/to/file.py:name")
    if transport == "memory" and runtime != "inline":
        raise UsageError("transport 'memory' works with runtime 'inline' only; use 'files'")
