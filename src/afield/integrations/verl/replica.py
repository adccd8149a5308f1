"""veRL rollout backend `afield`: a gateway with its engines.

1. One gateway serves all replicas of a training job.
2. With engine `vllm` each replica has a vLLM server: on its own GPUs if it is standalone, else on those of
   the trainer's ranks. If a job has standalone replicas, only these have servers.
3. Other engines take no GPU unless `gpus` of `actor_rollout_ref.rollout.engine_kwargs.afield` is set.
4. LoRA that is not merged is refused before training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup  # pyright: ignore[reportMissingImports]
from verl.utils.device import get_resource_name  # pyright: ignore[reportMissingImports]
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
from afield.integrations.verl.vllm_server import VllmServer, server_options
from afield.settings.values import converted

__all__ = ["GatewayActor", "GatewayInfo", "GatewayOptions", "Replica", "gateway_info"]
WHERE = "actor_rollout_ref.rollout.engine_kwargs.afield"


class Replica(RolloutReplica):
    """A veRL replica; all replicas share the job's one gateway."""

    _servers = 0
    """Number of the job's vLLM servers; 0 if replicas have none."""

    @property
    def _options(self) -> GatewayOptions:
        return converted(dict(self.config.engine_kwargs.get("afield") or {}), GatewayOptions, WHERE)

    async def init_hybrid(self, worker_group: Any) -> None:
        if self._options.starts_vllm and not self.config.nnodes:
            self._servers = worker_group.world_size // self.world_size
        await super().init_hybrid(worker_group)

    async def launch_servers(self) -> None:
        options = self._options
        _refuse_adapters(self.model_config)
        model = await asyncio.to_thread(_model_directory, self.model_config.get("path"))
        actor = GatewayActor.options(  # pyright: ignore[reportAttributeAccessIssue]
            name=actor_name(),
            get_if_exists=True,
            num_gpus=options.gpus,
            max_concurrency=self.max_concurrency,
        ).remote(options, model)
        self.servers = [actor]
        self._server_handle = actor
        self._server_address = f"{actor_name()}#{self.replica_rank}"
        if self._servers:
            url = await self._start_vllm(options, model)
            await asyncio.wait_for(
                actor.add_server.remote(self.replica_rank, url, self._servers), START_TIMEOUT_S
            )
        elif not options.starts_vllm:
            await asyncio.wait_for(actor.gateway.remote(), START_TIMEOUT_S)

    async def _start_vllm(self, options: GatewayOptions, model: str) -> str:
        """Start this replica's vLLM server on the GPUs of its workers; returns its address."""
        places = await asyncio.gather(*(worker.__ray_call__.remote(_place) for worker in self.workers))
        nodes, devices = {node for node, _ in places}, ",".join(device for _, device in places)
        if len(nodes) != 1:
            raise UsageError(
                f"replica {self.replica_rank} of {self.world_size} GPUs is on {len(nodes)} nodes; lower"
                " actor_rollout_ref.rollout.tensor_model_parallel_size, so that a server fits one node"
            )
        self._vllm = VllmServer.options(  # pyright: ignore[reportAttributeAccessIssue]
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes.pop(), soft=False)
        ).remote(
            server_options(self.config, options, model, self.replica_rank),
            devices,
            alone=sum(node["Alive"] for node in ray.nodes()) == 1,
        )
        return await asyncio.wait_for(
            self._vllm.start.remote(), options.vllm_start_timeout_s + START_TIMEOUT_S
        )

    async def init_standalone(self) -> None:
        """Reserve GPUs for a vLLM server. Without one, launch a worker without GPUs or a placement group,
        since the gateway holds the engine.
        """
        if self._options.starts_vllm:
            self._servers = self.config.nnodes * self.config.n_gpus_per_node // self.world_size
            await super().init_standalone()
            return
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


def _place(_: Any) -> tuple[str, str]:
    """Node and GPU of a worker; runs there."""
    context = ray.get_runtime_context()
    (device, *_) = context.get_accelerator_ids()[get_resource_name()]
    return context.get_node_id(), str(device)


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
