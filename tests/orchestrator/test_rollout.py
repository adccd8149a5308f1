"""One rollout to its end: deadlines, dead agents, cancelling, throttling, parts that go away, adoption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from afield.engines.scripted import ScriptedReply
from afield.errors import InfrastructureFailure, RateLimited, RolloutFailure, TaskFailure, Unavailable
from afield.interfaces import (
    Capabilities,
    Exit,
    Fence,
    GenerateRequest,
    PendingAttempt,
    Phase,
    SessionState,
    SessionStatus,
)
from afield.orchestrator.deadlines import Deadlines, Progress, overdue_failure
from afield.ratelimit import LocalLimiter, RateLimits, Unlimited
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.sdk.heartbeat import PROCESS_HEARTBEAT
from afield.transports.stores.memory import MemoryNotifier, MemoryStore, MemoryTransport
from afield.transports.transport import StoreTransport
from afield.types import Attempt, FailureKind, Reason, Rollout, Sampling, Task
from afield.wire import OutcomeRecord
from support.in_process_collection import YES, ask_model, collection, good, waiting

pytestmark = pytest.mark.anyio
INFRA, POLICY = FailureKind.INFRASTRUCTURE, FailureKind.POLICY


def rollout(name: str = "r", n: int = 0, **rest: Any) -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": n}), **rest)


# --- deadlines -----------------------------------------------------------------------------------


def state(**known: Any) -> SessionState:
    usual: dict[str, Any] = {"id": "r.1", "phase": "open", "rollout_id": "r", "attempt": 1, "group_id": "g"}
    usual |= {"calls": 1, "turns": 1, "branches": 1, "tokens": {}, "dangling": 0, "versions": None}
    return SessionState(**{**usual, "rewards": [], "created": 0.0, "last_activity": 0.0, **known})


@pytest.mark.parametrize(
    ("deadlines", "progress", "seen", "now", "kind", "words"),
    [
        ({"rollout_timeout_s": 5}, {"rollout_started_at": 0}, None, 6, INFRA, "with all its attempts"),
        (
            {"first_call_timeout_s": 5},
            {"launched_at": 0},
            {"calls": 0},
            6,
            INFRA,
            "no model call in the first 5 s",
        ),
        ({"idle_timeout_s": 5}, {"launched_at": 0}, {"idle_s": 5.5}, 50, INFRA, "no model call for"),
        ({"attempt_timeout_s": 5}, {"launched_at": 0}, {"idle_s": 1}, 6, POLICY, "still being called"),
        ({"attempt_timeout_s": 5}, {"launched_at": 0}, {"idle_s": 70}, 6, INFRA, "70 s ago"),
        (
            {"attempt_timeout_s": 5},
            {"launched_at": 0, "queued_s": 3},
            {"idle_s": 1},
            8.1,
            POLICY,
            "still being called",
        ),
        (
            {"attempt_timeout_s": 5},
            {"launched_at": 0, "queued_s": 50},
            {"idle_s": 1},
            10.1,
            INFRA,
            "waited for an engine for 50 s",
        ),
        ({"attempt_timeout_s": 5}, {"launched_at": 0}, {"calls": 0}, 6, INFRA, "never called"),
        ({"attempt_timeout_s": 5}, {"launched_at": 0}, None, 6, INFRA, "gateway has no state"),
        (
            {"verifier_timeout_s": 5},
            {"launched_at": 0, "completed_at": 1},
            {},
            7,
            INFRA,
            "after the session was completed",
        ),
        (
            {"upload_timeout_s": 5},
            {"launched_at": 0, "ended_at": 1},
            {},
            7,
            INFRA,
            "ended without an outcome",
        ),
        (
            {"heartbeat_timeout_s": 5},
            {"launched_at": 0},
            {"unseen_s": 6.0},
            7,
            INFRA,
            "no heartbeat or model call",
        ),
    ],
)
def test_each_deadline_fails_the_attempt_with_its_name(
    deadlines: dict[str, float],
    progress: dict[str, float],
    seen: dict[str, Any] | None,
    now: float,
    kind: FailureKind,
    words: str,
) -> None:
    limits = Deadlines(**{"attempt_timeout_s": 1000.0, **deadlines})
    where = Progress(**{"rollout_started_at": 0.0, **progress})
    looked = state(**seen) if seen is not None else None
    failure = overdue_failure(limits, where, looked, now)
    assert failure and failure.kind is kind and words in failure.message
    assert overdue_failure(Deadlines(attempt_timeout_s=1000.0), where, state(), 4.0) is None


def test_queue_time_extends_an_agents_deadline_at_most_twofold() -> None:
    limits, where = Deadlines(attempt_timeout_s=5.0), Progress(rollout_started_at=0.0, launched_at=0.0)
    for told in (1.0, 3.0, 0.5):  # the gateway was started anew, and counts from nought
        where.update_queue_time(state(waited_s=told))
    assert where.queued_s == 3.5
    assert overdue_failure(limits, where, state(), 8.4) is None
    assert overdue_failure(limits, where, state(), 8.6) is not None
    where.update_queue_time(state(waited_s=100.0))
    assert overdue_failure(limits, where, state(), 9.9) is None
    assert overdue_failure(limits, where, state(), 10.1) is not None


async def test_an_agent_whose_call_waits_for_new_weights_is_not_the_policys_failure(tmp_path: Path) -> None:
    attempt_timeout_s = 3.0
    async with (
        collection(tmp_path, good) as b,
        b.runner(attempt_timeout_s=attempt_timeout_s, watch_interval_s=0.1, retries={}) as (_, runner),
    ):
        await runner.run(rollout("first"))  # the first agent of a process starts slowly
        await b.up.ask("POST", "/policy/pause", {})
        running = runner.start(rollout())
        waited_s = 0.0
        while waited_s < attempt_timeout_s and not running.done():
            await asyncio.sleep(0.1)
            waited_s = max([s.waited_s for s in (await b.up.client.states(["r.1"])).values()], default=0.0)
        await b.up.ask("POST", "/policy/resume", {})
        summary = await running
        assert summary.outcome.reward == 1.0 and summary.outcome.failure is None
        assert waited_s >= attempt_timeout_s


def test_an_agent_in_the_middle_of_a_model_call_is_neither_silent_nor_dead() -> None:
    limits = Deadlines(idle_timeout_s=1.0, heartbeat_timeout_s=1.0, first_call_timeout_s=1.0)
    busy = state(in_flight=1, idle_s=0.0, unseen_s=50.0)
    assert overdue_failure(limits, Progress(rollout_started_at=0.0, launched_at=0.0), busy, 60.0) is None


async def test_a_silent_agent_is_abandoned_and_retried(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        await ask_model(context)
        if context.session_id.endswith(".1"):
            await asyncio.sleep(3600)
        return 1.0

    async with collection(tmp_path, agent) as b, b.runner(idle_timeout_s=1.5) as (_, runner):
        summary = await runner.run(rollout())
        assert summary.outcome.reward == 1.0 and summary.attempts == 2
        (first, _) = b.run_state.attempts("r")
        assert first.failure and first.failure.reason is Reason.TIMEOUT
        assert "no model call for" in first.failure.message
        assert first.tokens > 0  # what it had sampled is known, and counted as wasted
        assert b.run_state.wasted_tokens(["r"]) == first.tokens


async def test_a_rollout_past_its_own_deadline_is_not_retried(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any]) -> float:
        await asyncio.sleep(3600)
        return 1.0

    async with collection(tmp_path, agent) as b, b.runner(rollout_timeout_s=0.5) as (_, runner):
        summary = await runner.run(rollout())
    assert summary.attempts == 1
    assert summary.outcome.failure and "with all its attempts" in summary.outcome.failure.message


async def test_a_launch_slot_that_never_becomes_free_is_a_failure(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any]) -> float:
        await asyncio.sleep(1.5)
        return 1.0

    async with (
        collection(tmp_path, agent) as b,
        b.runner(concurrency=1, queue_timeout_s=0.3) as (_, runner),
    ):
        first, second = await asyncio.gather(runner.run(rollout("a")), runner.run(rollout("b")))
    assert first.outcome.reward == 1.0
    assert second.outcome.failure and second.outcome.failure.reason is Reason.LAUNCH
    assert "raise concurrency" in second.outcome.failure.message


async def test_a_launch_that_hangs_is_cut_at_its_deadline(tmp_path: Path) -> None:
    class Slow(InlineRuntime):
        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            if attempt.n == 1:
                await asyncio.sleep(3600)
            await super().launch(attempt, payload)

    async with (
        collection(tmp_path, good) as b,
        Slow(good, deliver=b.transport.deliver) as slow,
        b.runner(runtime=slow, launch_timeout_s=1.5) as (_, runner),
    ):
        summary = await runner.run(rollout())
    assert summary.outcome.reward == 1.0 and summary.attempts == 2


# --- cancelling ----------------------------------------------------------------------------------


async def test_cancelling_ends_the_session_and_refuses_what_comes_late(tmp_path: Path) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def agent(task: dict[str, Any]) -> float:  # in a thread, which nobody can end
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(20)
        return 1.0

    async with collection(tmp_path, agent) as b, b.runner() as (_, runner):
        running = runner.start(rollout())
        await began.wait()
        runner.cancel("r", "no longer wanted")
        summary = await running
        assert summary.outcome.failure and summary.outcome.failure.reason is Reason.CANCELLED
        assert summary.attempts == 1
        assert (await b.up.client.state("r.1")).phase in ("aborted", "finalized")
        go.set()
        async with asyncio.timeout(60):
            while not await b.transport.late("exp"):
                await asyncio.sleep(0.02)
        assert await b.transport.late("exp") == [Attempt("r", 1)]
        assert isinstance(await b.transport.decision(waiting("r")), Fence)


async def test_cancelling_does_not_wait_for_a_turn_or_for_a_launch(tmp_path: Path) -> None:
    class Stuck(InlineRuntime):
        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            launching.set()
            await asyncio.Event().wait()

    class One(Unlimited):
        """The next turn never comes."""

        @asynccontextmanager
        async def launch_slot(self) -> AsyncIterator[None]:
            if launching.is_set():
                await asyncio.Event().wait()
            yield

    launching = asyncio.Event()
    transport = MemoryTransport()
    async with (
        collection(tmp_path, good) as b,
        Stuck(good, transport.deliver) as stuck,
        b.runner(runtime=stuck, limiter=One()) as (_, runner),
    ):
        first = runner.start(rollout("first"))
        await launching.wait()
        second = runner.start(rollout("second"))
        for name, running in (("first", first), ("second", second)):
            runner.cancel(name, "no longer wanted")
            summary = await asyncio.wait_for(running, 60)
            assert summary.outcome.failure and summary.outcome.failure.reason is Reason.CANCELLED
        assert (await b.up.client.state("first.1")).phase != "open"


async def test_a_rollout_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b, b.runner() as (_, runner):
        await runner.run(rollout())
        runner.cancel("r", "too late")
        assert (await runner.run(rollout())).outcome.reward == 1.0


# --- throttling ----------------------------------------------------------------------------------


async def test_a_throttled_launch_is_tried_again_and_costs_the_rollout_nothing(tmp_path: Path) -> None:
    class Picky(InlineRuntime):
        refused = 0

        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            if self.refused < 3:
                Picky.refused += 1
                raise RateLimited("too many", 0.05)
            await super().launch(attempt, payload)

    limiter = LocalLimiter(RateLimits(rate_per_s=50.0))
    async with (
        collection(tmp_path, good) as b,
        Picky(good, deliver=b.transport.deliver) as picky,
        b.runner(runtime=picky, limiter=limiter, retries={}) as (_, runner),
    ):
        summary = await runner.run(rollout())
    assert Picky.refused == 3
    assert summary.outcome.reward == 1.0 and summary.attempts == 1


# --- parts that go away --------------------------------------------------------------------------


class Shaky(MemoryTransport):
    """A store that cannot be reached for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.down = 0

    def _gone(self) -> None:
        if self.down:
            self.down -= 1
            raise Unavailable("the store does not answer; is the network up?")

    async def decision(self, waiting: PendingAttempt) -> OutcomeRecord | Fence | None:
        self._gone()
        return await super().decision(waiting)

    async def fence(self, waiting: PendingAttempt, reason: str) -> OutcomeRecord | Fence:
        self._gone()
        return await super().fence(waiting, reason)


