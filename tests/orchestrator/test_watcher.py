"""AttemptWatcher: hints, sweeps and session states wake, extend or abandon running attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from afield.errors import Outage, Unavailable, root_cause
from afield.interfaces import Phase, SessionState, SessionStatus
from afield.interfaces.runtime import Capabilities
from afield.orchestrator.availability import Availability, loop_time
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.state import RunState
from afield.orchestrator.watcher import AttemptWatcher, RunningAttempt
from afield.types import Attempt, FailureKind, Reason, Rollout, Task

pytestmark = pytest.mark.anyio


class FakeGateway:
    """Gateway with the session states in `sessions`."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionState] = {}
        self.down = False
        self.broken: set[str] = set()
        """Sessions that make every request with them fail."""

    async def version(self) -> int:
        if self.down:
            raise Unavailable("the gateway is down")
        return 0

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        await self.version()
        if self.broken & set(session_ids):
            raise ValueError("a damaged session")
        return {name: self.sessions[name] for name in session_ids if name in self.sessions}

    def set_state(self, session_id: str, **fields: Any) -> None:
        state: dict[str, Any] = {
            "id": session_id,
            "phase": "open",
            "rollout_id": None,
            "attempt": None,
            "group_id": None,
            "calls": 0,
            "turns": 0,
            "branches": 0,
            "tokens": {},
            "dangling": 0,
            "versions": None,
            "rewards": [],
            "created": 0.0,
            "last_activity": 0.0,
        }
        self.sessions[session_id] = SessionState(**{**state, **fields})


class FakeTransport:
    """Transport that delivers the hints in `queue` once each, and sweeps `decided`."""

    held_s = 0.0

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Attempt] = asyncio.Queue()
        self.decided: set[Attempt] = set()
        self.acknowledged: list[Attempt] = []

    async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
        try:
            return [await asyncio.wait_for(self.queue.get(), wait_s)]
        except TimeoutError:
            return []

    async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
        self.acknowledged += attempts

    async def unacknowledged(self, exp_id: str) -> list[Attempt]:
        return []

    async def sweep(self, waiting: Sequence[Any]) -> list[Attempt]:
        return [pending.attempt for pending in waiting if pending.attempt in self.decided]

    async def decision(self, waiting: object) -> None:
        return None


class FakeRuntime:
    """Runtime that reports `phase` for every session."""

    capabilities = Capabilities(isolation="none")

    def __init__(self) -> None:
        self.phase = Phase.ENDED

    async def status(self, attempt: Attempt) -> SessionStatus:
        return SessionStatus(session_id=attempt.session_id, phase=self.phase)


class Setup:
    """A watcher with its fakes."""

    def __init__(self, run_state: RunState, **settings: Any) -> None:
        self.gateway, self.transport, self.runtime = FakeGateway(), FakeTransport(), FakeRuntime()
        self.run_state = run_state
        gateway: Any = self.gateway
        transport: Any = self.transport
        runtime: Any = self.runtime
        intervals = {"poll_interval_s": 0.05, "watch_interval_s": 0.02}
        config = RolloutConfig(exp_id="e", model_id="m", **{**intervals, **settings})
        self.watcher = AttemptWatcher(
            config,
            gateway=gateway,
            runtime=runtime,
            transport=transport,
            run_state=run_state,
            gateway_calls=Availability("the gateway", config, gateway.version),
            store_calls=Availability("the store", config, lambda: transport.decision(None)),
        )

    def launched(self, rollout_id: str = "r", ago_s: float = 0.0) -> RunningAttempt:
        """An attempt that was launched `ago_s` seconds ago."""
        rollout = Rollout(id=rollout_id, exp_id="e", group_id="g", task=Task("t", {}))
        running = RunningAttempt(rollout, Attempt(rollout_id, 1), loop_time())
        running.progress.launched_at = loop_time() - ago_s
        self.watcher.running[running.session_id] = running
        return running


@asynccontextmanager
async def watching(tmp_path: Path, **settings: Any) -> AsyncIterator[Setup]:
    """Run a watcher; raises the error that ended it."""
    with RunState(tmp_path / "state.sqlite") as run_state:
        setup = Setup(run_state, **settings)
        try:
            async with asyncio.TaskGroup() as tasks:
                setup.watcher.start(tasks)
                yield setup
                setup.watcher.close()
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# --- hints and sweeps ----------------------------------------------------------------------------


