"""One nest as a driver sees it: made, asked, found by name, and ended. No call blocks the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from afield.runtimes.ray.actor import ForkServerActor, Settings
from afield.runtimes.ray.cluster import NAMESPACE, Cluster, Need, ray_module

CLOSE_S = 10.0
AWAY_S = 30.0  # how long a nest may be out of reach before it is given up
AGAIN_S = 0.5
MESSAGE_CHARS = 800


class Lost(Exception):
    """A nest that is gone, or never came. The message says why."""


class Handle:
    """One nest. `foreign` is one that another driver made."""

    def __init__(self, cluster: Cluster, name: str, actor: Any, *, foreign: bool = False) -> None:
        self.name = name
        self.foreign = foreign
        self.came = False
        self._cluster = cluster
        self._actor = actor

    async def ask(self, verb: str, *args: Any) -> Any:
        """What the nest answers. Raises Lost; one that is out of reach for now is asked again: no harm."""
        errors = ray_module().exceptions
        loop = asyncio.get_running_loop()
        until = loop.time() + AWAY_S
        while True:
            try:
                return await _arrival(await self._cluster.run(self._send, verb, args))
            except errors.ActorUnavailableError as error:
                if loop.time() > until:
                    raise Lost(_said(error)) from error
            except errors.RayError as error:
                raise Lost(_said(error)) from error
            await asyncio.sleep(AGAIN_S)

    async def end(self) -> None:
        """Its sessions first, and then the nest itself, also where it no longer answers."""
        ray = ray_module()
        with contextlib.suppress(Lost, TimeoutError):
            async with asyncio.timeout(CLOSE_S if self.came else 0):
                await self.ask("close")
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await self._cluster.run(lambda: ray.kill(self._actor, no_restart=True))

    def _send(self, verb: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._actor, verb).remote(*args)


async def made(
    cluster: Cluster, name: str, need: Need, settings: Settings, runtime_env: Mapping[str, Any]
) -> Handle:
    """Asked for; it comes when a node has room. Spread, so that a lost node costs as little as may be."""

    def make() -> Any:
        asked: dict[str, Any] = {**need.actor_options, "scheduling_strategy": "SPREAD"}
        if runtime_env and not cluster.ours:
            asked["runtime_env"] = dict(runtime_env)
        actor: Any = ray_module().remote(ForkServerActor)
        return actor.options(
            name=name,
            namespace=NAMESPACE,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            **asked,
        ).remote(settings)

    try:
        return Handle(cluster, name, await cluster.run(make))
    except (ray_module().exceptions.RayError, ValueError, TypeError) as error:
        raise Lost(_said(error)) from error


async def found(cluster: Cluster, prefix: str, known: set[str]) -> list[Handle]:
    """The nests of a run that other drivers made."""

    def find() -> list[Handle]:
        ray = ray_module()
        handles: list[Handle] = []
        for entry in ray.util.list_named_actors(all_namespaces=True):
            name = entry["name"]
            if entry["namespace"] == NAMESPACE and name.startswith(prefix) and name not in known:
                # It may have ended since it was listed.
                with contextlib.suppress(ValueError):
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    handles.append(Handle(cluster, name, actor, foreign=True))
        return handles

    return await cluster.run(find)


async def _arrival(ref: Any) -> Any:
    """A reference's value. Giving up on it disturbs nobody else."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[Any] = loop.create_future()

    def put(told: Any) -> None:
        if arrived.done():
            return
        if (error := told.exception()) is not None:
            arrived.set_exception(error)
        else:
            arrived.set_result(told.result())

    def tell(told: Any) -> None:
        # The loop is closed when the program ends before the answer comes.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(put, told)

    ref.future().add_done_callback(tell)
    return await arrived


def _said(error: BaseException) -> str:
    """Ray's words in one line, with what they mean in front where that is hard to see."""
    text = " ".join(str(error).split())
    short = text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS]} ..."
    if "memory pressure" in text or "OOM" in text or "out of memory" in text.lower():
        return f"Ray or the kernel ended it for want of memory: {short}"
    if "node has died" in text or "node_death" in text or "NodeDied" in type(error).__name__:
        return f"its node died: {short}"
    return f"{type(error).__name__}: {short}"
