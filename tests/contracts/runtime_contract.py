"""What every runtime promises. A backend is done when it passes this.

Agents are seen only by what they tell a sink over HTTP: a place may share neither files nor process ids with
us. What is checked depends on what a runtime declares it can do, never on which one it is.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process

from afield.errors import InfrastructureFailure, TaskFailure
from afield.interfaces.runtime import Capabilities, Exit, Phase
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Failure, FailureKind, Reason
from afield.wire import OutcomeRecord
from agents.places import ACTING, AGENTS, BOUND_S, Place, Spec
from agents.sink import Sink

CONTROLLER = AGENTS / "controller.py"
NOBODY = Attempt("nobody", 1)
THERE = (Phase.STARTING, Phase.RUNNING)
GONE = (Phase.ENDED, Phase.UNKNOWN)


class RuntimeContract:
    """Subclasses give `spec`, and override the `place` fixture if more must be there first.

    Where memory is limited, `spec` limits it to 512 MB or less.
    """

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        """How this runtime is built for an agent of tests/agents, with `folder` for what it writes."""
        raise NotImplementedError

    async def reap(self, place: Place, attempt: Attempt) -> None:
        """What ends a session whose controller was killed, where it outlives it."""
        session_ids = [live.session_id for live in await place.runtime.list()]
        assert attempt.session_id in session_ids or not place.runtime.capabilities.lists, session_ids
        await place.runtime.stop(attempt)

    @pytest.fixture
    async def sink(self, tmp_path: Path) -> AsyncIterator[Sink]:
        async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
            yield sink

    @pytest.fixture
    async def place(self, sink: Sink, tmp_path: Path) -> AsyncIterator[Place]:
        async with self.spec(tmp_path).build() as runtime:
            yield Place(runtime, sink.transport, sink)

    @pytest.fixture
    def can(self, place: Place) -> Capabilities:
        return place.runtime.capabilities

    # --- launching ---------------------------------------------------------------------------------

    async def test_an_agent_that_is_there_passes_the_check(self, place: Place) -> None:
        with anyio.fail_after(BOUND_S):
            await place.runtime.check()
            await place.runtime.check()

    async def test_an_attempt_runs_and_its_outcome_is_there_when_it_ends(self, place: Place) -> None:
        attempt = await place.launch({"do": "reward", "value": 0.5})
        assert (await finished(place, attempt)).failure is None
        assert await place.reward(attempt) == 0.5

    async def test_waiting_after_the_end_answers_again(self, place: Place, can: Capabilities) -> None:
        attempt = await place.launch({"do": "reward"})
        await finished(place, attempt)
        if can.tells_end:
            assert await place.wait(attempt) == await place.wait(attempt)

    async def test_launching_at_once_and_again_is_one_session(self, place: Place, sink: Sink) -> None:
        row = {"do": "sleep", "seconds": 0.5}
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(place.launch, row)
        attempt = await place.launch(row)
        assert (await finished(place, attempt)).failure is None
        assert len(sink.told("began")) == 1

    async def test_launching_what_has_ended_starts_nothing(self, place: Place, sink: Sink) -> None:
        attempt = await place.launch({"do": "reward"})
        await finished(place, attempt)
        await place.launch({"do": "reward"})
        assert (await finished(place, attempt)).failure is None
        # Another one, launched later, has begun: the repeated one would have by now.
        await finished(place, await place.launch({"do": "reward"}, "later"))
        assert len(sink.told("began", attempt.session_id)) == 1

    async def test_attempts_run_side_by_side(self, place: Place, sink: Sink) -> None:
        attempts = [await place.launch({"do": "beat"}, f"r{i}") for i in range(3)]
        for attempt in attempts:
            await sink.until_told("beat", attempt.session_id)
        last = await place.launch({"do": "reward", "value": 0.75}, "last")
        await finished(place, last)
        assert await place.reward(last) == 0.75
        await sink.until_told("beat", attempts[0].session_id)

    async def test_a_slow_start_is_waited_for(self, sink: Sink, tmp_path: Path, can: Capabilities) -> None:
        if can.isolation == "none":
            pytest.skip("nothing is started for an attempt")
        spec = self.spec(tmp_path / "slow", f"{AGENTS / 'slow_start.py'}:act")
        async with spec.build() as runtime:
            slow = Place(runtime, sink.transport, sink)
            attempt = await slow.launch({"do": "reward", "value": 0.25}, "slow")
            assert (await finished(slow, attempt)).failure is None
            assert await slow.reward(attempt) == 0.25

    # --- failing -----------------------------------------------------------------------------------

    async def test_an_agent_that_raises_is_an_outcome_and_no_runtime_failure(self, place: Place) -> None:
        attempt = await place.launch({"do": "raise"})
        assert (await finished(place, attempt)).failure is None
        failure = await failed(place, attempt)
        assert failure.kind is FailureKind.TASK
        assert "the agent broke" in failure.message

    async def test_a_payload_the_agent_refuses_fails_the_launch_at_once(self, place: Place) -> None:
        with pytest.raises(TaskFailure, match="_rollout"), anyio.fail_after(BOUND_S):
            await place.runtime.launch(Attempt("r", 1), {"do": "reward"})
        ended = await place.wait(Attempt("r", 1))
        assert ended.failure and ended.failure.reason is Reason.LAUNCH
        assert (await finished(place, await place.launch({"do": "reward"}, n=2))).failure is None

    @pytest.mark.parametrize(("do", "said"), [("exit", "3"), ("kill", "9")])
    async def test_a_runtime_process_that_dies_is_reported_with_its_last_output(
        self, place: Place, can: Capabilities, do: str, said: str
    ) -> None:
        if can.isolation == "none":
            pytest.skip("agents share a process with others, or with us")
        attempt = Attempt("r", 1)
        # It may die before its answer is out; then the launch says so.
        with contextlib.suppress(InfrastructureFailure):
            await place.launch({"do": do})
        if can.tells_end:
            failure = (await place.wait(attempt)).failure
            assert failure
            assert (failure.kind, failure.reason) == (FailureKind.INFRASTRUCTURE, Reason.DIED)
            assert (said if do == "kill" else "about to leave") in failure.message, failure.message
            if do == "exit":
                assert said in failure.message
        assert await place.decision(attempt) is None
        await place.runtime.stop(attempt)
        assert (await finished(place, await place.launch({"do": "reward"}, n=2))).failure is None

    async def test_too_much_memory_ends_the_attempt_and_is_named(
        self, place: Place, can: Capabilities
    ) -> None:
        if "memory" not in can.limits:
            pytest.skip("memory is not limited")
        attempt = Attempt("r", 1)
        with contextlib.suppress(InfrastructureFailure):
            await place.launch({"do": "eat"})
        failure = (await finished(place, attempt)).failure or await failed(place, attempt)
        assert "memory" in failure.message.lower()
        assert (await finished(place, await place.launch({"do": "reward"}, n=2))).failure is None

    # --- stopping ----------------------------------------------------------------------------------

    async def test_stopping_what_never_ran_is_harmless(self, place: Place) -> None:
        await place.runtime.stop(NOBODY)
        await place.runtime.stop(NOBODY)
        ended = await place.wait(NOBODY)
        assert ended.failure and ended.failure.kind is FailureKind.INFRASTRUCTURE

    async def test_a_hanging_attempt_ends_when_it_is_stopped(
        self, place: Place, sink: Sink, can: Capabilities
    ) -> None:
        attempt = await place.launch({"do": "beat"})
        await sink.until_told("beat")
        await place.runtime.stop(attempt)
        await place.runtime.stop(attempt)
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.CANCELLED
        if can.isolation != "none":
            await sink.until_quiet("beat")
        again = await place.launch({"do": "reward", "value": 0.25}, n=2)
        assert (await finished(place, again)).failure is None
        assert await place.reward(again) == 0.25

    async def test_stopping_an_attempt_that_has_ended_is_harmless(self, place: Place) -> None:
        attempt = await place.launch({"do": "reward"})
        await finished(place, attempt)
        await place.runtime.stop(attempt)
        await place.runtime.stop(attempt)
        assert await place.reward(attempt) == 1.0

    async def test_stopping_ends_the_children_too(self, place: Place, sink: Sink, can: Capabilities) -> None:
        if can.isolation == "none":
            pytest.skip("what an agent starts is not ours to end")
        attempt = await place.launch({"do": "brood"})
        await sink.until_told("child", times=2)
        await place.runtime.stop(attempt)
        await sink.until_quiet("child")
        await sink.until_quiet("beat")

    @pytest.mark.parametrize("stay", [True, False], ids=["stopped", "ended"])
    async def test_a_daemon_does_not_outlive_its_session(
        self, place: Place, sink: Sink, can: Capabilities, stay: bool
    ) -> None:
        if can.isolation == "none":
            pytest.skip("what an agent starts is not ours to end")
        if can.isolation == "process" and not stay:
            pytest.skip("several sessions may share a process, and what they start ends with that")
        attempt = await place.launch({"do": "daemon", "stay": stay})
        await sink.until_seen("daemon")
        if not stay:
            await finished(place, attempt)
        if stay or can.lingers:
            await place.runtime.stop(attempt)
        await sink.until_quiet("daemon")

    async def test_leaving_the_runtime_leaves_nothing_behind(
        self, sink: Sink, tmp_path: Path, can: Capabilities
    ) -> None:
        if can.isolation == "none":
            pytest.skip("a thread cannot be killed, nor what others serve")
        async with self.spec(tmp_path / "left").build() as runtime:
            leaving = Place(runtime, sink.transport, sink)
            rows = [{"do": "beat"}, {"do": "brood", "daemon": True}]
            attempts = [await leaving.launch(row, str(row["do"])) for row in rows]
            for what in ("beat", "child", "daemon"):
                await sink.until_told(what)
        for attempt in attempts:
            ended = await leaving.wait(attempt)
            assert ended.failure and ended.failure.reason is Reason.CANCELLED
        for what in ("beat", "child", "daemon"):
            await sink.until_quiet(what)

    # --- seeing ------------------------------------------------------------------------------------

    async def test_status_follows_an_attempt(self, place: Place, sink: Sink, can: Capabilities) -> None:
        assert (await place.runtime.status(NOBODY)).phase is Phase.UNKNOWN
        attempt = await place.launch({"do": "beat"})
        await sink.until_told("beat")
        live = await place.runtime.status(attempt)
        assert (live.session_id, live.phase) == (attempt.session_id, Phase.RUNNING)
        assert live.where
        await place.runtime.stop(attempt)
        if can.isolation != "none":
            await until_phase(place, attempt, GONE)

    async def test_the_list_has_what_runs_and_nothing_else(self, place: Place, sink: Sink) -> None:
        assert await place.runtime.list() == []
        first, second = [await place.launch({"do": "beat"}, name) for name in ("first", "second")]
        for attempt in (first, second):
            await sink.until_told("beat", attempt.session_id)
        listed = await place.runtime.list()
        assert sorted(live.session_id for live in listed) == ["first.1", "second.1"]
        assert {live.phase for live in listed} <= set(THERE)
        await place.runtime.stop(first)
        with anyio.fail_after(BOUND_S):
            while [live.session_id for live in await place.runtime.list()] != ["second.1"]:
                await anyio.sleep(0.05)

    async def test_what_an_agent_prints_is_in_the_log_of_its_session(
        self, place: Place, sink: Sink, can: Capabilities
    ) -> None:
        assert await place.runtime.logs(NOBODY) == ""
        attempt = await place.launch({"do": "beat", "say": "good morning"})
        await sink.until_told("beat")
        if can.isolation == "none":
            assert isinstance(await place.runtime.logs(attempt), str)
            return
        with anyio.fail_after(BOUND_S):
            while "good morning" not in await place.runtime.logs(attempt):
                await anyio.sleep(0.05)

    # --- from one process to the next ----------------------------------------------------------------

    async def test_what_runs_here_can_be_adopted_and_nothing_else(
        self, place: Place, sink: Sink, can: Capabilities
    ) -> None:
        assert await place.runtime.adopt(NOBODY) is not True
        attempt = await place.launch({"do": "beat"})
        assert await place.runtime.adopt(attempt) is True
        sink.enough(attempt.session_id)
        assert (await finished(place, attempt)).failure is None
        await place.runtime.stop(attempt)
        await until_phase(place, attempt, GONE)
        assert await place.runtime.adopt(attempt) is not True

    async def test_a_killed_controller_leaves_nothing_that_is_not_reaped(
        self, place: Place, sink: Sink, tmp_path: Path, can: Capabilities
    ) -> None:
        if can.isolation == "none":
            pytest.skip("agents end with us, or are not ours to end")
        attempt = Attempt("r", 1)
        async with controller(self.spec(tmp_path), place, {"do": "brood", "daemon": True}, attempt):
            for what in ("beat", "child", "daemon"):
                await sink.until_told(what, times=2)
        if can.outlives:
            await sink.until_told("beat", times=5)
            await self.reap(place, attempt)
        for what in ("beat", "child", "daemon"):
            await sink.until_quiet(what)

    async def test_the_next_controller_finds_what_the_killed_one_launched(
        self, place: Place, sink: Sink, tmp_path: Path, can: Capabilities
    ) -> None:
        if not can.outlives:
            pytest.skip("sessions end with their controller")
        attempt = Attempt("r", 1)
        async with controller(self.spec(tmp_path), place, {"do": "beat"}, attempt):
            await sink.until_told("beat")
        if can.reaches:
            assert (await place.runtime.status(attempt)).phase is Phase.RUNNING
        if can.lists:
            assert attempt.session_id in [live.session_id for live in await place.runtime.list()]
        assert await place.runtime.adopt(attempt) is not False
        await place.launch({"do": "beat"})
        await sink.until_told("beat", times=5)
        assert len(sink.told("began")) == 1
        await place.runtime.stop(attempt)
        if can.isolation != "none":
            await sink.until_quiet("beat")
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.CANCELLED

    async def test_closing_ends_what_was_adopted(
        self, place: Place, sink: Sink, tmp_path: Path, can: Capabilities
    ) -> None:
        if not can.outlives or can.isolation == "none":
            pytest.skip("sessions end with their controller, or are not ours to end")
        attempt = Attempt("r", 1)
        async with controller(self.spec(tmp_path), place, {"do": "beat"}, attempt):
            await sink.until_told("beat")
        async with self.spec(tmp_path).build() as runtime:
            if await runtime.adopt(attempt) is not True:
                await self.reap(place, attempt)
        await sink.until_quiet("beat")


# --- small things ------------------------------------------------------------------------------------


async def finished(place: Place, attempt: Attempt) -> Exit:
    """How an attempt ended; where only its outcome tells, until that is there."""
    if place.runtime.capabilities.tells_end:
        return await place.wait(attempt)
    with anyio.fail_after(BOUND_S):
        while await place.decision(attempt) is None:
            await anyio.sleep(0.05)
    return Exit()


async def failed(place: Place, attempt: Attempt) -> Failure:
    decision = await place.decision(attempt)
    assert isinstance(decision, OutcomeRecord) and decision.outcome.failure, decision
    return decision.outcome.failure


async def until_phase(place: Place, attempt: Attempt, phases: tuple[Phase, ...]) -> None:
    with anyio.fail_after(BOUND_S):
        while (await place.runtime.status(attempt)).phase not in phases:
            await anyio.sleep(0.05)


@contextlib.asynccontextmanager
async def controller(
    spec: Spec, place: Place, row: dict[str, object], attempt: Attempt
) -> AsyncIterator[Process]:
    """Another process that launched it. It is killed at the end of the block, as by the kernel."""
    options, payload = json.dumps(spec.options), json.dumps(place.payload(row, attempt))
    command = [sys.executable, str(CONTROLLER), spec.maker, options, attempt.rollout_id, payload]
    async with await anyio.open_process(command, stdin=None, stderr=None) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(BOUND_S):
                assert (await process.stdout.receive()).startswith(b"launched")
            yield process
        finally:
            process.kill()
