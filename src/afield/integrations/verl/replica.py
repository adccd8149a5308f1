"""The rollout backend `afield`: veRL starts a gateway with its engine, and agents call that.

One gateway serves a training job, however many replicas veRL counts. It is a process of its own, held by
a Ray actor: it ends when the actor does, also when that is killed. Its address and its admin key are told
to whoever asks in the same job (`gateway_of`). No GPU is taken unless `gpus` says so. A gateway that does
not start, or a model it could not follow (LoRA that is not merged), is an error before training begins.
"""

from __future__ import annotations

import asyncio
import fcntl
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import ray
from msgspec import Struct
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from afield.config import agent_environment, converted
from afield.errors import Unavailable, UsageError

START_S = 600.0  # a large model is read in this time
WHERE = "actor_rollout_ref.rollout.engine_kwargs.afield"


class GatewayOptions(Struct, frozen=True):
    """How the gateway is started; `afield gateway --help` says more of each."""

    folder: str = (
        "verl-afield"  # its store and the weights; the trainer's first rank and the engines share it
    )
    engine: str | list[str] = "torch"
    host: str = "127.0.0.1"
    port: int = 0
    public_url: str = ""
    outcomes: str = ""
    slots: int = 64
    seed: int = 0
    processes: int = 1
    gpus: float = 0.0  # that Ray gives to the embedded engine

    @property
    def engines(self) -> list[str]:
        return [self.engine] if isinstance(self.engine, str) else list(self.engine)


class Gateway(Struct, frozen=True):
    """Where the gateway of this job is, and how to speak to it."""

    url: str  # what agents are given
    local_url: str  # for this job's own processes on its machine
    admin_key: str
    model: str  # the directory it started from
    weights: str  # the directory that holds its versions


def gateway_of() -> Gateway:
    """The gateway of the present Ray job; from any of its processes, once its replicas are launched."""
    try:
        keeper = ray.get_actor(_actor_name())
    except ValueError as error:
        raise UsageError(
            "this job has no gateway of its own; set actor_rollout_ref.rollout.name=afield, and load"
            " VERL_USE_EXTERNAL_MODULES=afield.integrations.verl.plugin"
        ) from error
    return ray.get(keeper.gateway.remote(), timeout=START_S)


def _actor_name() -> str:
    """Jobs of one cluster may share a namespace."""
    return f"afield-gateway-{ray.get_runtime_context().get_job_id()}"


class Replica(RolloutReplica):
    """What veRL calls a replica; here each is a door to the one gateway of the job."""

    async def launch_servers(self) -> None:
        options = converted(dict(self.config.engine_kwargs.get("afield") or {}), GatewayOptions, WHERE)
        _refuse_adapters(self.model_config)
        model = await asyncio.to_thread(_model_directory, self.model_config.get("path"))
        keeper = GatewayKeeper.options(  # pyright: ignore[reportAttributeAccessIssue]
            name=_actor_name(),
            get_if_exists=True,
            num_gpus=options.gpus,
            max_concurrency=self.max_concurrency,
        ).remote(options, model)
        gateway: Gateway = await asyncio.wait_for(keeper.gateway.remote(), START_S)
        self.servers = [keeper]
        self._server_handle = keeper
        self._server_address = f"{gateway.url.partition('://')[2]}#{self.replica_rank}"

    async def init_standalone(self) -> None:
        """Without a placement group of GPUs: one worker without any stands for the gateway."""
        self.rollout_mode = RolloutMode.STANDALONE
        prefix = f"afield_{self.replica_rank}{self.name_suffix}"
        pool = RayResourcePool(process_on_nodes=[1], use_gpu=False, name_prefix=prefix, max_colocate_count=1)
        group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=prefix,
            use_gpu=False,
            device_name="cpu",
        )
        self.workers = group.workers
        await self.launch_servers()


@ray.remote(num_cpus=0)
class GatewayKeeper:
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
        self._gateway = Gateway(told["url"], told["local_url"], told["admin_key"], model, str(weights))

    async def gateway(self) -> Gateway:
        if (code := self._process.poll()) is not None:
            raise Unavailable(f"the gateway at {self._gateway.url} has ended with status {code}; see its log")
        return self._gateway

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """In place, as veRL expects it; see the class."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "the rollout backend 'afield' is called by agents through the gateway, not by veRL's agent loops;"
            " set actor_rollout_ref.rollout.agent.agent_loop_manager_class=afield.integrations.verl.Manager"
        )


def _refuse_adapters(model: Mapping[str, Any]) -> None:
    lora = model.get("lora") or {}
    rank = lora.get("rank", 0) or model.get("lora_rank", 0)
    if (rank or model.get("lora_adapter_path")) and not lora.get("merge", False):
        raise UsageError(
            f"LoRA of rank {rank} is not merged when veRL sends weights, so the engine would keep its base;"
            " set actor_rollout_ref.model.lora.merge=True"
        )


def _model_directory(path: str) -> str:
    local = copy_to_local(path)
    if Path(local).is_dir():
        return str(Path(local).absolute())
    from huggingface_hub import snapshot_download

    return snapshot_download(local)


def _alone(folder: Path) -> Any:
    """Kept open for as long as the gateway lives: two jobs would overwrite each other's weights."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise UsageError(f"another job uses {folder}; give this one its own: afield.folder=DIR") from error
    return lock


def _started(options: GatewayOptions, model: str, store: Path) -> subprocess.Popen[bytes]:
    """Its log goes where this actor's goes, which is what Ray shows."""
    words = ["gateway", "--model", model, "--store", str(store), "--host", options.host]
    words += ["--port", str(options.port), "--slots", str(options.slots), "--seed", str(options.seed)]
    words += ["--processes", str(options.processes), "--json", "--exit-with-parent"]
    words += [word for engine in options.engines for word in ("--engine", engine)]
    words += ["--public-url", options.public_url] if options.public_url else []
    words += ["--outcomes", options.outcomes] if options.outcomes else []
    key = f"afa-{secrets.token_urlsafe(24)}"
    return subprocess.Popen(
        [sys.executable, "-m", "afield", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=agent_environment() | {"AFIELD_ADMIN_KEY": key},
    )


def _announced(process: subprocess.Popen[bytes]) -> dict[str, str]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait()
        raise Unavailable(f"the gateway did not start, it ended with status {code}; its log says why")
    return msgspec.json.decode(line, type=dict[str, str])
