"""Inline runtime: agents in threads of this process, for notebooks and tests.

`stop` cancels async agents. A sync agent runs in a thread, which cannot be killed: it runs until it returns,
and the fence rejects its outcome. Agents die with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import Any, Self

from afield.errors import RateLimited, TaskFailure, Unavailable, WireError
from afield.interfaces.runtime import Capabilities, Exit, SessionStatus
from afield.runtimes.base import BaseRuntime
from afield.sdk.agent import entry_of
from afield.sdk.deliver import deliver as deliver_to_address
from afield.sdk.runner import Runner
from afield.types import Attempt, Reason
from afield.wire import Invocation, OutcomeRecord, Submission

DELIVERY_S = 60.0
Deliver = Callable[[Invocation, OutcomeRecord], Awaitable[bool]]


class InlineRuntime(BaseRuntime):
    """Runtime without isolation.

    Outcomes go to the address in `_rollout`, or through `deliver` if it is set, e.g. to a memory transport.
    """

    def __init__(self, agent: Callable[..., Any], deliver: Deliver | None = None) -> None:
        super().__init__()
        self._entry = entry_of(agent)
        self._deliver = deliver
        self._runner: Runner | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="none")

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()

        def deliver(invocation: Invocation, record: OutcomeRecord | Submission) -> bool:
            if self._deliver is None or isinstance(record, Submission):
                return deliver_to_address(invocation, record)
            if loop.is_closed():
                raise Unavailable(f"{record.session_id} was still running when its event loop ended")
            delivery = _awaited(self._deliver(invocation, record))
            return asyncio.run_coroutine_threadsafe(delivery, loop).result(DELIVERY_S)

        def ended(session_id: str) -> None:
            # The loop is closed if the agent outlives it, e.g. in a notebook; then no task waits for the
            # exit.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._attempts.record_exit, session_id, Exit())

        self._runner = Runner(self._entry, deliver=deliver, ended=ended)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._attempts.cancel_all()
        if self._runner is not None:
            self._runner.close()

    async def check(self) -> None:
        """No-op: the agent is a function of this process."""

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if self._runner is None:
            raise RuntimeError("call launch inside 'async with runtime'")
        if not self._attempts.begin(attempt.session_id):
            return
        try:
            self._runner.accept(payload)
        except WireError as error:
            failure = TaskFailure(f"the agent refused its payload: {error}", Reason.LAUNCH)
            self._attempts.record_failed_launch(attempt.session_id, failure)
            raise failure from error
        except Unavailable as error:
            self._attempts.record_failed_launch(attempt.session_id, error)
            raise RateLimited(str(error)) from error

    async def adopt(self, attempt: Attempt) -> bool | None:
        """True only for attempts launched by this process: agents end with it."""
        return self._attempts.is_running(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        if self._runner is not None:
            self._runner.stop(session_id)

    async def status(self, attempt: Attempt) -> SessionStatus:
        return self._attempts.status(attempt.session_id, pid=os.getpid())

    async def list(self) -> list[SessionStatus]:
        return [self._attempts.status(session_id, pid=os.getpid()) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        """Always empty: agents print to this process's own output."""
        return ""


async def _awaited(value: Awaitable[bool]) -> bool:
    return await value
