"""The nests of one runtime: asked for as sessions need seats, given back when nobody needs them.

Every nest has a task that lives as long as it. One that dies is told of with the sessions it had.
A nest that is asked for comes when a node has room for it, which may take as long as it likes; who waits for
a seat does so for a bounded time, and a cluster that is full is Throttled, not a failure.
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
from afield.runtimes.ray.actor import ForkServerActor, Settings, Standing
from afield.runtimes.ray.cluster import NAMESPACE, Cluster, Need, need_of, ray_module
from afield.settings.runtimes import RayOptions
from afield.types import Reason

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


log = logging.getLogger("afield.runtimes")

CHECK_S = 60.0
SEAT_S = 60.0
ASKED = 8  # nests that are waited for at one time
MISS_S = 0.5
LONGEST_MISS_S = 30.0
T = TypeVar("T")


class Place:
    """A nest, from before it is there until it is gone."""

    def __init__(self, name: str, seats: int) -> None:
        self.name = name
        self.seats = seats
        self.handle: Handle | None = None
        self.ready = False
        self.where = ""
        self.problem = ""
        self.sessions: set[str] = set()
        self.needed_at = asyncio.get_running_loop().time()

    @property
    def room(self) -> int:
        return self.seats - len(self.sessions)


class ActorPool:
    """`wanted` says whether a session that waits for a seat is still wanted; `lost` is told of each that died
    with its nest, and why. `close` ends them all.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: RayOptions,
        settings: Settings,
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
        self._places: dict[Place, asyncio.Task[None]] = {}
        self._seated: dict[str, Place] = {}
        self._waiting = 0
        self._need: Need | None = None
        self._misses = 0
        self._problem = ""
        self._retry_at = 0.0
        self._news = asyncio.Event()
        self._warned = False

    @property
    def names(self) -> set[str]:
        return {place.name for place in self._places}

    async def check(self) -> None:
        """Until a nest has loaded the agent. A cluster that has no room for one now is waited for later."""
        self._need = need_of(self._options, await self._cluster.run(self._cluster.nodes))
        places = list(self._places) or [self._spawn()]
        with suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                while not any(place.ready or place.problem for place in places):
                    await self._news.wait()
        for place in places:
            if place.problem:
                raise UsageError(f"{self._settings.target} cannot be started: {place.problem}")
        if not any(place.ready for place in places):
            log.warning("Ray has had no room for an agent in %g s; rollouts will wait", CHECK_S)

    async def seat(self, session_id: str) -> Place:
        """In the least occupied nest that has one, or in the next that comes."""
        self._waiting += 1
        misses = self._misses
        try:
            async with asyncio.timeout(SEAT_S):
                while True:
                    if not self._wanted(session_id):
                        said = f"{session_id} was stopped before it started"
                        raise InfrastructureFailure(said, Reason.CANCELLED)
                    able = [place for place in self._places if place.ready and place.room > 0]
                    if able:
                        return self._enter(max(able, key=lambda place: place.room), session_id)
                    if self._misses > misses and not any(place.ready for place in self._places):
                        raise InfrastructureFailure(f"no nest for the agent: {self._problem}", Reason.LAUNCH)
                    self._ask_for_more()
                    await self._change()
        except TimeoutError as error:
            said = f"Ray has no room for {session_id}; {len(self._seated)} sessions have what there is"
            raise RateLimited(said) from error
        finally:
            self._waiting -= 1

    def leave(self, session_id: str) -> None:
        """Its seat is free. Repeating is harmless."""
        if place := self._seated.pop(session_id, None):
            place.sessions.discard(session_id)
            place.needed_at = asyncio.get_running_loop().time()
            self.tell()

    def tell(self) -> None:
        """Wake everyone who waits for a change of nests or seats."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        for task in self._places.values():
            task.cancel()

    # --- small things ----------------------------------------------------------------------------

    def _enter(self, place: Place, session_id: str) -> Place:
        place.sessions.add(session_id)
        self._seated[session_id] = place
        return place

    async def _change(self) -> None:
        """Until something has changed; after a miss also until it may be time for another try."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MISS_S if self._misses else None):
                await self._news.wait()

    def _ask_for_more(self) -> None:
        """Nests for all who wait, a few at a time; after a miss not at once."""
        if self._misses and asyncio.get_running_loop().time() < self._retry_at:
            return
        coming = [place for place in self._places if not place.ready]
        while sum(place.seats for place in coming) < self._waiting and len(coming) < ASKED:
            coming.append(self._spawn())

    def _spawn(self) -> Place:
        place = Place(f"{self._name}/{secrets.token_hex(4)}", self._need.seats if self._need else 1)
        self._places[place] = self._group.create_task(self._life(place))
        return place

    async def _life(self, place: Place) -> None:
        """From the asking until nothing of it is left."""
        try:
            place.handle = await self._made(place)
            await self._serve(place, place.handle)
        except (Lost, UsageError) as error:
            place.problem = str(error)
            if not place.ready:
                self._miss(place.problem)
            for session_id in list(place.sessions):
                self._lost(session_id, f"nest {place.name} ({place.where}) is gone: {error}")
                self.leave(session_id)
        finally:
            place.ready = False
            self._places.pop(place, None)
            self.tell()
            if place.handle is not None:
                await place.handle.end()

    def _miss(self, problem: str) -> None:
        """A nest that was of no use. Each one in a row makes the next one wait longer."""
        wait_s = min(MISS_S * 2**self._misses, LONGEST_MISS_S)
        self._retry_at = asyncio.get_running_loop().time() + wait_s
        self._misses += 1
        self._problem = problem

    async def _made(self, place: Place) -> Handle:
        try:
            self._need = need_of(self._options, await self._cluster.run(self._cluster.nodes))
        except UsageError:
            # A node that is gone may come back; one that never was there will not.
            if self._need is None:
                raise
        place.seats = self._need.seats
        return await made(
            self._cluster, place.name, self._need, self._settings, runtime_env=self._options.runtime_env
        )

    async def _serve(self, place: Place, handle: Handle) -> None:
        """Until nobody has needed it for long. Raises Lost when it dies, or is of no use."""
        standing: Standing | None = await self._unless_idle(place, handle.ask("ready"))
        if standing is None:
            return
        handle.came = True
        if standing.problem:
            raise Lost(standing.problem)
        self._warn(standing)
        self._misses = 0
        place.where, place.ready = standing.where, True
        place.needed_at = asyncio.get_running_loop().time()
        self.tell()
        if (over := await self._unless_idle(place, handle.ask("over"))) is not None:
            raise Lost(over)

    async def _unless_idle(self, place: Place, asking: Coroutine[Any, Any, T]) -> T | None:
        """The answer, or None once nobody has needed the nest for long."""
        task = asyncio.create_task(asking)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=max(self._idle_s / 4, 0.05))
                if done:
                    return task.result()
                idle_s = asyncio.get_running_loop().time() - place.needed_at
                if not place.sessions and not self._waiting and idle_s > self._idle_s:
                    return None
        finally:
            task.cancel()

    def _warn(self, standing: Standing) -> None:
        if standing.threads and not self._warned:
            self._warned = True
            names = ", ".join(standing.threads)
            log.warning("the agent's module starts threads (%s); sessions are forked without them", names)
