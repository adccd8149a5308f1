"""Gateway pools of training runs from settings."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from afield.factory.gateway import COMMAND, gateway_process, start_timeout
from afield.factory.registry import needs
from afield.factory.runs import gateway_settings
from afield.interfaces import GatewayEndpoint, GatewayLauncher
from afield.orchestrator.state import RunDirectory
from afield.runtimes.registry import ProcessRef, SessionRegistry
from afield.settings.gateway import GatewaySettings
from afield.settings.rollouts import GatewayAddress
from afield.settings.runtimes import RayOptions
from afield.settings.train import TrainConfig
from afield.utils.gateway_process import GatewayProcess

RELAY_NAME = 56
"""Characters of a pool's name at a relay, before the number of the gateway."""


@asynccontextmanager
async def gateway_pool(config: TrainConfig, run: RunDirectory) -> AsyncIterator[Any]:
    """The gateways of a run, each with its own store; their processes are listed in a registry."""
    with needs("gateway"):
        from afield.gateway.pool import GatewayPool, PoolTimeouts

    settings = [pool_settings(config, run, number) for number in range(config.gateways)]
    launcher = (ray_launcher if config.on == "ray" else process_launcher)(config, run, settings)
    with closing(GatewayRecorder(SessionRegistry(gateway_directory(run).sessions), config.on)) as recorder:
        pool = GatewayPool(
            launcher,
            config.gateways,
            inherits=any(
                (Path(shard.store) / "gateway.sqlite").exists() for shard in settings if shard.store
            ),
            record=recorder,
            timeouts=PoolTimeouts(unavailable_s=config.unavailable_timeout_s),
        )
        async with pool:
            yield pool


def process_launcher(
    config: TrainConfig, run: RunDirectory, settings: Sequence[GatewaySettings]
) -> GatewayLauncher:
    from afield.gateway.local_launcher import GatewayPlan, ProcessLauncher

    def process(number: int, listener: socket.socket) -> GatewayProcess:
        return gateway_process(settings[number], run.logs / f"{gateway_name(number)}.log", listener)

    plans = [GatewayPlan(settings=shard.to_json(), host=shard.host, port=shard.port) for shard in settings]
    return ProcessLauncher(plans, process)


def ray_launcher(
    config: TrainConfig, run: RunDirectory, settings: Sequence[GatewaySettings]
) -> GatewayLauncher:
    """Actors of the cluster in [train.ray]; without an address the run starts one on this machine."""
    from afield.runtimes.ray.cluster import ship_target
    from afield.runtimes.ray.gateway_actor import RayGatewayPlan
    from afield.runtimes.ray.gateways import RayGatewayLauncher

    options = ray_options(config)
    here = not options.address
    plans = [
        RayGatewayPlan(
            arguments=tuple(COMMAND[1:]),
            settings=msgspec.to_builtins(one),
            host=one.host if here or one.host != GatewayAddress().gateway_host else "",
            port=one.port,
            store=one.store,
            log=str(run.logs / f"{gateway_name(number)}.log") if here else "",
            start_timeout_s=start_timeout(one),
        )
        for number, one in enumerate(settings)
    ]
    # A process has one connection to Ray, which the runtime of the agents may share.
    runtime_env: Mapping[str, Any] = options.runtime_env
    if config.runtime_name == "ray":
        runtime_env = ship_target(config.agent, options).runtime_env
    return RayGatewayLauncher(plans, options, runtime_env, name=run.id)


def ray_options(config: TrainConfig) -> RayOptions:
    """Options of the cluster; `--runtime ray=ADDRESS` sets its address."""
    name, _, address = config.runtime.partition("=")
    return structs.replace(config.ray, address=address) if name == "ray" and address else config.ray


def gateway_directory(run: RunDirectory) -> RunDirectory:
    """Directory of a run's gateway stores, with the registry of the gateways of a pool."""
    return RunDirectory(run.gateway)


def gateway_name(number: int) -> str:
    return f"gateway-{number}"


def pool_settings(config: TrainConfig, run: RunDirectory, number: int) -> GatewaySettings:
    """Settings of one gateway of a pool; its store is empty if a node of Ray has to make one of its own."""
    settings = gateway_settings(config, run)
    shared = Path(config.gateway_store) / run.id if config.gateway_store else None
    store = str((shared or run.gateway) / gateway_name(number))
    if shared is None and config.on == "ray" and ray_options(config).address:
        store = ""
    calls = f"engine-calls-{number}.jsonl"
    return structs.replace(
        settings,
        port=settings.port + number if settings.port else 0,
        admin_key=f"afa-{secrets.token_urlsafe(24)}",
        store=store,
        store_shared=shared is not None,
        secret_file=str(shared / "signing.key") if shared else "",
        relay_name=f"{settings.relay_name[:RELAY_NAME]}-{number}" if settings.relay else "",
        record_engine_calls=str(run.path / calls) if settings.record_engine_calls else "",
    )


class GatewayRecorder:
    """Records the processes of a pool for `afield ps`, `kill`, `logs` and `cleanup`."""

    def __init__(self, registry: SessionRegistry, launcher: str) -> None:
        self._registry = registry
        self._launcher = launcher
        self._owner = ProcessRef.of(os.getpid())
        registry.add_owner(self._owner)

    def close(self) -> None:
        self._registry.remove_owner(self._owner)
        self._registry.close()

    def __call__(self, number: int, endpoint: GatewayEndpoint | None) -> None:
        if endpoint is None:
            self._registry.remove(gateway_name(number))
            return
        self._registry.record_process(
            gateway_name(number),
            self._launcher,
            self._owner,
            ProcessRef(endpoint.host, endpoint.pid, endpoint.started),
            where=endpoint.url,
            log=f"{gateway_name(number)}.log",
        )
