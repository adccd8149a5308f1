"""veRL rollout backend `afield`: a gateway with its engine.

One gateway serves all replicas of a training job. It takes no GPU unless `gpus` of
`actor_rollout_ref.rollout.engine_kwargs.afield` is set. LoRA that is not merged is refused before training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.single_controller.ray import RayResourcePool, RayWorkerGroup  # pyright: ignore[reportMissingImports]
from verl.utils.fs import copy_to_local  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutMode, RolloutReplica  # pyright: ignore[reportMissingImports]

from afield.errors import UsageError
from afield.integrations.verl.gateway_actor import (
    START_TIMEOUT_S,
    GatewayActor,
    GatewayInfo,
    GatewayOptions,
    actor_name,
    gateway_info,
)
from afield.settings.values import converted

__all__ = ["GatewayActor", "GatewayInfo", "GatewayOptions", "Replica", "gateway_info"]
WHERE = "actor_rollout_ref.rollout.engine_kwargs.afield"


class Replica(RolloutReplica):
    """A veRL replica; all replicas share the job's one gateway."""

    async def launch_servers(self) -> None:
        options = converted(dict(self.config.engine_kwargs.get("afield") or {}), GatewayOptions, WHERE)
        _refuse_adapters(self.model_config)
        model = await asyncio.to_thread(_model_directory, self.model_config.get("path"))
        actor = GatewayActor.options(  # pyright: ignore[reportAttributeAccessIssue]
            name=actor_name(),
            get_if_exists=True,
            num_gpus=options.gpus,
            max_concurrency=self.max_concurrency,
        ).remote(options, model)
        gateway: GatewayInfo = await asyncio.wait_for(actor.gateway.remote(), START_TIMEOUT_S)
        self.servers = [actor]
        self._server_handle = actor
        self._server_address = f"{gateway.url.partition('://')[2]}#{self.replica_rank}"

    async def init_standalone(self) -> None:
        """Launch one worker without GPUs or a placement group, since the gateway holds the engine."""
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
