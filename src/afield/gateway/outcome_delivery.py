"""Delivers outcomes from sessions to the transport's store.

A due outcome is stored in its session's row first. Delivery runs once per session at a time, and retries
until the store answers, after a restart too. Then the row is marked accepted, or refused if the attempt
has been decided otherwise. Delivery is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

from afield.errors import AfieldError, NotFound, Unavailable
from afield.gateway import outcomes
from afield.gateway.api_error import ApiError
from afield.gateway.sessions import Session, SessionManager
from afield.gateway.store import Delivery, GatewayStore, SessionRow
from afield.interfaces import Fence, PendingAttempt, Transport
from afield.types import Attempt, Rollout, Task
from afield.utils.backoff import Backoff
from afield.wire import Invocation, OutcomeRecord

log = logging.getLogger(__name__)
DELIVER_S = 30.0
"""Timeout of one delivery, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
"""Back-off between deliveries, in seconds."""
AT_ONCE = 16
"""Concurrent deliveries of outcomes that are left."""


class OutcomeDelivery:
    """Delivers outcomes. `invocation` returns the destination of a session's outcome; the caller enters the
    transport."""

    def __init__(
        self,
        transport: Transport,
        store: GatewayStore,
        sessions: SessionManager,
        invocation: Callable[[SessionRow], Invocation],
        owns: Callable[[str], bool],
    ) -> None:
        self._transport = transport
        self._store = store
        self._sessions = sessions
        self._invocation = invocation
        self._owns = owns
        self._bringing: dict[str, asyncio.Task[str]] = {}
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._left.set()  # outcomes that an earlier gateway did not deliver
        self._chore = asyncio.create_task(self._bring_what_is_left())
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [self._chore, *self._bringing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def deliver(self, session: Session) -> None:
        """Delivers a due outcome. Raises ApiError if it is refused or the store is unavailable."""
        if session.row.delivery is Delivery.DUE:
            await self._told(session.id, self._brought(session))
        elif session.row.delivery is Delivery.REFUSED:
            await self._told(session.id, self._why(session.row, outcomes.record_of(session.row)))

    async def bring_late(self, session: Session, row: SessionRow) -> None:
        """Delivers an outcome that came after finalize; the store decides whether it counts."""
        await self._told(session.id, self._carry(row))

    async def _told(self, session_id: str, work: Awaitable[str]) -> None:
        try:
            refused = await work
        except AfieldError as error:
            raise _unavailable(session_id, error) from error
        if refused:
            raise _refused(session_id, refused)

    async def _brought(self, session: Session) -> str:
        """Returns why the outcome was refused; empty if it was accepted. Continues if the caller is
        cancelled.
        """
        task = self._bringing.get(session.id)
        if task is None:
            task = self._bringing[session.id] = asyncio.create_task(self._bring(session))
            task.add_done_callback(lambda finished: self._bringing.pop(session.id, None))
        return await asyncio.shield(task)

    async def _bring(self, session: Session) -> str:
        try:
            refused = await self._carry(session.row)
        except AfieldError:
            self._left.set()
            raise
        if refused:
            log.warning("session %s: outcome refused reason=%s", session.id, refused)
        await self._sessions.delivered(session, Delivery.REFUSED if refused else Delivery.ACCEPTED)
        return refused

    async def _carry(self, row: SessionRow) -> str:
        record = outcomes.record_of(row)
        try:
            async with asyncio.timeout(DELIVER_S):
                if await self._transport.deliver(self._invocation(row), record):
                    return ""
                return await self._why(row, record)
        except TimeoutError as error:
            raise Unavailable(
                f"the outcome store did not accept the outcome within {DELIVER_S:g} s"
            ) from error

    async def _why(self, row: SessionRow, record: OutcomeRecord) -> str:
        """Returns why a record does not count; empty if it does."""
        standing = await self._transport.decision(_waiting(row, record))
        if isinstance(standing, Fence):
            return f"the attempt was abandoned: {standing.reason}"
        same = standing is not None and standing.outcome == record.outcome
        return "" if same else "the attempt has another outcome"

    async def _bring_what_is_left(self) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            await self._left.wait()
            self._left.clear()
            failed = await self._try_all()
            if failed is None:
                backoff.reset()
                continue
            log.error("outcomes: delivery failed, retrying retry_s=%g error=%s", backoff.next_s, failed)
            self._left.set()
            await backoff.sleep()

    async def _try_all(self) -> AfieldError | None:
        """Tries all due outcomes and returns the first error."""
        try:
            due = [session_id for session_id in self._store.undelivered() if self._owns(session_id)]
            for start in range(0, len(due), AT_ONCE):
                batch = (self._bring_by_id(session_id) for session_id in due[start : start + AT_ONCE])
                for result in await asyncio.gather(*batch, return_exceptions=True):
                    if isinstance(result, BaseException):
                        raise result
        except AfieldError as error:
            return error
        return None

    async def _bring_by_id(self, session_id: str) -> None:
        try:
            session = self._sessions.get(session_id)
        except NotFound:
            return  # deleted in the meantime
        if session.row.delivery == Delivery.DUE:
            await self._brought(session)


def _waiting(row: SessionRow, record: OutcomeRecord) -> PendingAttempt:
    outcome = record.outcome
    task = Task(record.input_id, {})
    rollout = Rollout(id=outcome.rollout_id, exp_id=record.exp_id, group_id=record.group_id, task=task)
    return PendingAttempt(rollout, Attempt(outcome.rollout_id, outcome.attempt))


def _refused(session_id: str, reason: str) -> ApiError:
    message = f"the outcome of {session_id} does not count: {reason}"
    return ApiError(409, "outcome_refused", message, "it is kept apart; another attempt may be under way")


def _unavailable(session_id: str, error: AfieldError) -> ApiError:
    message = f"the outcome of {session_id} is kept here, but not yet in the store: {error}"
    return ApiError(
        503,
        "store_unavailable",
        message,
        "ask again for whether it counts; it is not lost",
        retry_after_s=1.0,
    )
