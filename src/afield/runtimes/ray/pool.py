"""Pool of Ray actors: created as sessions need slots, removed when idle.

1. Each actor has a task for its lifetime. If it dies, its sessions fail with the reason.
2. An actor starts when a node has free resources. Sessions wait for a slot for at most SLOT_TIMEOUT_S
seconds; a full cluster raises RateLimited, which is no failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from afield.errors import InfrastructureFailure, RateLimited, UsageError
from afield.runtimes.ray.actor import ActorStatus, ForkServerActor, ForkServerSettings
from afield.runtimes.ray.cluster import NAMESPACE, RayCluster, ResourceRequest, ray_module, resource_request
from afield.settings.runtimes import RayOptions
from afield.types import Reason
from afield.utils.backoff import Backoff

CLOSE_S = 10.0
UNAVAILABLE_TIMEOUT_S = 30.0  # time for which an actor may be unavailable before it counts as lost
RETRY_S = 0.5
MESSAGE_CHARS = 800


class ActorLost(Exception):
    """The actor is gone or was never created; the message says why."""


class ActorHandle:
    """Client of one actor. `from_other_driver` is True if another driver created it."""

    def __init__(
        self, cluster: RayCluster, name: str, actor: Any, *, from_other_driver: bool = False
    ) -> None:
        self.name = name
        self.from_other_driver = from_other_driver
        self.started = False
        self._cluster = cluster
        self._actor = actor

    async def ask(self, verb: str, *args: Any) -> Any:
        """Call a method; retries while the actor is unavailable, and raises ActorLost if it is gone."""
        errors = ray_module().exceptions
        loop = asyncio.get_running_loop()
        until = loop.time() + UNAVAILABLE_TIMEOUT_S
        while True:
            try:
                return await _await_ref(await self._cluster.run(self._send, verb, args))
            except errors.ActorUnavailableError as error:
                if loop.time() > until:
                    raise ActorLost(_describe(error)) from error
            except errors.RayError as error:
                raise ActorLost(_describe(error)) from error
            await asyncio.sleep(RETRY_S)

    async def end(self) -> None:
        """End the sessions, then kill the actor, even if it no longer answers."""
        ray = ray_module()
        with contextlib.suppress(ActorLost, TimeoutError):
            async with asyncio.timeout(CLOSE_S if self.started else 0):
                await self.ask("close")
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            await self._cluster.run(lambda: ray.kill(self._actor, no_restart=True))

    def _send(self, verb: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._actor, verb).remote(*args)


async def create_actor(
    cluster: RayCluster,
    name: str,
    need: ResourceRequest,
    settings: ForkServerSettings,
    runtime_env: Mapping[str, Any],
) -> ActorHandle:
    """Request an actor, which starts when a node has free resources.

    Actors are spread over nodes, so that a lost node costs few sessions.
    """

    def make() -> Any:
        options: dict[str, Any] = {**need.actor_options, "scheduling_strategy": "SPREAD"}
        if runtime_env and not cluster.owned:
            options["runtime_env"] = dict(runtime_env)
        actor: Any = ray_module().remote(ForkServerActor)
        return actor.options(
            name=name,
            namespace=NAMESPACE,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=10_000,
            **options,
        ).remote(settings)

    try:
        return ActorHandle(cluster, name, await cluster.run(make))
    except (ray_module().exceptions.RayError, ValueError, TypeError) as error:
        raise ActorLost(_describe(error)) from error


async def find_actors(cluster: RayCluster, prefix: str, own_names: set[str]) -> list[ActorHandle]:
    """Find actors of a run that other drivers created."""

    def find() -> list[ActorHandle]:
        ray = ray_module()
        handles: list[ActorHandle] = []
        for entry in ray.util.list_named_actors(all_namespaces=True):
            name = entry["name"]
            if entry["namespace"] == NAMESPACE and name.startswith(prefix) and name not in own_names:
                # The actor may have ended since it was listed.
                with contextlib.suppress(ValueError):
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    handles.append(ActorHandle(cluster, name, actor, from_other_driver=True))
        return handles

    return await cluster.run(find)


async def _await_ref(ref: Any) -> Any:
    """Await an object reference; cancelling it does not affect other waiters."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[Any] = loop.create_future()

    def put(result: Any) -> None:
        if arrived.done():
            return
        if (error := result.exception()) is not None:
            arrived.set_exception(error)
        else:
            arrived.set_result(result.result())

    def tell(result: Any) -> None:
        # The loop may be closed if the program ends before the answer arrives.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(put, result)

    ref.future().add_done_callback(tell)
    return await arrived