async def test_a_hint_wakes_its_attempt_and_is_kept_until_the_attempt_is_decided(tmp_path: Path) -> None:
    async with watching(tmp_path, poll_interval_s=60.0) as setup:
        running, attempt = setup.launched(), Attempt("r", 1)
        setup.transport.queue.put_nowait(attempt)
        async with asyncio.timeout(30):
            await running.changed.wait()
        assert setup.transport.acknowledged == []
        setup.watcher.used_hints.append(attempt)
        await setup.watcher.flush()
        assert setup.transport.acknowledged == [attempt]


async def test_a_hint_of_an_earlier_attempt_is_acknowledged_and_of_another_run_is_not(tmp_path: Path) -> None:
    async with watching(tmp_path) as setup:
        earlier, other = Attempt("earlier", 1), Attempt("other", 1)
        setup.run_state.begin_attempt(earlier)
        setup.transport.queue.put_nowait(other)
        setup.transport.queue.put_nowait(earlier)
        await until(lambda: setup.transport.acknowledged != [])
        assert setup.transport.acknowledged == [earlier]


async def test_a_sweep_wakes_an_attempt_whose_hint_was_lost(tmp_path: Path) -> None:
    async with watching(tmp_path) as setup:
        decided, undecided = setup.launched("a"), setup.launched("b")
        setup.transport.decided.add(Attempt("a", 1))
        async with asyncio.timeout(30):
            await decided.changed.wait()
        assert not undecided.changed.is_set()


# --- session states ------------------------------------------------------------------------------


async def test_a_completed_session_wakes_its_attempt(tmp_path: Path) -> None:
    async with watching(tmp_path) as setup:
        running = setup.launched()
        setup.gateway.set_state("r.1", phase="completed")
        async with asyncio.timeout(30):
            await running.changed.wait()
        assert running.progress.completed_at is not None and running.abandon_failure is None


async def test_an_attempt_past_a_deadline_is_abandoned(tmp_path: Path) -> None:
    async with watching(tmp_path, deadlines=Deadlines(idle_timeout_s=5.0)) as setup:
        idle, busy = setup.launched("idle"), setup.launched("busy")
        setup.gateway.set_state("idle.1", calls=1, idle_s=6.0)
        setup.gateway.set_state("busy.1", calls=1, idle_s=6.0, in_flight=1)
        await until(lambda: idle.abandon_failure is not None)
        assert idle.abandon_failure and idle.abandon_failure.reason is Reason.TIMEOUT
        assert "idle_timeout_s is 5" in idle.abandon_failure.message
        assert busy.abandon_failure is None


@pytest.mark.parametrize(("phase", "abandoned"), [(Phase.ENDED, True), (Phase.RUNNING, False)])
async def test_an_agent_without_heartbeats_is_dead_unless_its_runtime_reports_it(
    tmp_path: Path, phase: Phase, abandoned: bool
) -> None:
    async with watching(tmp_path, deadlines=Deadlines(heartbeat_timeout_s=1.0)) as setup:
        setup.runtime.phase = phase
        silent, overdue = setup.launched("silent"), setup.launched("overdue", ago_s=1000.0)
        setup.gateway.set_state("silent.1", unseen_s=2.0)
        await until(lambda: overdue.abandon_failure is not None)  # the same look has examined both
        assert (silent.abandon_failure is not None) is abandoned
        if silent.abandon_failure:
            assert silent.abandon_failure.kind is FailureKind.INFRASTRUCTURE
            assert silent.abandon_failure.reason is Reason.DIED


# --- a gateway or session that does not answer ---------------------------------------------------


async def test_an_outage_of_the_gateway_extends_the_deadlines(tmp_path: Path) -> None:
    async with watching(tmp_path) as setup:
        running = setup.launched()
        launched_at = running.progress.launched_at or 0.0
        setup.gateway.down = True
        await until(lambda: (running.progress.launched_at or 0.0) > launched_at)
        assert running.abandon_failure is None


async def test_an_outage_that_lasts_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Outage, match=r"the gateway does not answer for .* resume the run"):
        async with watching(tmp_path, unavailable_timeout_s=0.1) as setup:
            setup.launched()
            setup.gateway.down = True
            await asyncio.sleep(30)


async def test_a_session_that_breaks_requests_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    async with watching(tmp_path) as setup:
        broken, sound = setup.launched("broken"), setup.launched("sound")
        launched_at = broken.progress.launched_at or 0.0
        setup.gateway.broken = {"broken.1"}
        setup.gateway.set_state("sound.1", phase="completed")
        await until(lambda: sound.progress.completed_at is not None)
        await until(lambda: broken.extended_s > 0)
        assert (broken.progress.launched_at or 0.0) > launched_at
        assert sound.extended_s == 0 and broken.abandon_failure is None
