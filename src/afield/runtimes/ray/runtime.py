"""Agents on a Ray cluster: each attempt a process of its own, in nests that Ray places and accounts for.

A nest that dies (its worker, its node) takes its attempts with it, each told at once and why; nothing is
tried again here. Nests are asked for as attempts need them, come when there is room, and are given back when
idle. Nothing outlives the runtime: Ray ends the nests of a driver that is gone, even after SIGKILL.
On a cluster that others can join, any process finds the sessions of a run by the names of its nests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from afield import wire
from afield.errors import (
    AfieldError,
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    TaskFailure,
    UsageError,
    WireError,
)
from afield.interfaces.runtime import Capabilities, Exit, SessionStatus
from afield.log_tail import tail
from afield.runtimes.attempt_table import Attempts, broken
from afield.runtimes.ray.actor import RaySessionInfo, Settings
from afield.runtimes.ray.cluster import Cluster, shipped
from afield.runtimes.ray.messages import LOG_BYTES, Ended, Taken
from afield.runtimes.ray.pool import ActorPool, Handle, Lost, Place, found
from afield.settings.runtimes import RayOptions
from afield.types import Attempt, Reason

log = logging.getLogger("afield.runtimes")

IDLE_S = 60.0
TAIL_CHARS = 2_000
T = TypeVar("T")


class RayRuntime:
    """`target` is `path/to/file.py:name` or `package.module:name`. `name` is the run's, and its nests'."""

    def __init__(
        self, target: str, options: RayOptions, *, name: str, log_dir: Path, idle_s: float = IDLE_S
    ) -> None:
        self._target = target
        self._options = options
        self._name = name
        self._log_dir = log_dir
        self._idle_s = idle_s
        self._attempts = Attempts()
        self._at: dict[str, tuple[Handle, str]] = {}
        self._launches: dict[str, asyncio.Task[AfieldError | None]] = {}
        self._follows: set[asyncio.Task[None]] = set()
        self._open = False

    @property
    def capabilities(self) -> Capabilities:
        joined = bool(self._options.address)
        if self._options.memory_mb is None:
            return Capabilities(isolation="process", lists=joined, reaches=joined)
        return Capabilities(isolation="process", limits=frozenset({"memory"}), lists=joined, reaches=joined)

    async def __aenter__(self) -> Self:
        try:
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"no logs can be kept in {self._log_dir}: {error}; choose another") from error
        goods = shipped(self._target, self._options)
        self._cluster = await Cluster.acquire(self._options.address, goods.runtime_env)
        target = goods.target if self._cluster.ours else self._target
        self._group = await asyncio.TaskGroup().__aenter__()
        self._nests = ActorPool(
            self._cluster,
            self._options,
            Settings(target=target, memory_mb=self._options.memory_mb, log_dir=self._options.log_dir),
            name=self._name,
            idle_s=self._idle_s,
            group=self._group,
            wanted=self._attempts.running,
            lost=self._lose,
        )
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            for session_id in self._attempts:
                message = f"{session_id}: the runtime was closed"
                self._attempts.settle(session_id, broken(message, Reason.CANCELLED))
            adopted = [(handle, s) for s, (handle, _) in self._at.items() if handle.foreign]
            await asyncio.gather(*(self._end(handle, session_id) for handle, session_id in adopted))
            for task in (*self._launches.values(), *self._follows):
                task.cancel()
            self._nests.close()
            await self._group.__aexit__(None, None, None)
        finally:
            await self._cluster.release()

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        await self._nests.check()

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        await self._attempts.once(
            attempt.session_id, self._launches, lambda: self._task(self._launch(attempt.session_id, payload))
        )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Also what another driver launched, as long as that driver lives: Ray ends it with its driver."""
        session_id = attempt.session_id
        if self._attempts.running(session_id):
            return True
        sitting = await self._elsewhere(session_id)
        if sitting is None or not self._attempts.begin(session_id):
            return self._attempts.running(session_id)
        self._follow(sitting[0], session_id, sitting[1].where)
        return True

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        if self._attempts.finished(session_id):
            return
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        self._nests.tell()
        at = self._at.get(session_id)
        if at is None and session_id not in self._launches:
            at = await self._elsewhere(session_id)
        if at is not None:
            await self._end(at[0], session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        session_id = attempt.session_id
        if not self._attempts.running(session_id) and (sitting := await self._elsewhere(session_id)):
            return sitting[1]
        return self._live(session_id)

    async def list(self) -> list[SessionStatus]:
        ours = [self._live(session_id) for session_id in self._attempts]
        known = {live.session_id for live in ours}
        others = [live for _, live in await self._others() if live.session_id not in known]
        return [*ours, *others]

    async def logs(self, attempt: Attempt) -> str:
        """From the nest while it runs; afterwards what the nest sent home with its end."""
        session_id = attempt.session_id
        at = self._at.get(session_id)
        if at is None:
            if text := await asyncio.to_thread(tail, self._log(session_id), LOG_BYTES):
                return text
            at = await self._elsewhere(session_id)
        if at is not None:
            with contextlib.suppress(Lost):
                return await at[0].ask("logs", session_id)
        return ""

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, session_id: str, payload: dict[str, Any]) -> AfieldError | None:
        try:
            place = await self._nests.seat(session_id)
            try:
                await self._hand_over(place, session_id, payload)
            except BaseException:
                self._leave(session_id)
                raise
        except RateLimited as throttled:
            self._attempts.forget(session_id, broken(str(throttled), Reason.LAUNCH))
            return throttled
        except RolloutFailure as failure:
            self._attempts.settle(session_id, Exit(failure.failure))
            return failure
        return None

    async def _hand_over(self, place: Place, session_id: str, payload: dict[str, Any]) -> None:
        handle = place.handle
        assert handle is not None, "a nest with seats is there"
        self._at[session_id] = (handle, place.where)
        try:
            answer: Taken | Ended = await handle.ask("launch", session_id, wire.encode(payload))
        except WireError as error:
            raise TaskFailure(f"the payload of {session_id} {error}", Reason.LAUNCH) from error
        except Lost as error:
            said = f"nest {handle.name} is gone, and {session_id} with it: {error}"
            raise InfrastructureFailure(said, Reason.DIED) from error
        if isinstance(answer, Ended):
            await self._keep(answer)
            raise InfrastructureFailure(_died(answer), Reason.DIED)
        if answer.refused:
            said = f"the agent refused the payload of {session_id}: {answer.refused}"
            raise RateLimited(said) if answer.busy else TaskFailure(said, Reason.LAUNCH)
        if not self._attempts.running(session_id):
            await self._end(handle, session_id)
            raise InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)
        self._follow(handle, session_id, f"{place.where}, pid {answer.pid}")

    # --- what runs, and what has ended -----------------------------------------------------------

    def _follow(self, handle: Handle, session_id: str, where: str) -> None:
        self._at[session_id] = (handle, where)
        task = self._task(self._until_end(handle, session_id))
        self._follows.add(task)
        task.add_done_callback(self._follows.discard)

    async def _until_end(self, handle: Handle, session_id: str) -> None:
        try:
            ended = await handle.ask("ended", session_id) or Ended(session_id, "its nest forgot it")
        except Lost as error:
            self._lose(session_id, f"nest {handle.name} is gone: {error}")
        else:
            await self._keep(ended)
            shown = ended.log[-TAIL_CHARS:]
            died = broken(_died(ended), Reason.DIED, shown) if ended.died else None
            self._attempts.settle(session_id, died or Exit(log=shown))
        self._leave(session_id)

    def _lose(self, session_id: str, why: str) -> None:
        self._attempts.settle(session_id, broken(f"{session_id} died: {why}", Reason.DIED))

    def _leave(self, session_id: str) -> None:
        self._at.pop(session_id, None)
        self._nests.leave(session_id)

    async def _end(self, handle: Handle, session_id: str) -> None:
        """A nest that is gone has nothing left to end."""
        with contextlib.suppress(Lost):
            await handle.ask("stop", session_id)

    async def _keep(self, ended: Ended) -> None:
        if not ended.log:
            return
        try:
            await asyncio.to_thread(self._log(ended.session_id).write_text, ended.log)
        except OSError as error:
            log.warning("what %s printed was not kept: %s", ended.session_id, error)

    def _log(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"

    def _live(self, session_id: str) -> SessionStatus:
        _, where = self._at.get(session_id, (None, ""))
        return self._attempts.live(session_id, where, starting=session_id in self._launches)

    async def _others(self) -> list[tuple[Handle, SessionStatus]]:
        """The sessions of this run that other drivers launched. A nest that dies meanwhile has none."""
        if not self._options.address:
            return []
        handles = await found(self._cluster, f"{self._name}/", self._nests.names)
        return [pair for pairs in await asyncio.gather(*map(_sittings, handles)) for pair in pairs]

    async def _elsewhere(self, session_id: str) -> tuple[Handle, SessionStatus] | None:
        others = await self._others()
        return next(((handle, live) for handle, live in others if live.session_id == session_id), None)

    # --- small things ----------------------------------------------------------------------------

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._group.create_task(work)


async def _sittings(handle: Handle) -> list[tuple[Handle, SessionStatus]]:
    sittings: list[RaySessionInfo] = []
    with contextlib.suppress(Lost):
        sittings = await handle.ask("sessions")
    return [
        (handle, SessionStatus(session_id=s.session_id, phase=s.phase, where=s.where, since=s.since))
        for s in sittings
    ]


def _died(ended: Ended) -> str:
    last = f"; its log ends: {ended.log[-TAIL_CHARS:]}" if ended.log else ""
    return f"{ended.session_id}: {ended.died}{last}"
