"""Ray actor that holds a job's gateway process and announces its address.

1. The gateway is a child process that exits when its standard input closes, that is, when the actor ends or
   is killed.
2. A job has one gateway; two jobs in one directory are refused.
3. A gateway that does not start raises an error; its log goes to the actor's log.

This module does not import veRL.
"""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import shutil
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import ray  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from afield import factory
from afield.errors import Unavailable, UsageError
from afield.sdk.listen import listen
from afield.settings.environment import Environment, agent_environment
from afield.settings.gateway import GatewaySettings
from afield.settings.trainer import EngineDtype
from afield.utils.gateway_process import GatewayProcess
from afield.utils.private_files import private_directory

START_TIMEOUT_S = 600.0
"""Time for the gateway to start and load a large model, in seconds."""
WILDCARD_HOSTS = ("0.0.0.0", "::")
OWN_VLLM = "vllm"
"""Engine specification that starts a vLLM server for each replica."""


class GatewayOptions(Struct, frozen=True):
    """Options of the gateway process; see `afield gateway --help`."""

    folder: str = "verl-afield"
    """Directory of the store and of published weights; shared by the trainer's first rank, the gateway and
    its engines."""
    engine: str | list[str] = "torch"
    """Engine specification, or several; see `afield.factory.engines`. `vllm` starts a vLLM server for each
    of veRL's replicas."""
    host: str = "127.0.0.1"
    """Host to listen on."""
    port: int = 0
    """Port to listen on; 0 picks a free one."""
    public_url: str = ""
    """Address for agents; empty uses the host and port."""
    outcomes: str = ""
    """Transport to which outcomes are forwarded; empty forwards none."""
    slots: int = 0
    """Concurrent calls of the embedded engine; 0 chooses by device and memory."""
    seed: int = 0
    """Seed of sampling and rounding."""
    engine_dtype: EngineDtype = "auto"
    """Dtype in which engines serve and weights are published; `auto` uses the dtype that engines report."""
    processes: int = 1
    """Number of gateway processes."""
    gpus: float = 0.0
    """GPUs that Ray assigns to the embedded engine."""
    vllm_python: str = ""
    """Interpreter of the environment with vLLM, for engine `vllm`; empty is veRL's own."""
    vllm_args: list[str] = []
    """Further arguments of the vLLM servers, for engine `vllm`."""
    vllm_start_timeout_s: float = 900.0
    """Time for a vLLM server to load its model, for engine `vllm`, in seconds."""

    @property
    def engines(self) -> list[str]:
        return [self.engine] if isinstance(self.engine, str) else list(self.engine)

    @property
    def starts_vllm(self) -> bool:
        """Whether each replica has a vLLM server of its own."""
        if OWN_VLLM in self.engines and len(self.engines) > 1:
            raise UsageError(
                f"afield.engine={self.engines}: {OWN_VLLM} without an address starts the servers of this job"
                " and cannot be mixed with others; name it alone, or give addresses only"
            )
        return self.engines == [OWN_VLLM]


class GatewayInfo(Struct, frozen=True):
    """Address and directories of a job's gateway."""

    url: str
    """Address for agents."""
    local_url: str
    """Address for the job's own processes."""
    admin_key: str
    """Admin key of the gateway."""
    model: str
    """Model directory that it started from."""
    weights: str
    """Directory of published versions."""
    seed: int = 0
    """Seed of the job, by which published weights are rounded."""
    engine_dtype: str = "auto"
    """Dtype in which weights are published; `auto` uses the dtype that engines report."""


def gateway_info() -> GatewayInfo:
    """The gateway of the current Ray job, once its replicas are launched."""
    return ray.get(gateway_actor().gateway.remote(), timeout=START_TIMEOUT_S)


def gateway_actor() -> Any:
    """The actor that holds the job's gateway."""
    try:
        return ray.get_actor(actor_name())
    except ValueError as error:
        raise UsageError(
            "this job has no gateway of its own; set actor_rollout_ref.rollout.name=afield, and load"
            " VERL_USE_EXTERNAL_MODULES=afield.integrations.verl.plugin"
        ) from error


def actor_name() -> str:
    """Name with the job id, since jobs of one cluster may share a namespace."""
    return f"afield-gateway-{ray.get_runtime_context().get_job_id()}"


