"""Ray runtime: one process per attempt, in actors that Ray schedules.

1. An actor that dies, with its worker or node, fails its attempts with the reason. This runtime retries
nothing.
2. Actors are created as attempts need them and removed when idle.
3. No session outlives the runtime: Ray ends the actors of a driver that is gone, even after SIGKILL.
4. On a cluster that other processes can join, they find the sessions of a run by the names of its actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

from afield.errors import (
    InfrastructureFailure,
    RateLimited,
    TaskFailure,
)
from afield.interfaces.runtime import Capabilities, Exit, SessionStatus
from afield.runtimes.base import BaseRuntime, failed_exit, make_log_dir
from afield.runtimes.invocations import encode_payload
from afield.runtimes.ray.actor import ForkServerSettings, RaySessionInfo
from afield.runtimes.ray.cluster import RayCluster, ship_target
from afield.runtimes.ray.messages import LOG_BYTES, SessionAccepted, SessionExited
from afield.runtimes.ray.pool import ActorHandle, ActorLost, ActorPool, PooledActor, find_actors
from afield.settings.runtimes import RayOptions
from afield.types import Attempt, Reason
from afield.utils.log_tail import tail

log = logging.getLogger(__name__)

IDLE_S = 60.0
TAIL_CHARS = 2_000
T = TypeVar("T")


class RayRuntime(BaseRuntime):
    """Runs agents on a Ray cluster.

    `target` is `path/to/file.py:name` or `package.module:name`. `name` is the run and the prefix of its
    actors' names. `idle_s` is the idle time in seconds after which an actor is removed.
    """

    def __init__(
        self, target: str, options: RayOptions, *, name: str, log_dir: Path, idle_s: float = IDLE_S
    ) -> None:
        super().__init__()
        self._target = target
        self._options = options
        self._name = name
        self._log_dir = log_dir
        self._idle_s = idle_s
        self._sessions: dict[str, tuple[ActorHandle, str]] = {}
        self._follows: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> Capabilities:
        joined = bool(self._options.address)
        if self._options.memory_mb is None:
            return Capabilities(isolation="process", lists=joined, reaches=joined)
        return Capabilities(isolation="process", limits=frozenset({"memory"}), lists=joined, reaches=joined)

    async def __aenter__(self) -> Self:
        make_log_dir(self._log_dir)
        goods = ship_target(self._target, self._options)
        self._cluster = await RayCluster.acquire(self._options.address, goods.runtime_env)
        target = goods.target if self._cluster.owned else self._target
        self._group = await asyncio.TaskGroup().__aenter__()
        self._pool = ActorPool(
            self._cluster,
            self._options,
            ForkServerSettings(
                target=target, memory_mb=self._options.memory_mb, log_dir=self._options.log_dir
            ),
            name=self._name,
            idle_s=self._idle_s,
            group=self._group,
            wanted=self._attempts.is_running,
            lost=self._fail,
        )
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            self._attempts.cancel_all()
            adopted = [(handle, s) for s, (handle, _) in self._sessions.items() if handle.from_other_driver]
            await asyncio.gather(*(self._end(handle, session_id) for handle, session_id in adopted))
            for task in (*self._attempts.launches.values(), *self._follows):
                task.cancel()
            self._pool.close()
            await self._group.__aexit__(None, None, None)
        finally:
            await self._cluster.release()

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        await self._pool.check()

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Also adopts attempts of another driver while that driver lives; Ray ends them with it."""
        session_id = attempt.session_id
        if self._attempts.is_running(session_id):
            return True
        other = await self._other_session(session_id)
        if other is None or not self._attempts.begin(session_id):
            return self._attempts.is_running(session_id)
        self._follow(other[0], session_id, other[1].where)
        return True

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        if self._attempts.has_finished(session_id):
            return
        self._attempts.record_stop(session_id)
        self._pool.tell()
        at = self._sessions.get(session_id)
        if at is None and session_id not in self._attempts.launches:
            at = await self._other_session(session_id)
        if at is not None:
            await self._end(at[0], session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        session_id = attempt.session_id
        if not self._attempts.is_running(session_id) and (other := await self._other_session(session_id)):
            return other[1]
        return self._status(session_id)

    async def list(self) -> list[SessionStatus]:
        ours = [self._status(session_id) for session_id in self._attempts]
        own_ids = {live.session_id for live in ours}
        others = [live for _, live in await self._other_sessions() if live.session_id not in own_ids]
        return [*ours, *others]

    async def logs(self, attempt: Attempt) -> str:
        """Log from the actor while the session runs, then the copy that came with its end."""
        session_id = attempt.session_id
        at = self._sessions.get(session_id)
        if at is None:
            if text := await asyncio.to_thread(tail, self._log(session_id), LOG_BYTES):
                return text
            at = await self._other_session(session_id)
        if at is not None:
            with contextlib.suppress(ActorLost):
                return await at[0].ask("logs", session_id)
        return ""

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        place = await self._pool.acquire_slot(attempt.session_id)
        try:
            await self._hand_over(place, attempt.session_id, payload)
        except BaseException:
            self._leave(attempt.session_id)
            raise

    async def _hand_over(self, place: PooledActor, session_id: str, payload: dict[str, Any]) -> None:
        handle = place.handle
        assert handle is not None, "an actor with free slots has a handle"
        self._sessions[session_id] = (handle, place.where)
        try:
            body = encode_payload(session_id, payload)
            answer: SessionAccepted | SessionExited = await handle.ask("launch", session_id, body)
        except ActorLost as error:
            message = f"actor {handle.name} is gone, and {session_id} with it: {error}"
            raise InfrastructureFailure(message, Reason.DIED) from error
        if isinstance(answer, SessionExited):
            await self._save_log(answer)
            raise InfrastructureFailure(_died(answer), Reason.DIED)
        if answer.refused:
            message = f"the agent refused the payload of {session_id}: {answer.refused}"
            raise RateLimited(message) if answer.busy else TaskFailure(message, Reason.LAUNCH)
        if not self._attempts.is_running(session_id):
            await self._end(handle, session_id)
        self._attempts.check_not_stopped(session_id)
        self._follow(handle, session_id, f"{place.where}, pid {answer.pid}")

    # --- exit detection --------------------------------------------------------------------------

    def _follow(self, handle: ActorHandle, session_id: str, where: str) -> None:
        self._sessions[session_id] = (handle, where)
        task = self._task(self._until_end(handle, session_id))
        self._follows.add(task)
        task.add_done_callback(self._follows.discard)

    async def _until_end(self, handle: ActorHandle, session_id: str) -> None:
        try:
            ended = await handle.ask("ended", session_id) or SessionExited(
                session_id, "its actor has no record of it"
            )
        except ActorLost as error:
            self._fail(session_id, f"actor {handle.name} is gone: {error}")
        else:
            await self._save_log(ended)
            log_tail = ended.log[-TAIL_CHARS:]
            died = failed_exit(_died(ended), Reason.DIED, log_tail) if ended.died else None
            self._attempts.record_exit(session_id, died or Exit(log=log_tail))
        self._leave(session_id)

    def _fail(self, session_id: str, why: str) -> None:
        self._attempts.record_exit(session_id, failed_exit(f"{session_id} died: {why}", Reason.DIED))

    def _leave(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._pool.leave(session_id)

    async def _end(self, handle: ActorHandle, session_id: str) -> None:
        """Stop a session; harmless if its actor is gone."""
        with contextlib.suppress(ActorLost):
            await handle.ask("stop", session_id)

    async def _save_log(self, ended: SessionExited) -> None:
        if not ended.log:
            return
        try:
            await asyncio.to_thread(self._log(ended.session_id).write_text, ended.log)
        except OSError as error:
            log.warning("what %s printed was not kept: %s", ended.session_id, error)

    def _log(self, session_id: str) -> Path:
        return self._log_dir / f"{session_id}.log"

    def _status(self, session_id: str) -> SessionStatus:
        _, where = self._sessions.get(session_id, (None, ""))
        return self._attempts.status(session_id, where, starting=session_id in self._attempts.launches)

    async def _other_sessions(self) -> list[tuple[ActorHandle, SessionStatus]]:
        """Sessions of this run that other drivers launched."""
        if not self._options.address:
            return []
        handles = await find_actors(self._cluster, f"{self._name}/", self._pool.names)
        return [pair for pairs in await asyncio.gather(*map(_list_sessions, handles)) for pair in pairs]

    async def _other_session(self, session_id: str) -> tuple[ActorHandle, SessionStatus] | None:
        others = await self._other_sessions()
        return next(((handle, live) for handle, live in others if live.session_id == session_id), None)

    # --- helpers ---------------------------------------------------------------------------------

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._group.create_task(work)


async def _list_sessions(handle: ActorHandle) -> list[tuple[ActorHandle, SessionStatus]]:
    infos: list[RaySessionInfo] = []
    with contextlib.suppress(ActorLost):
        infos = await handle.ask("sessions")
    return [
        (handle, SessionStatus(session_id=s.session_id, phase=s.phase, where=s.where, since=s.since))
        for s in infos
    ]


def _died(ended: SessionExited) -> str:
    last = f"; its log ends: {ended.log[-TAIL_CHARS:]}" if ended.log else ""
    return f"{ended.session_id}: {ended.died}{last}"
