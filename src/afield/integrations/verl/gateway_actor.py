"""The process that holds a job's gateway, and where everybody in the job learns of it.

The gateway is a process of its own; a Ray actor holds its standard input, so it ends when the actor does,
also when that is killed. One job has one gateway. Two jobs that would write into one folder are refused. A
gateway that does not start is an error with its exit status, and its log is where Ray shows the actor's.
Nothing here needs veRL: an actor that only waits should not have to load it.
"""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec
import ray  # pyright: ignore[reportMissingImports]
from msgspec import Struct

from afield import factory
from afield.errors import Unavailable, UsageError
from afield.private_files import private_directory
from afield.settings.environment import Environment, agent_environment
from afield.settings.gateway import GatewaySettings
from afield.settings.trainer import EngineDtype

START_S = 600.0  # a large model is read in this time
LOOK_S = 0.5
EVERYWHERE = ("0.0.0.0", "::")


class GatewayOptions(Struct, frozen=True):
    """How the gateway is started; `afield gateway --help` says more of each. The trainer's first rank, the
    gateway and its engines have to see the same `folder`: weights go through it."""

    folder: str = "verl-afield"
    engine: str | list[str] = "torch"
    host: str = "127.0.0.1"
    port: int = 0
    public_url: str = ""
    outcomes: str = ""
    slots: int = 64
    seed: int = 0
    engine_dtype: EngineDtype = "auto"
    """Dtype in which engines serve and weights are published; auto asks them."""
    processes: int = 1
    gpus: float = 0.0  # that Ray gives to the embedded engine

    @property
    def engines(self) -> list[str]:
        return [self.engine] if isinstance(self.engine, str) else list(self.engine)


class GatewayInfo(Struct, frozen=True):
    """Where the gateway of this job is, and how to speak to it."""

    url: str  # what agents are given
    local_url: str  # for this job's own processes
    admin_key: str
    model: str  # the directory it started from
    weights: str  # the directory that holds its versions
    seed: int = 0
    """Seed of the job, by which published weights are rounded."""
    engine_dtype: str = "auto"
    """Dtype in which weights are published; auto asks the engines."""


def gateway_info() -> GatewayInfo:
    """The gateway of the present Ray job; from any of its processes, once its replicas are launched."""
    return ray.get(gateway_actor().gateway.remote(), timeout=START_S)


def gateway_actor() -> Any:
    """The actor that holds it."""
    try:
        return ray.get_actor(actor_name())
    except ValueError as error:
        raise UsageError(
            "this job has no gateway of its own; set actor_rollout_ref.rollout.name=afield, and load"
            " VERL_USE_EXTERNAL_MODULES=afield.integrations.verl.plugin"
        ) from error


def actor_name() -> str:
    """Jobs of one cluster may share a namespace."""
    return f"afield-gateway-{ray.get_runtime_context().get_job_id()}"


@ray.remote(num_cpus=0)
class GatewayActor:
    """Holds the gateway's process. What veRL asks of a server between steps needs nothing done: weights
    change under calls in flight, and the engine's caches go with the weights they belong to."""

    def __init__(self, options: GatewayOptions, model: str) -> None:
        folder = Path(options.folder).absolute()
        self._lock = _alone(folder)
        weights = folder / "weights"
        shutil.rmtree(weights, ignore_errors=True)
        weights.mkdir(parents=True)
        self._process = _started(options, model, folder / f"store-{time.strftime('%Y%m%d-%H%M%S')}")
        told = _announced(self._process)
        ours = told["local_url"]
        if options.host in EVERYWHERE:
            ours = f"http://{ray.util.get_node_ip_address()}:{urlsplit(ours).port}"
        self._gateway = GatewayInfo(
            told["url"],
            ours,
            told["admin_key"],
            model,
            str(weights),
            seed=options.seed,
            engine_dtype=options.engine_dtype,
        )

    async def gateway(self) -> GatewayInfo:
        if self._process.poll() is not None:
            raise Unavailable(self._ended())
        return self._gateway

    async def death(self) -> str:
        """Returns when the gateway has ended, and says how."""
        while self._process.poll() is None:
            await asyncio.sleep(LOOK_S)
        return self._ended()

    def _ended(self) -> str:
        code = self._process.poll()
        return f"the gateway at {self._gateway.url} has ended with status {code}; see its log"

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """In place, as veRL expects it; see the class."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the rollout backend 'afield' is called by agents through the gateway, not by veRL's agent loops;"
            " set actor_rollout_ref.rollout.agent.agent_loop_manager_class=afield.integrations.verl.Manager"
        )


def _alone(folder: Path) -> Any:
    """Kept open for as long as the gateway lives: two jobs would overwrite each other's weights."""
    private_directory(folder, ("lock",))
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UsageError(f"another job uses {folder}; give this one its own: afield.folder=DIR") from error
    return lock


def _started(options: GatewayOptions, model: str, store: Path) -> subprocess.Popen[bytes]:
    """Its log goes where this actor's goes, which is what Ray shows."""
    settings = GatewaySettings(
        model=model,
        engine=tuple(options.engines),
        store=str(store),
        host=options.host,
        port=options.port,
        public_url=options.public_url,
        admin_key=f"afa-{secrets.token_urlsafe(24)}",
        outcomes=options.outcomes or Environment.read().outcomes,
        processes=options.processes,
        slots=options.slots,
        seed=options.seed,
        engine_dtype=options.engine_dtype,
    )
    process = subprocess.Popen(
        factory.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=agent_environment()
    )
    assert process.stdin is not None
    process.stdin.write(settings.to_json() + b"\n")
    process.stdin.flush()
    return process


def _announced(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise Unavailable(f"the gateway did not start, it ended with status {code}; its log says why")
    return msgspec.json.decode(line, type=dict[str, str])
