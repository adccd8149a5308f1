"""This process's connection to a Ray cluster, and what of the cluster one nest needs.

Ray has one connection per process: runtimes of the same address share it, and the last one to leave ends it;
one that the program had opened itself is used and left open. Every call to Ray is made in a thread. What can
be known to be wrong (no Ray, nobody at the address, more than any node has) is a UsageError.
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
REACH_S = 5.0
OBJECT_STORE_BYTES = 256 * 2**20
FREE_SEATS = 32  # where a session takes no CPU
T = TypeVar("T")


class Need(Struct, frozen=True, kw_only=True):
    """What a nest of `seats` sessions asks Ray for."""

    seats: int
    cpus: float
    gpus: float
    memory: int | None
    resources: Mapping[str, float]

    @classmethod
    def of(cls, options: RayOptions, seats: int) -> Need:
        return cls(
            seats=seats,
            cpus=round(options.cpus * seats, 4),
            gpus=options.gpus,
            memory=options.memory_mb * 2**20 * seats if options.memory_mb else None,
            resources=options.resources,
        )

    def fits(self, has: Mapping[str, float]) -> bool:
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory or 0, **self.resources}
        return all(has.get(name, 0) >= much for name, much in wanted.items() if much)

    @property
    def actor_options(self) -> dict[str, Any]:
        asked = {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}
        return asked if self.memory is None else {**asked, "memory": self.memory}


def need_of(options: RayOptions, nodes: list[Mapping[str, float]]) -> Need:
    """One CPU's worth of sessions to a nest, less where no node has that much. GPUs and named resources are
    not shared out, so such a session has a nest to itself.
    """
    _check_amounts(options)
    seats = 1
    if not options.gpus and not options.resources:
        seats = max(1, math.floor(1 / options.cpus + 1e-9)) if options.cpus else FREE_SEATS
    for fewer in range(seats, 0, -1):
        need = Need.of(options, fewer)
        if any(need.fits(has) for has in nodes):
            return need
    one = Need.of(options, 1)
    asked = ", ".join(f"{k} {v:g}" for k, v in _amounts(one).items())
    have = "; ".join(", ".join(f"{k} {has.get(k, 0):g}" for k in _amounts(one)) for has in nodes)
    raise UsageError(f"no node of the Ray cluster has what a session asks for ({asked}); they have: {have}")


def _amounts(need: Need) -> dict[str, float]:
    amounts = {"CPU": need.cpus, "GPU": need.gpus, "memory": need.memory or 0, **need.resources}
    return {name: much for name, much in amounts.items() if much}


def _check_amounts(options: RayOptions) -> None:
    for name, much in {"cpus": options.cpus, "gpus": options.gpus, **options.resources}.items():
        if not 0 <= much < math.inf:
            raise UsageError(f"ray: {name} = {much} must be a number from 0 on")
        if much > 1 and much != int(much):
            raise UsageError(f"ray: {name} = {much} must be a whole number; Ray divides only the first one")
    if options.memory_mb is not None and options.memory_mb < 1:
        raise UsageError(f"ray: memory_mb = {options.memory_mb} must be at least 1")


class Shipped(Struct, frozen=True):
    """What the nodes get: the runtime environment, and the target as it is called there."""

    runtime_env: dict[str, Any]
    target: str


def shipped(target: str, options: RayOptions) -> Shipped:
    """A file's folder goes to the nodes, unless the cluster is this machine or the caller ships a folder.

    Then the target is named as it is in that folder, and taken as it is.
    """
    runtime_env = dict(options.runtime_env)
    place, _, name = target.rpartition(":")
    if not place.endswith(".py"):
        return Shipped(runtime_env, target)
    path = Path(place).resolve()
    if not options.address:
        return Shipped(runtime_env, f"{path}:{name}")
    if "working_dir" in runtime_env:
        return Shipped(runtime_env, target)
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    return Shipped({"working_dir": str(path.parent), **runtime_env}, f"{path.name}:{name}")


class Cluster:
    """`acquire` and `release` in pairs. `ours` is one that we opened, with our runtime environment.

    The threads live as long as the connection: what Ray starts here dies with the thread that started it.
    """

    _shared: ClassVar[Cluster | None] = None
    _changing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, address: str, runtime_env: dict[str, Any]) -> None:
        self.address = address
        self.runtime_env = runtime_env
        self.ours = False
        self._users = 0
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="ray")

    @classmethod
    async def acquire(cls, address: str, runtime_env: dict[str, Any]) -> Cluster:
        """The shared connection. Raises UsageError where it cannot be had."""
        cluster = cls._shared
        if cluster is None:
            cluster = cls._shared = cls(address, runtime_env)
        if (cluster.address, cluster.runtime_env) != (address, runtime_env):
            has = f"the Ray cluster {cluster.address!r} with {cluster.runtime_env}"
            said = f"this process is connected to {has}; {address!r} with {runtime_env} needs another process"
            raise UsageError(said)
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
        Cluster._shared = None
        await self.run(self._disconnect)
        self._threads.shutdown(wait=False)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def nodes(self) -> list[Mapping[str, float]]:
        """What each living node has."""
        return [node["Resources"] for node in ray_module().nodes() if node["Alive"]]

    def _connect(self) -> None:
        ray = ray_module()
        with self._changing:
            if not ray.is_initialized():
                self._open(ray)

    def _open(self, ray: Any) -> None:
        # Ray warns of every connection that is not made by the main thread.
        logging.getLogger("ray").setLevel(logging.ERROR)
        usual = {"log_to_driver": False, "configure_logging": False}
        asked: dict[str, Any] = {**usual, "namespace": NAMESPACE, "runtime_env": dict(self.runtime_env)}
        if self.address:
            _reach(self.address)
            asked["address"] = self.address
        else:
            asked |= {"address": "local", "include_dashboard": False}
            asked["object_store_memory"] = OBJECT_STORE_BYTES
        try:
            ray.init(**asked)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            said = f"the Ray cluster {self.address or 'of this machine'!r} cannot be used: {error}"
            raise UsageError(f"{said}; is it up, and of version {ray.__version__}?") from error
        self.ours = True

    def _disconnect(self) -> None:
        with self._changing:
            if self.ours:
                ray_module().shutdown()


def ray_module() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise UsageError("ray is not installed: pip install 'afield[ray]'") from error


def _reach(address: str) -> None:
    """Ray itself tries for minutes."""
    host, colon, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not colon:
        if address in ("auto", "local"):
            return
        raise UsageError(f"ray: address {address!r} must be 'auto', HOST:PORT or ray://HOST:PORT, or empty")
    if not port.isdigit():
        raise UsageError(f"ray: address {address!r} must be 'auto', HOST:PORT or ray://HOST:PORT, or empty")
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), REACH_S)):
            return
    except OSError as error:
        said = f"no Ray cluster answers at {address}: {error}"
        raise UsageError(f"{said}; start one with `ray start --head`, or leave the address empty") from error