async def test_a_store_that_becomes_unavailable_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Shaky()

    async def agent(task: dict[str, Any], context: Context) -> float:
        transport.down = 2
        return await good(task, context)

    async with (
        collection(tmp_path, agent) as b,
        transport,
        InlineRuntime(agent, deliver=transport.deliver) as runtime,
        b.runner(runtime=runtime, transport=transport, retries={}) as (_, runner),
    ):
        summary = await runner.run(rollout())
    assert summary.outcome.reward == 1.0 and summary.attempts == 1
    assert "is the network up?; tried again" in caplog.text


async def test_a_store_that_stays_unavailable_ends_the_work_with_its_name(tmp_path: Path) -> None:
    transport = Shaky()

    async def agent(task: dict[str, Any]) -> float:
        transport.down = 10**6
        return 1.0

    runtime = InlineRuntime(agent, deliver=transport.deliver)
    async with collection(tmp_path, agent) as b, transport, runtime:
        with pytest.raises(Unavailable, match="the store does not answer"):
            async with b.runner(runtime=runtime, transport=transport, unavailable_timeout_s=0.5) as (
                _,
                runner,
            ):
                await runner.run(rollout())
        transport.down = 0
        async with b.runner(runtime=runtime, transport=transport) as (_, runner):
            summary = await runner.run(rollout())  # nothing was lost
    assert summary.outcome.reward == 1.0 and summary.attempts == 1


