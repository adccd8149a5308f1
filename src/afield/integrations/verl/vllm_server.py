"""vLLM servers of veRL's replicas, one Ray actor for each.

1. A server runs on the node and GPUs of its replica's workers, and has veRL's own rollout settings.
2. It starts again on the same address if it ends, and ends with the job, also when the job is killed.

This module does not import veRL.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from msgspec import structs

from afield.engines.vllm.server import ManagedVllmEngine, VllmServerOptions
from afield.errors import Unavailable, UsageError
from afield.integrations.verl.gateway_actor import GatewayOptions
from afield.settings.environment import agent_environment

CHECK_INTERVAL_S = 5.0
"""Interval between checks of a server, in seconds."""
WHERE = "actor_rollout_ref.rollout"


@ray.remote(num_cpus=0)
class VllmServer:
    """Holds one vLLM server. It has no GPUs of its own in Ray: those of its replica's workers are given."""

    def __init__(self, options: VllmServerOptions, devices: str, *, alone: bool) -> None:
        """`alone` says that the cluster is one machine; the server then listens on its loopback only."""
        environment = {**agent_environment(), "CUDA_VISIBLE_DEVICES": devices}
        host = options.host if alone else ray.util.get_node_ip_address()
        self._engine = ManagedVllmEngine(structs.replace(options, host=host, environment=environment))

    async def start(self) -> str:
        """Start the server and wait for it; returns its address."""
        await self._engine.__aenter__()
        self._checking = asyncio.create_task(self._check())
        return self._engine.url

    async def _check(self) -> None:
        """Ask the server regularly: restarts count as failures until it answers again."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with suppress(Unavailable, OSError):
                await self._engine.info()


def server_options(rollout: Any, options: GatewayOptions, model: str, rank: int) -> VllmServerOptions:
    """Options of a replica's server from veRL's rollout settings."""
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if getattr(rollout, key) > 1:
            raise UsageError(
                f"{WHERE}.{key}={getattr(rollout, key)}: servers that afield starts split the model by"
                " tensor_model_parallel_size only; leave this key at 1"
            )
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    args = ["--max-model-len", str(longest), "--max-num-batched-tokens", str(rollout.max_num_batched_tokens)]
    # Replicas with one seed would sample the same replies to the same prompt.
    args += ["--seed", str(rollout.seed + rank)]
    args += ["--enforce-eager"] if rollout.enforce_eager else []
    return VllmServerOptions(
        python=options.vllm_python,
        model=model,
        tensor_parallel=rollout.tensor_model_parallel_size,
        memory=rollout.gpu_memory_utilization,
        dtype=rollout.dtype,
        max_seqs=rollout.max_num_seqs,
        args=(*args, *options.vllm_args),
        log=str(Path(options.folder).absolute() / "logs" / f"vllm-{rank}.log"),
        start_timeout_s=options.vllm_start_timeout_s,
    )
