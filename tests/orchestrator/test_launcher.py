"""Launching an attempt that is given up meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from afield.interfaces import SessionCredentials, SessionSpec
from afield.orchestrator.availability import Availability
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.launcher import Launcher
from afield.orchestrator.watcher import RunningAttempt
from afield.ratelimit import Unlimited
from afield.runtimes.inline import InlineRuntime
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, Failure, FailureKind, Reason, Rollout, Task

pytestmark = pytest.mark.anyio


class BusyGateway:
    """Opens a session when it gets to it, whether or not its client is still there, as one over HTTP does."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.opened: set[str] = set()
        self._serving: set[asyncio.Task[SessionCredentials]] = set()

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        serving = asyncio.create_task(self._open(spec))
        self._serving.add(serving)
        return await asyncio.shield(serving)

    async def version(self) -> int:
        return 0

    async def _open(self, spec: SessionSpec) -> SessionCredentials:
        self.asked.set()
        await self.go_on.wait()
        assert spec.id
        self.opened.add(spec.id)
        return SessionCredentials(
            id=spec.id, api_key="k", base_url="http://x/s/r", openai_base_url="http://x/v1"
        )


async def test_an_attempt_abandoned_while_its_session_opens_ends_after_that() -> None:
    """Else the abort that follows comes first, finds no session, and the session stays open."""

    def agent(task: dict[str, Any]) -> float:
        raise AssertionError("it was given up")

    gateway: Any = BusyGateway()
    plan = RolloutConfig(exp_id="e", model_id="m", deadlines=Deadlines(attempt_timeout_s=60.0))
    async with MemoryTransport() as transport, InlineRuntime(agent, deliver=transport.deliver) as runtime:
        launcher = Launcher(
            plan,
            gateway=gateway,
            runtime=runtime,
            transport=transport,
            limiter=Unlimited(),
            gateway_calls=Availability("gateway", plan, gateway.version),
        )
        rollout = Rollout(id="r", exp_id="e", group_id="g", task=Task("t", {}))
        running = RunningAttempt(rollout, Attempt("r", 1), 0.0)
        running.draw = "r.1"
        launching = asyncio.create_task(launcher.launch(running))
        await gateway.asked.wait()
        failure = Failure(FailureKind.TASK, Reason.RAISED, "cancelled")
        running.abandon(failure)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not launching.done()
        gateway.go_on.set()
        assert await asyncio.wait_for(launching, 60) == failure
        assert gateway.opened == {"r.1"}
