"""Launcher of a pool's gateways as Ray actors.

Ray restarts nothing. The pool starts a gateway whose process ended again on its node, and one whose node is
lost on the node with the fewest gateways.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

from afield.errors import Unavailable
from afield.interfaces import GatewayEndpoint
from afield.runtimes.ray.cluster import NAMESPACE, RayCluster, ResourceRequest, ray_module
from afield.runtimes.ray.gateway_actor import GatewayHost, RayGatewayPlan
from afield.runtimes.ray.pool import ActorHandle, ActorLost
from afield.settings.runtimes import RayOptions

SCHEDULE_S = 60.0
"""Seconds until Ray has started an actor."""
PING_S = 5.0
"""Seconds for the answer of an actor whose gateway was lost."""


class RayGatewayLauncher:
    """Starts gateways on a Ray cluster. `name` is the run; actors are named after it."""

    def __init__(
        self,
        plans: Sequence[RayGatewayPlan],
        options: RayOptions,
        runtime_env: Mapping[str, Any],
        *,
        name: str,
    ) -> None:
        self._plans = plans
        self._options = options
        self._runtime_env = dict(runtime_env)
        self._name = name
        self._need = ResourceRequest(
            slots=1, cpus=options.gateway_cpus, gpus=options.gateway_gpus, memory=None, resources={}
        )
        self._actors: dict[int, ActorHandle] = {}
        self._nodes: dict[int, str] = {}
        self._urls: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        self._cluster = await RayCluster.acquire(self._options.address, self._runtime_env)
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await asyncio.gather(*(actor.end() for actor in self._actors.values()))
        finally:
            await self._cluster.release()

    async def start(self, number: int) -> GatewayEndpoint:
        timeout_s = self._plans[number].start_timeout_s + SCHEDULE_S
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._start(number)
        except ActorLost as error:
            await self._drop(number)
            raise Unavailable(f"its Ray actor is gone: {error}") from error
        except TimeoutError as error:
            await self._drop(number)
            raise Unavailable(
                f"Ray started no gateway within {timeout_s:g} s; lower ray.gateway_cpus or ray.gateway_gpus"
            ) from error
        if isinstance(answer, str):
            await self._drop(number)
            raise Unavailable(answer)
        self._urls[number] = answer.url
        return answer

    async def _start(self, number: int) -> GatewayEndpoint | str:
        avoided = ""
        if actor := self._actors.get(number):
            if await self._answers(actor):
                return await actor.ask("start")
            avoided = self._nodes[number]  # Ray may still list a lost node for seconds
            await self._drop(number)
        actor = self._actors[number] = await self._create(number, avoided)
        answer = await actor.ask("start")
        actor.started = True
        return answer

    async def _answers(self, actor: ActorHandle) -> bool:
        try:
            await asyncio.wait_for(actor.ask("ping"), PING_S)
        except (ActorLost, TimeoutError):
            return False
        return True

    async def _create(self, number: int, avoided: str) -> ActorHandle:
        living = await self._cluster.run(self._living_nodes)
        fit = [node for node, has in living.items() if self._need.fits(has)]
        if not fit:
            amounts = f"CPU {self._need.cpus:g}, GPU {self._need.gpus:g}"
            raise Unavailable(f"no node of the Ray cluster has what a gateway asks for ({amounts})")
        used = Counter(node for other, node in self._nodes.items() if other != number)
        node = self._nodes[number] = min(fit, key=lambda node: (node == avoided, used[node]))
        name = f"gateways/{self._name}/{number}/{secrets.token_hex(4)}"

        def make() -> Any:
            ray = ray_module()
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            options: dict[str, Any] = {**self._need.actor_options, "scheduling_strategy": affinity}
            if self._runtime_env and not self._cluster.owned:
                options["runtime_env"] = self._runtime_env
            return (
                ray.remote(GatewayHost)
                .options(
                    name=name,
                    namespace=NAMESPACE,
                    max_restarts=0,
                    max_task_retries=0,
                    max_concurrency=100,
                    **options,
                )
                .remote(self._plans[number], self._urls.get(number, ""))
            )

        return ActorHandle(self._cluster, name, await self._cluster.run(make))

    def _living_nodes(self) -> dict[str, Mapping[str, float]]:
        return {node["NodeID"]: node["Resources"] for node in ray_module().nodes() if node["Alive"]}

    async def _drop(self, number: int) -> None:
        """End an actor, which may no longer answer."""
        self._nodes.pop(number, None)
        if actor := self._actors.pop(number, None):
            actor.started = False
            await actor.end()

    async def ended(self, number: int) -> str:
        try:
            return await self._actors[number].ask("ended")
        except ActorLost as error:
            return str(error)