@ray.remote(num_cpus=0)
class GatewayActor:
    """Holds the gateway process. veRL's server calls between steps are no-ops: weights change under calls in
    flight, and the engine's caches belong to their weights."""

    def __init__(self, options: GatewayOptions, model: str) -> None:
        folder = Path(options.folder).absolute()
        self._lock = _lock_directory(folder)
        self._weights = folder / "weights"
        shutil.rmtree(self._weights, ignore_errors=True)
        self._weights.mkdir(parents=True)
        self._options, self._model = options, model
        self._servers: dict[int, str] = {}
        self._starting: asyncio.Task[tuple[GatewayProcess, GatewayInfo]] | None = None

    async def _started(self, engines: list[str]) -> tuple[GatewayProcess, GatewayInfo]:
        """The gateway, which the first call starts. If that fails, every call raises the error."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(engines))
        return await asyncio.shield(self._starting)

    async def _start(self, engines: list[str]) -> tuple[GatewayProcess, GatewayInfo]:
        options = self._options
        store = self._weights.parent / f"store-{time.strftime('%Y%m%d-%H%M%S')}"
        settings = _settings(options, engines, self._model, store)
        # Its log goes to the actor's log.
        process = GatewayProcess(factory.COMMAND, agent_environment(), None, start_timeout_s=START_TIMEOUT_S)
        await process.start(settings.to_json())
        try:
            announced = await process.ready()
        except BaseException:
            await process.stop()
            raise
        local_url = announced["local_url"]
        if options.host in WILDCARD_HOSTS:
            local_url = f"http://{ray.util.get_node_ip_address()}:{urlsplit(local_url).port}"
        return process, GatewayInfo(
            announced["url"],
            local_url,
            announced["admin_key"],
            self._model,
            str(self._weights),
            seed=options.seed,
            engine_dtype=options.engine_dtype,
        )

    async def add_server(self, rank: int, url: str, servers: int) -> None:
        """Add the vLLM server of a replica; the gateway starts when all `servers` are there."""
        self._servers[rank] = url
        if len(self._servers) == servers:
            await self._started([f"{OWN_VLLM}={url}" for _, url in sorted(self._servers.items())])

    async def _current(self) -> tuple[GatewayProcess, GatewayInfo]:
        if self._options.starts_vllm and self._starting is None:
            raise UsageError(
                f"the gateway has {len(self._servers)} vLLM servers and waits for others; veRL launches them"
                " where it trains (in mode sync leave actor_rollout_ref.rollout.nnodes at 0), or on nodes of"
                " their own (separate_async)"
            )
        return await self._started(self._options.engines)

    async def gateway(self) -> GatewayInfo:
        """Address of the gateway once it serves; the first call starts it, unless it waits for servers."""
        process, info = await self._current()
        if process.returncode is not None:
            raise Unavailable(_ended(info, process.returncode))
        return info

    async def death(self) -> str:
        """Wait until the gateway has ended; returns how."""
        process, info = await self._current()
        return _ended(info, await process.wait())

    async def _no_op(self, *_: Any, **__: Any) -> None:
        """No-op that veRL expects; see the class."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _no_op
    abort_all_requests = resume_generation = start_profile = stop_profile = _no_op

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the rollout backend 'afield' is called by agents through the gateway, not by veRL's agent loops;"
            " set actor_rollout_ref.rollout.agent.agent_loop_manager_class=afield.integrations.verl.Manager"
        )


def _lock_directory(folder: Path) -> Any:
    """Lock the directory for the gateway's lifetime: two jobs would overwrite each other's weights."""
    private_directory(folder, ("lock",))
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UsageError(f"another job uses {folder}; give this one its own: afield.folder=DIR") from error
    return lock


def _ended(info: GatewayInfo, code: int) -> str:
    return f"the gateway at {info.url} has ended with status {code}; see its log"


def _settings(options: GatewayOptions, engines: list[str], model: str, store: Path) -> GatewaySettings:
    port, public_url = options.port, options.public_url
    if options.host in WILDCARD_HOSTS and not public_url:
        with listen(options.host, port) as free:
            port = free.getsockname()[1]
        public_url = f"http://{ray.util.get_node_ip_address()}:{port}"
    return GatewaySettings(
        model=model,
        engine=tuple(engines),
        store=str(store),
        host=options.host,
        port=port,
        public_url=public_url,
        admin_key=f"afa-{secrets.token_urlsafe(24)}",
        outcomes=options.outcomes or Environment.read().outcomes,
        processes=options.processes,
        slots=options.slots,
        seed=options.seed,
        engine_dtype=options.engine_dtype,
    )
