"""Ray connection of this process, and the resources of an actor.

1. Ray has one connection per process. Runtimes with the same address share it, and the last one closes it. A
connection that the program opened itself is used and stays open.
2. Every call to Ray runs in a thread.
3. Known mistakes raise UsageError: Ray not installed, a wrong address, more resources than any node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from msgspec import Struct

from afield.errors import UsageError
from afield.settings.runtimes import RayOptions

NAMESPACE = "afield"
CONNECT_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 256 * 2**20
SLOTS_WITHOUT_CPU = 32  # slots of an actor if sessions request no CPU
T = TypeVar("T")


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """Resources of one actor."""

    slots: int
    """Number of concurrent sessions in the actor."""
    cpus: float
    """CPUs for all slots together."""
    gpus: float
    """GPUs for the actor."""
    memory: int | None
    """Memory for all slots together, in bytes; None requests none."""
    resources: Mapping[str, float]
    """Amounts of custom Ray resources by name."""

    @classmethod
    def of(cls, options: RayOptions, slots: int) -> ResourceRequest:
        return cls(
            slots=slots,
            cpus=round(options.cpus * slots, 4),
            gpus=options.gpus,
            memory=options.memory_mb * 2**20 * slots if options.memory_mb else None,
            resources=options.resources,
        )

    def fits(self, has: Mapping[str, float]) -> bool:
        """Whether a node with the resources `has` can hold the actor when it is empty."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory or 0, **self.resources}
        return all(has.get(name, 0) >= much for name, much in wanted.items() if much)

    @property
    def actor_options(self) -> dict[str, Any]:
        request = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}
        return request if self.memory is None else {**request, "memory": self.memory}


def resource_request(options: RayOptions, nodes: list[Mapping[str, float]]) -> ResourceRequest:
    """Compute the resources of an actor.

    An actor has as many sessions as fit into one CPU, fewer if no node has that much. GPUs and custom
    resources are not divided: each session that requests them has its own actor. Raises UsageError if no node
    is large enough.
    """
    _check_amounts(options)
    slots = 1
    if not options.gpus and not options.resources:
        slots = max(1, math.floor(1 / options.cpus + 1e-9)) if options.cpus else SLOTS_WITHOUT_CPU
    for fewer in range(slots, 0, -1):
        need = ResourceRequest.of(options, fewer)
        if any(need.fits(has) for has in nodes):
            return need
    need = ResourceRequest.of(options, 1)
    amounts = ", ".join(f"{k} {v:g}" for k, v in _amounts(need).items())
    have = "; ".join(", ".join(f"{k} {has.get(k, 0):g}" for k in _amounts(need)) for has in nodes)
    raise UsageError(f"no node of the Ray cluster has what a session asks for ({amounts}); they have: {have}")


def _amounts(need: ResourceRequest) -> dict[str, float]:
    amounts = {"CPU": need.cpus, "GPU": need.gpus, "memory": need.memory or 0, **need.resources}
    return {name: much for name, much in amounts.items() if much}


def _check_amounts(options: RayOptions) -> None:
    for name, much in {"cpus": options.cpus, "gpus": options.gpus, **options.resources}.items():
        if not 0 <= much < math.inf:
            raise UsageError(f"ray: {name} = {much} must be a number from 0 on")
        if much > 1 and much != int(much):
            raise UsageError(f"ray: {name} = {much} must be a whole number; Ray has fractions below 1 only")
    if options.memory_mb is not None and options.memory_mb < 1:
        raise UsageError(f"ray: memory_mb = {options.memory_mb} must be at least 1")


class ShippedTarget(Struct, frozen=True):
    """Target as the nodes see it."""

    runtime_env: dict[str, Any]
    """Ray runtime environment that ships the code."""
    target: str
    """Target to load on a node."""


def ship_target(target: str, options: RayOptions) -> ShippedTarget:
    """Ship the folder of a file target to the nodes.

    A local cluster needs no shipping; a `working_dir` in the options replaces it.
    """
    runtime_env = dict(options.runtime_env)
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return ShippedTarget(runtime_env, target)
    path = Path(place).resolve()
    if not options.address:
        return ShippedTarget(runtime_env, f"{path}:{name}")
    if "working_dir" in runtime_env:
        return ShippedTarget(runtime_env, target)
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    return ShippedTarget({"working_dir": str(path.parent), **runtime_env}, f"{path.name}:{name}")


class RayCluster:
    """Shared connection of this process; call `acquire` and `release` in pairs.

    `owned` is True if this class opened the connection, with its runtime environment. The threads live as
    long as the connection, because processes that Ray starts here die with the thread that started them.
    """

    _shared: ClassVar[RayCluster | None] = None
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, address: str, runtime_env: dict[str, Any]) -> None:
        self.address = address
        self.runtime_env = runtime_env
        self.owned = False
        self._users = 0
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="ray")

    @classmethod
    async def acquire(cls, address: str, runtime_env: dict[str, Any]) -> RayCluster:
        """Return the shared connection; raises UsageError if it cannot be opened."""
        cluster = cls._shared
        if cluster is None:
            cluster = cls._shared = cls(address, runtime_env)
        if (cluster.address, cluster.runtime_env) != (address, runtime_env):
            has = f"the Ray cluster {cluster.address!r} with {cluster.runtime_env}"
            message = (
                f"this process is connected to {has}; {address!r} with {runtime_env} needs another process"
            )
            raise UsageError(message)
        cluster._users += 1
        try:
            await cluster.run(cluster._connect)
        except BaseException:
            await cluster.release()
            raise
        return cluster

    async def release(self) -> None:
        self._users -= 1
        if self._users:
            return
        RayCluster._shared = None
        await self.run(self._disconnect)
        self._threads.shutdown(wait=False)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def nodes(self) -> list[Mapping[str, float]]:
        """Resources of each living node."""
        return [node["Resources"] for node in ray_module().nodes() if node["Alive"]]

    def _connect(self) -> None:
        ray = ray_module()
        with self._changing:
            if not ray.is_initialized():
                self._open(ray)

    def _open(self, ray: Any) -> None:
        # Ray warns about every connection that is not opened by the main thread.
        logging.getLogger("ray").setLevel(logging.ERROR)
        usual = {"log_to_driver": False, "configure_logging": False}
        options: dict[str, Any] = {**usual, "namespace": NAMESPACE, "runtime_env": dict(self.runtime_env)}
        if self.address:
            _check_reachable(self.address)
            options["address"] = self.address
        else:
            options |= {"address": "local", "include_dashboard": False}
            options["object_store_memory"] = OBJECT_STORE_BYTES
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            message = f"the Ray cluster {self.address or 'of this machine'!r} cannot be used: {error}"
            raise UsageError(f"{message}; is it up, and of version {ray.__version__}?") from error
        self.owned = True

    def _disconnect(self) -> None:
        with self._changing:
            if self.owned:
                ray_module().shutdown()


def ray_module() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise UsageError("ray is not installed: pip install 'afield[ray]'") from error


def _check_reachable(address: str) -> None:
    """Connect to the address first, because Ray itself retries for minutes."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not colon:
        if address in ("auto", "local"):
            return
        raise UsageError(f"ray: address {address!r} must be 'auto', HOST:PORT or ray://HOST:PORT, or empty")
    if not port.isdigit():
        raise UsageError(f"ray: address {address!r} must be 'auto', HOST:PORT or ray://HOST:PORT, or empty")
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)):
            return
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error}"
        raise UsageError(
            f"{message}; start one with `ray start --head`, or leave the address empty"
        ) from error
