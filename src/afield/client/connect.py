"""RolloutClient factory: components from names and settings."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec import structs

from afield import factory
from afield.client.arguments import DEFAULTS, Agent, check_names
from afield.client.rollouts import RolloutClient
from afield.errors import UsageError
from afield.interfaces import Runtime, Transport
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.state import RunDirectory, RunInfo
from afield.ratelimit import RateLimits
from afield.settings.environment import Environment
from afield.settings.rollouts import Deadlines
from afield.settings.train import RuntimeTables, TrainConfig
from afield.settings.values import absolute_target, converted

TIMEOUTS = Deadlines.__struct_fields__
OPTIONS = RuntimeTables.__struct_fields__
VALUES = tuple(
    name for name in RolloutConfig.__struct_fields__ if name not in ("exp_id", "model_id", "deadlines")
)


def client(
    *,
    gateway: str | None = None,
    endpoint: str | None = None,
    endpoint_key: str | None = None,
    agent: Agent | None = None,
    admin_key: str | None = None,
    runtime: str | None = None,
    transport: str | None = None,
    exp_id: str | None = None,
    directory: str | Path | None = None,
    model_id: str = "policy",
    python: str | Path = "",
    workers: int = 2,
    process_per_rollout: bool = False,
    verifier: str = "",
    verifier_runtime: str = "sandbox",
    rate_limits: RateLimits | None = None,
    limiter_file: str | Path | None = None,
    limiter_url: str | None = None,
    observer: RolloutObserver | None = None,
    options: Mapping[str, Any] | None = None,
    **values: Any,
) -> RolloutClient:
    """Create a client without starting it.

    `values` are fields of `RolloutConfig` (concurrency, retries, sampling, ...) and of `Deadlines`
    (attempt_timeout_s, rollout_timeout_s, ...). `options` are those of the runtime, such as
    {"limits": {"memory_mb": 512}} for a sandbox.

    `agent` is a function, which runs in threads of this program; FILE.py:NAME, which runs in its own
    processes; or the name of a harness, whose work a `verifier`, FILE.py:NAME, grades. Runtimes that run an
    image or call a served agent need none. `admin_key` is by default
    AFIELD_ADMIN_KEY. A client with the `exp_id` and directory (default: runs/EXP_ID) of an earlier one reuses
    its finished rollouts.
    """
    check_names(values)
    environment = Environment.read()
    key = admin_key or environment.admin_key or ""
    if endpoint is None:
        _check_gateway(gateway, key)
    else:
        _check_endpoint(endpoint, gateway, model_id)
        values = {"no_turns": "accept", **values}
    exp_id = exp_id or f"exp-{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}"
    run = RunDirectory(Path(directory) if directory else environment.runs / exp_id)
    process_settings = {
        "python": str(Path(python).absolute()) if python else "",
        "workers": workers,
        "process_per_rollout": process_per_rollout,
        "verifier": absolute_target(verifier, Path.cwd()),
        "verifier_runtime": verifier_runtime,
        "deliver": values.get("deliver", "auto"),
    }
    config = _train_config(agent, runtime, transport, options, process_settings)
    if endpoint is not None and config.delivery == "gateway":
        raise UsageError(
            "this runtime or the verifier sends outcomes to a gateway, and an endpoint is none: choose"
            " runtime 'process' or 'inline' without a verifier, or give gateway"
        )
    judged = {"deliver": config.delivery, "separate_verifier": bool(config.verifier)}
    rollout_config = _rollout_config(exp_id, model_id, {**values, **judged})
    outcomes, agents = _transport_and_runtime(agent, config, run)
    return RolloutClient(
        rollout_config,
        gateway=factory.endpoint_gateway(endpoint, endpoint_key or environment.endpoint_key)
        if endpoint is not None
        else factory.gateway_client(str(gateway), key, delivers=config.delivery == "gateway"),
        runtime=agents,
        transport=outcomes,
        run=run,
        observer=observer,
        limiter=factory.limiter(config, rate_limits, limiter_file, limiter_url),
        verifiers=factory.verifier_runtime(config, run, outcomes),
        info=RunInfo(
            kind="client",
            agent=_agent_name(agent) or config.runtime,
            model=model_id,
            attempts=rollout_config.rollouts,
            sampling=structs.asdict(rollout_config.sampling),
            endpoint=endpoint or "",
        ),
    )


def _check_gateway(gateway: str | None, key: str) -> None:
    if gateway is None:
        raise UsageError(
            "no gateway: give gateway, the address that `afield gateway` prints, such as"
            " http://127.0.0.1:8400, or endpoint to evaluate without one"
        )
    if not key:
        raise UsageError("no admin key: give admin_key, or set AFIELD_ADMIN_KEY; the gateway prints it")
    if not gateway.startswith(("http://", "https://")):
        raise UsageError(f"gateway {gateway!r} must be its address, such as http://127.0.0.1:8400")


def _check_endpoint(endpoint: str, gateway: str | None, model_id: str) -> None:
    if gateway is not None:
        raise UsageError("gateway and endpoint both name what agents call; give one of them")
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"endpoint {endpoint!r} must be an address, such as https://api.openai.com/v1")
    if model_id == DEFAULTS["model_id"]:
        raise UsageError("an endpoint needs the name of its model: give model_id")


def _agent_name(agent: Agent | None) -> str:
    return agent if isinstance(agent, str) else getattr(agent, "__qualname__", "")


def _rollout_config(exp_id: str, model_id: str, values: dict[str, Any]) -> RolloutConfig:
    deadlines = converted({name: values[name] for name in TIMEOUTS if name in values}, Deadlines, "open")
    others = {name: value for name, value in values.items() if name in VALUES}
    return converted(
        {**others, "exp_id": exp_id, "model_id": model_id, "deadlines": deadlines}, RolloutConfig, "open"
    )


def _train_config(
    agent: Agent | None,
    runtime: str | None,
    transport: str | None,
    options: Mapping[str, Any] | None,
    process_settings: dict[str, Any],
) -> TrainConfig:
    named = isinstance(agent, str)
    chosen = factory.agent_defaults({"agent": agent}) if named else {}
    usual = "process" if named or agent is None else "inline"
    runtime = runtime or str(chosen.get("runtime", usual))
    transport = transport or ("files" if runtime != "inline" else "memory")
    _check(agent, runtime, transport)
    target = absolute_target(agent, Path.cwd()) if named else ""
    values = {"agent": target, "model": "", "runtime": runtime, "transport": transport, **process_settings}
    if options is not None:
        name = runtime.partition("=")[0]
        if name not in OPTIONS:
            raise UsageError(f"runtime {name!r} takes no options; those that do: {', '.join(OPTIONS)}")
        values[name] = dict(options)
    config = converted(values, TrainConfig, "open")
    if not callable(agent):
        factory.check_runtime(config)
    return config


def _transport_and_runtime(
    agent: Agent | None, config: TrainConfig, run: RunDirectory
) -> tuple[Transport, Runtime]:
    transport = factory.transport(config, run)
    if not callable(agent):
        return transport, factory.runtime(config, run, transport)
    inline = factory.load("runtime", "inline", factory.RUNTIMES)
    return transport, inline(agent, deliver=transport.deliver)


def _check(agent: Agent | None, runtime: str, transport: str) -> None:
    backend = factory.RUNTIMES.get(runtime.partition("=")[0])
    if agent is None and backend is not None and backend.takes_agent:
        raise UsageError(f"runtime {runtime!r} needs an agent: path/to/file.py:name or package.module:name")
    if callable(agent) and runtime != "inline":
        raise UsageError(f"a function runs inline only; for {runtime!r} name it as path/to/file.py:name")
    if transport == "memory" and runtime != "inline":
        raise UsageError("transport 'memory' works with runtime 'inline' only; use 'files'")
