"""Publishes veRL's weights to the gateway's engines through a shared directory.

Each version is a whole model directory, renamed into place and published with version = global step. Calls
in flight continue; their later tokens have the new version. An update returns when the gateway serves that
version; otherwise it raises and stops the trainer. The last two versions stay on disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.base import BaseRollout  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.utils import ensure_async_iterator  # pyright: ignore[reportMissingImports]

from afield import factory
from afield.errors import Unavailable, UsageError
from afield.gateway.client import HttpGateway
from afield.integrations.verl.gateway_actor import gateway_info
from afield.models.rounding import make_rounding, write_rounding
from afield.trainers.model_directory import copy_but_weights, replaced
from afield.trainers.publication import Rounder
from afield.types import Policy

log = logging.getLogger(__name__)
KEPT_VERSIONS = 2
SHARD_BYTES = 4 * 2**30
PUBLISHED = "published"
"""Wire format on the rollout side: the weights were published already."""
INDEX = "model.safetensors.index.json"


class ServerAdapter(BaseRollout):
    """The backend as veRL's workers see it. In synchronous mode every trainer rank calls it with the weights,
    which all ranks gather; the first rank writes and publishes them."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.sleep_level = 2
        self.replica_rank = 0
        self.is_leader_rank = _rank() == 0

    async def resume(self, tags: list[str]) -> None:
        """No-op: nothing was released."""

    async def release(self) -> None:
        """No-op: the engine is another process."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        if wire_format == PUBLISHED:
            return
        if wire_format != "named_tensors":
            raise UsageError(
                f"veRL sends weights in the form {wire_format!r}, which afield cannot publish; set"
                " actor_rollout_ref.rollout.checkpoint_engine.backend=afield"
            )
        if peft_config is not None:
            raise UsageError(
                "veRL sends LoRA adapters without the base weights; set"
                " actor_rollout_ref.model.lora.merge=True"
            )
        await send(weights, global_steps, leader=self.is_leader_rank)


@CheckpointEngineRegistry.register("afield")
class DirectoryCheckpointEngine(CheckpointEngine):
    """Checkpoint engine of the asynchronous modes: the trainer's first rank publishes."""

    wire_format = PUBLISHED

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """No-op: weights go through a directory."""

    def finalize(self) -> None:
        """No-op: nothing is held between updates."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        sent = await send(weights, global_steps, leader=self.is_master)
        metrics = {f"afield/{name}": value for name, value in sent.metrics.items()}
        return {"afield/weights_bytes": float(sent.written), **metrics} if self.is_master else {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        """Yields nothing: engines load weights from the directory."""
        for nothing in ():
            yield nothing


class PublishResult(NamedTuple):
    """Result of publishing one version."""

    written: int = 0
    """Bytes written."""
    metrics: Mapping[str, float] = {}
    """Rounding metrics; see `afield.interfaces.trainer.Publisher`."""


async def send(weights: Any, version: int | None, *, leader: bool) -> PublishResult:
    """Publish the weights. Ranks other than the first only take part in gathering them. A version is
    sent once: veRL may call this once per kind of replica."""
    if version is None:
        raise UsageError("veRL sent weights without a global step, which is needed as their policy version")
    if not leader:
        return await _drop(weights)
    gateway = await asyncio.to_thread(gateway_info)
    directory = Path(gateway.weights) / f"v{version}"
    async with HttpGateway(gateway.local_url, gateway.admin_key) as client:
        before = await client.version()
        if before == version and directory.is_dir():
            return await _drop(weights)
        _check_ours(before, version, gateway.url)
        with replaced(directory) as fresh:
            copy_but_weights(Path(gateway.model), fresh)
            reported = await client.engine_dtype()
            dtype = factory.published_dtype(gateway.engine_dtype, reported, Path(gateway.model))
            rounding = make_rounding(dtype, gateway.seed, version)
            rounder = Rounder(Path(gateway.model), rounding)
            written = await _write(weights, fresh, rounder)
            write_rounding(fresh, rounding)
            if before == version:
                await asyncio.to_thread(_compare, fresh, Path(gateway.model))
        await client.publish(Policy(Path(gateway.model).name, version), str(directory))
        if (served := await client.version()) != version:
            raise Unavailable(
                f"version {version} was published, but the gateway serves {served}; see its log"
            )
    _prune(directory.parent)
    sent = PublishResult(written, rounder.metrics())
    log.info("version %d is published: %s", version, dict(sent.metrics))
    return sent


def _check_ours(served: int, version: int, url: str) -> None:
    """Refuse engines that serve weights of another job: versions never go back."""
    if served > version or (served == version and version > 0):
        raise UsageError(
            f"the engines behind {url} serve version {served}, which this job did not publish, and its"
            f" trainer is at step {version}; start them again, so that they serve the model's own weights"
        )


async def _drop(weights: Any) -> PublishResult:
    async for _ in ensure_async_iterator(weights):
        pass
    return PublishResult()


async def _write(weights: Any, directory: Path, rounder: Rounder) -> int:
    """Write shards in the Hugging Face layout, with at most one in memory."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = held = 0

    async def close() -> None:
        await asyncio.to_thread(save_file, shard, directory / _shard(len(shards)), {"format": "pt"})
        shards.append(list(shard))

    async for name, tensor in ensure_async_iterator(weights):
        copied = rounder(name, tensor.detach()).to("cpu", copy=True).contiguous()
        if shard and held + copied.nbytes > SHARD_BYTES:
            await close()
            shard, held = {}, 0
        shard[name] = copied
        held, total = held + copied.nbytes, total + copied.nbytes
    await close()
    places = {name: _shard(n) for n, names in enumerate(shards) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=1))
    return total


def _shard(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def _compare(written: Path, start: Path) -> None:
    """Refuse a trainer that starts from other weights than the gateway's version 0. Compared in the coarser
    dtype of the two."""
    sent, served = _tensors(written), _tensors(start)
    for name in sent.keys() & served.keys():
        new, old = sent[name](), served[name]()
        coarse = min(new.dtype, old.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(new.to(coarse), old.to(coarse)):
            raise UsageError(
                f"the trainer starts with another {name!r} than {start} has, which the gateway serves;"
                " save the model as the trainer starts with it, and name that as the model's path"
            )


def _tensors(directory: Path) -> dict[str, Callable[[], Tensor]]:
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        opened = safe_open(file, framework="pt")
        tensors |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _prune(weights: Path) -> None:
    versions = sorted((path for path in weights.glob("v*")), key=lambda path: int(path.name[1:]))
    for old in versions[:-KEPT_VERSIONS]:
        shutil.rmtree(old)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