def _describe(error: BaseException) -> str:
    """Ray's message in one line, prefixed with the cause if it is lack of memory or a dead node."""
    text = " ".join(str(error).split())
    short = text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS]} ..."
    if "memory pressure" in text or "OOM" in text or "out of memory" in text.lower():
        return f"Ray or the kernel killed it for lack of memory: {short}"
    if "node has died" in text or "node_death" in text or "NodeDied" in type(error).__name__:
        return f"its node died: {short}"
    return f"{type(error).__name__}: {short}"


log = logging.getLogger(__name__)

CHECK_S = 60.0
SLOT_TIMEOUT_S = 60.0
MAX_PENDING_ACTORS = 8  # maximum number of actors that are requested but not ready
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
T = TypeVar("T")


class PooledActor:
    """Actor of the pool, from its request until it is gone."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        """Number of concurrent sessions."""
        self.handle: ActorHandle | None = None
        """Client of the actor; None until it is requested."""
        self.ready = False
        """Whether the actor has loaded the agent and accepts sessions."""
        self.where = ""
        """Host name and process id; empty until it is ready."""
        self.problem = ""
        """Why the actor failed; empty if it has not."""
        self.sessions: set[str] = set()
        """Ids of the sessions that hold a slot."""
        self.used_at = asyncio.get_running_loop().time()
        """Loop time of the last use, in seconds."""

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.sessions)


class ActorPool:
    """Actors of one runtime.

    `wanted` tells whether a waiting session is still to be launched. `lost` is called for each session that
    dies with its actor, with the reason. `idle_s` is the idle time in seconds after which an actor is
    removed.
    """

    def __init__(
        self,
        cluster: RayCluster,
        options: RayOptions,
        settings: ForkServerSettings,
        *,
        name: str,
        idle_s: float,
        group: asyncio.TaskGroup,
        wanted: Callable[[str], bool],
        lost: Callable[[str, str], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._settings = settings
        self._name = name
        self._idle_s = idle_s
        self._group = group
        self._wanted = wanted
        self._lost = lost
        self._actors: dict[PooledActor, asyncio.Task[None]] = {}
        self._actor_of: dict[str, PooledActor] = {}
        self._waiting = 0
        self._need: ResourceRequest | None = None
        self._failed_starts = 0
        self._backoff = Backoff(BACKOFF_S, MAX_BACKOFF_S)
        self._problem = ""
        self._retry_at = 0.0
        self._news = asyncio.Event()
        self._threads_warned = False

    @property
    def names(self) -> set[str]:
        return {actor.name for actor in self._actors}

    async def check(self) -> None:
        """Wait until an actor has loaded the agent; raises UsageError if it fails.

        A full cluster only causes a warning.
        """
        self._need = resource_request(self._options, await self._cluster.run(self._cluster.nodes))
        actors = list(self._actors) or [self._spawn()]
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                while not any(actor.ready or actor.problem for actor in actors):
                    await self._news.wait()
        for actor in actors:
            if actor.problem:
                raise UsageError(f"{self._settings.target} cannot be started: {actor.problem}")
        if not any(actor.ready for actor in actors):
            log.warning("no Ray actor started within %g s; rollouts wait for free resources", CHECK_S)

    async def acquire_slot(self, session_id: str) -> PooledActor:
        """Wait for a slot in the actor with the most free ones."""
        self._waiting += 1
        failed_starts = self._failed_starts
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                while True:
                    if not self._wanted(session_id):
                        message = f"{session_id} was stopped before it started"
                        raise InfrastructureFailure(message, Reason.CANCELLED)
                    able = [actor for actor in self._actors if actor.ready and actor.free_slots > 0]
                    if able:
                        return self._enter(max(able, key=lambda actor: actor.free_slots), session_id)
                    if self._failed_starts > failed_starts and not any(actor.ready for actor in self._actors):
                        raise InfrastructureFailure(
                            f"no actor could load the agent: {self._problem}", Reason.LAUNCH
                        )
                    self._ask_for_more()
                    await self._change()
        except TimeoutError as error:
            held = f"{len(self._actor_of)} sessions hold all slots"
            raise RateLimited(f"{session_id} waited {SLOT_TIMEOUT_S:g} s for a Ray slot; {held}") from error
        finally:
            self._waiting -= 1

    def leave(self, session_id: str) -> None:
        """Release the session's slot. Repeating is harmless."""
        if actor := self._actor_of.pop(session_id, None):
            actor.sessions.discard(session_id)
            actor.used_at = asyncio.get_running_loop().time()
            self.tell()

    def tell(self) -> None:
        """Wake all tasks that wait for a change of actors or slots."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        for task in self._actors.values():
            task.cancel()

    # --- helpers ---------------------------------------------------------------------------------

    def _enter(self, actor: PooledActor, session_id: str) -> PooledActor:
        actor.sessions.add(session_id)
        self._actor_of[session_id] = actor
        return actor

    async def _change(self) -> None:
        """Wait for a change; after a failed start, at most BACKOFF_S seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BACKOFF_S if self._failed_starts else None):
                await self._news.wait()

    def _ask_for_more(self) -> None:
        """Request actors for all waiting sessions, a few at a time, with back-off after failures."""
        if self._failed_starts and asyncio.get_running_loop().time() < self._retry_at:
            return
        coming = [actor for actor in self._actors if not actor.ready]
        while sum(actor.slots for actor in coming) < self._waiting and len(coming) < MAX_PENDING_ACTORS:
            coming.append(self._spawn())

    def _spawn(self) -> PooledActor:
        actor = PooledActor(f"{self._name}/{secrets.token_hex(4)}", self._need.slots if self._need else 1)
        self._actors[actor] = self._group.create_task(self._run_actor(actor))
        return actor

    async def _run_actor(self, actor: PooledActor) -> None:
        """Run one actor from its request to its end."""
        try:
            actor.handle = await self._create_actor(actor)
            await self._serve(actor, actor.handle)
        except (ActorLost, UsageError) as error:
            actor.problem = str(error)
            if not actor.ready:
                self._record_failed_start(actor.problem)
            for session_id in list(actor.sessions):
                self._lost(session_id, f"actor {actor.name} ({actor.where}) is gone: {error}")
                self.leave(session_id)
        finally:
            actor.ready = False
            self._actors.pop(actor, None)
            self.tell()
            if actor.handle is not None:
                await actor.handle.end()

    def _record_failed_start(self, problem: str) -> None:
        """Store why an actor failed to start; consecutive failures back off exponentially."""
        self._failed_starts += 1
        self._retry_at = asyncio.get_running_loop().time() + self._backoff.advance()
        self._problem = problem

    async def _create_actor(self, actor: PooledActor) -> ActorHandle:
        try:
            self._need = resource_request(self._options, await self._cluster.run(self._cluster.nodes))
        except UsageError:
            # A lost node may come back; a node that never existed does not.
            if self._need is None:
                raise
        actor.slots = self._need.slots
        return await create_actor(
            self._cluster, actor.name, self._need, self._settings, runtime_env=self._options.runtime_env
        )

    async def _serve(self, actor: PooledActor, handle: ActorHandle) -> None:
        """Wait until the actor has been idle for `idle_s` seconds.

        Raises ActorLost if it dies or cannot serve.
        """
        standing: ActorStatus | None = await self._unless_idle(actor, handle.ask("ready"))
        if standing is None:
            return
        handle.started = True
        if standing.problem:
            raise ActorLost(standing.problem)
        self._warn(standing)
        self._failed_starts = 0
        self._backoff.reset()
        actor.where, actor.ready = standing.where, True
        actor.used_at = asyncio.get_running_loop().time()
        self.tell()
        if (over := await self._unless_idle(actor, handle.ask("over"))) is not None:
            raise ActorLost(over)

    async def _unless_idle(self, actor: PooledActor, asking: Coroutine[Any, Any, T]) -> T | None:
        """Await a call; None once the actor has been idle for `idle_s` seconds."""
        task = asyncio.create_task(asking)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=max(self._idle_s / 4, 0.05))
                if done:
                    return task.result()
                idle_s = asyncio.get_running_loop().time() - actor.used_at
                if not actor.sessions and not self._waiting and idle_s > self._idle_s:
                    return None
        finally:
            task.cancel()

    def _warn(self, standing: ActorStatus) -> None:
        if standing.threads and not self._threads_warned:
            self._threads_warned = True
            names = ", ".join(standing.threads)
            log.warning("the agent's module starts threads (%s); sessions are forked without them", names)