async def test_a_gateway_that_becomes_unavailable_for_a_moment_costs_nothing(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:

        class Flaky:
            left = 3

            def __getattr__(self, name: str) -> Any:
                if name in ("open", "finalize", "states") and self.left:
                    Flaky.left -= 1
                    return _unavailable
                return getattr(b.up.client, name)

        async with b.runner(gateway=Flaky(), retries={}) as (_, runner):
            summary = await runner.run(rollout())
    assert summary.outcome.reward == 1.0 and summary.attempts == 1


async def _unavailable(*_: object) -> Any:
    raise Unavailable("the gateway does not answer")


async def test_a_session_that_the_gateway_forgot_is_no_reward(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        status, _ = await b.up.ask("DELETE", f"/sessions/{context.session_id}")
        assert status == 200
        return 1.0

    async with collection(tmp_path, agent) as b, b.runner(retries={}) as (_, runner):
        summary = await runner.run(rollout())
    assert summary.outcome.reward is None
    assert summary.outcome.failure and summary.outcome.failure.kind is INFRA


@pytest.mark.parametrize("reward", [1e39, -1e308])
async def test_a_reward_beyond_the_bound_is_that_rollouts_failure_and_names_the_setting(
    tmp_path: Path, reward: float
) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        await ask_model(context)
        return reward if task["n"] else 1.0

    async with collection(tmp_path, agent) as b, b.runner(retries={}) as (_, runner):
        summary, other = await runner.run(rollout("r", 1)), await runner.run(rollout("s"))
    assert other.outcome.reward == 1.0
    failure = summary.outcome.failure
    assert summary.outcome.reward is None
    assert failure and failure.kind is FailureKind.VERIFIER and failure.reason is Reason.REWARD
    assert "beyond max_reward = 1e+06" in failure.message


# --- after a crash -------------------------------------------------------------------------------


class Elsewhere(InlineRuntime):
    """Agents that outlive the collector; it can, or cannot, say which of them run."""

    knows = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="none", lingers=not self.knows)

    async def adopt(self, attempt: Attempt) -> bool | None:
        return self._attempts.is_running(attempt.session_id) if self.knows else None

    async def wait(self, attempt: Attempt) -> Exit:
        return await super().wait(attempt) if self.knows else await asyncio.Event().wait()  # type: ignore[return-value]


@pytest.mark.parametrize("knows", [True, False])
async def test_an_agent_that_still_runs_is_adopted_after_a_crash(tmp_path: Path, knows: bool) -> None:
    go, launched = asyncio.Event(), asyncio.Event()

    async def agent(task: dict[str, Any], context: Context) -> float:
        reward = await good(task, context)
        launched_there()
        while not go.is_set():
            await asyncio.sleep(0.02)
        return reward

    loop = asyncio.get_running_loop()

    def launched_there() -> None:
        loop.call_soon_threadsafe(launched.set)

    async with collection(tmp_path, agent) as b, Elsewhere(agent, deliver=b.transport.deliver) as runtime:
        runtime.knows = knows
        with pytest.raises(RuntimeError, match="killed"):
            async with b.runner(runtime=runtime) as (_, runner):
                runner.start(rollout())
                await launched.wait()
                raise RuntimeError("killed")
        async with b.runner(runtime=runtime) as (_, runner):
            running = runner.start(rollout())
            await asyncio.sleep(0.2)
            assert not running.done()
            go.set()
            summary = await running
        assert summary.outcome.reward == 1.0 and summary.attempts == 1
        assert len(b.run_state.attempts("r")) == 1


# --- sampling of its own -------------------------------------------------------------------------


async def test_a_greedy_rollout_is_sampled_greedily(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b, b.runner() as (_, runner):
        await runner.run(rollout(sampling=Sampling(temperature=0.0)))
        await runner.run(rollout("s"))
    (greedy,) = b.rollout_store.get("r").turns
    (usual,) = b.rollout_store.get("s").turns
    assert (greedy.sampling.temperature, usual.sampling.temperature) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("error", "same"), [(InfrastructureFailure("it broke"), True), (TaskFailure("a bad answer"), False)]
)
async def test_what_broke_around_a_rollout_does_not_redraw_it(
    tmp_path: Path, error: RolloutFailure, same: bool
) -> None:
    seeds: list[int | None] = []
    drawn: list[str] = []

    def script(call: GenerateRequest) -> ScriptedReply:
        drawn.append(call.draw)
        return YES

    async def agent(task: dict[str, Any], context: Context) -> float:
        seeds.append(context.seed)
        await ask_model(context, "one")
        await ask_model(context, "two")
        if len(seeds) == 1:
            raise error
        return 1.0

    async with collection(tmp_path, agent, script) as b, b.runner() as (_, runner):
        summary = await runner.run(rollout())
    assert summary.attempts == 2
    assert (seeds[0] == seeds[1]) is same
    assert (drawn[:2] == drawn[2:]) is same
    assert drawn[:2] == ["r.1/t1", "r.1/t2"]


# --- one rollout's trouble is its own -------------------------------------------------------------


async def test_reading_an_outcome_that_was_committed_writes_no_fence(tmp_path: Path) -> None:
    """On S3 that was one write and two reads more for every rollout."""

    class Counting(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.puts: list[str] = []
            self.gets: list[str] = []

        def put_if_absent(self, key: str, data: bytes) -> bool:
            self.puts.append(key)
            return super().put_if_absent(key, data)

        def get(self, key: str) -> bytes | None:
            self.gets.append(key)
            return super().get(key)

    store = Counting()
    transport = StoreTransport(store, MemoryNotifier())
    async with collection(tmp_path, good) as b, transport, InlineRuntime(good, transport.deliver) as runtime:
        plan = {"transport": transport, "runtime": runtime, "poll_interval_s": 600.0}
        async with b.runner(**plan) as (_, runner):
            summary = await runner.run(rollout())
    assert summary.outcome.reward == 1.0
    assert [key.split("/")[1] for key in store.puts if "r.1" in key] == ["t0", "commits"]  # the agent's own
    # Looked at when the agent ended, and when its hint came: each reads the commit; the one that finds it
    # reads the data.
    data = [key for key in store.gets if "/commits/" not in key]
    assert len(data) <= 4 and len(store.gets) <= 8


async def test_a_program_that_is_no_agent_is_not_retried(tmp_path: Path) -> None:
    class Other(InlineRuntime):
        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            raise TaskFailure("it is no rollout app", Reason.NO_AGENT)

    async with (
        collection(tmp_path, good) as b,
        Other(good) as other,
        b.runner(runtime=other) as (_, runner),
    ):
        summary = await runner.run(rollout())
    assert summary.attempts == 1
    assert summary.outcome.failure and summary.outcome.failure.reason is Reason.NO_AGENT


@pytest.mark.parametrize(("phase", "attempts"), [(Phase.RUNNING, 1), (Phase.UNKNOWN, 2)])
async def test_attempt_without_heartbeats_lives_if_its_runtime_reports_it_running(
    tmp_path: Path, phase: Phase, attempts: int
) -> None:
    """An agent that holds Python's lock for long cannot send heartbeats."""

    class Knowing(InlineRuntime):
        async def status(self, attempt: Attempt) -> SessionStatus:
            return SessionStatus(session_id=attempt.session_id, phase=phase)

    async def agent(task: dict[str, Any], context: Context) -> float:
        reward = await good(task, context)
        if context.session_id.endswith(".1"):
            headers = {"authorization": f"Bearer {context.api_key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(f"{context.base_url}/alive", json={}) as response,
            ):
                response.raise_for_status()
            PROCESS_HEARTBEAT.drop(context.session_id)  # its thread gets no turn any more
            await asyncio.sleep(3.0)
        return reward

    async with (
        collection(tmp_path, agent) as b,
        Knowing(agent, b.transport.deliver) as runtime,
        b.runner(runtime=runtime, heartbeat_timeout_s=1.5, watch_interval_s=0.1) as (_, runner),
    ):
        summary = await runner.run(rollout())
    assert (summary.outcome.reward, summary.attempts) == (1.0, attempts)


@pytest.mark.parametrize("no_turns", ["refuse", "flag"])
async def test_a_reward_without_a_model_call_is_refused_or_reported(
    no_turns: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def idle(task: dict) -> float:
        return 1.0

    async with (
        collection(tmp_path, idle) as b,
        b.runner(retries={}, no_turns=no_turns) as (_, runner),
    ):
        outcome = (await runner.start(rollout())).outcome
    if no_turns == "flag":
        assert outcome.reward == 1.0
        assert any("made no model call" in line for line in caplog.messages)
    else:
        assert outcome.reward is None and outcome.failure
        assert "made no model call" in outcome.failure.message
