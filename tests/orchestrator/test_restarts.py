"""Collection across restarts: shared run state, bounded waits, adopted attempts, gateway outages."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from afield.errors import RateLimited, Unavailable
from afield.interfaces import Exit, SessionRecord
from afield.orchestrator.state import RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.types import (
    Attempt,
    FailureKind,
    Reason,
    Rollout,
    Task,
)
from support.in_process_collection import ask_model, collection, good

pytestmark = pytest.mark.anyio


def rollout(name: str = "r", **rest: Any) -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": 0}), **rest)


# --- run state ----------------------------------------------------------------------------------


def test_one_run_state_may_be_written_by_the_loop_and_by_a_thread_at_once(tmp_path: Path) -> None:
    """A step is noted from a thread, in one transaction, while the loop notes attempts and groups."""
    with RunState(tmp_path / "run_state.sqlite") as run_state:
        rollouts = [f"g-r{k}" for k in range(200)]
        errors: list[BaseException] = []

        def learn() -> None:
            try:
                for step in range(1, 40):
                    run_state.finish_step(step, [f"t{step}"], [f"{r}-{step}" for r in rollouts])
            except BaseException as error:  # noqa: BLE001  told below
                errors.append(error)

        learning = threading.Thread(target=learn)
        learning.start()
        position = 0
        while learning.is_alive():
            run_state.begin_group(f"g{position}", position, 0)
            run_state.begin_attempt(Attempt(f"g{position}-r0", 1))
            run_state.complete_group(f"g{position}", [f"g{position}-r0"], None, None)
            position += 1
        learning.join()
        assert not errors
        assert len(run_state.trained_rollouts()) == 39 * 200
        assert len(run_state.pending_groups()) == position


def test_run_state_that_cannot_be_written_raises_unavailable_without_blocking_others(tmp_path: Path) -> None:
    path = tmp_path / "run_state.sqlite"
    with (
        RunState(path) as run_state,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other,
    ):
        run_state.begin_group("g", 0, 0)
        other.execute("DROP TABLE attempts")
        other.execute("CREATE TRIGGER full BEFORE INSERT ON members BEGIN SELECT no_such_function(); END")
        with pytest.raises(Unavailable, match="make room"):
            run_state.begin_attempt(Attempt("r", 1))
        with pytest.raises(Unavailable, match="run_state"):
            run_state.complete_group("g", ["r"], None, None)
        other.execute("DELETE FROM groups")  # no transaction was left open


# --- waiting -------------------------------------------------------------------------------------


async def never(task: dict[str, Any]) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def test_a_cancel_reaches_a_rollout_that_waits_for_a_slot(tmp_path: Path) -> None:
    async with collection(tmp_path, never) as b, b.runner(concurrency=1) as (_, runner):
        first, second = runner.start(rollout("first")), runner.start(rollout("second"))
        third = runner.start(rollout("third"))
        runner.cancel("third", "not even begun")
        await asyncio.sleep(0.1)
        runner.cancel("second", "no longer wanted")
        for name, task in (("second", second), ("third", third)):
            summary = await asyncio.wait_for(asyncio.shield(task), 60)
            assert summary.outcome.failure and summary.outcome.failure.reason is Reason.CANCELLED, name
        assert not first.done()
        runner.cancel("first", "enough")
        await first
        assert await b.up.client.states(["second.1", "third.1"]) == {}  # nothing was opened for them


async def test_the_queue_deadline_counts_over_all_refusals(tmp_path: Path) -> None:
    class Full(InlineRuntime):
        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            raise RateLimited("no room", 0.05)

    async with (
        collection(tmp_path, good) as b,
        Full(good, b.transport.deliver) as full,
        b.runner(runtime=full, queue_timeout_s=0.5, retries={}) as (_, runner),
    ):
        summary = await asyncio.wait_for(runner.run(rollout()), 60)
    assert summary.outcome.failure and "queue_timeout_s" in summary.outcome.failure.message


async def test_closing_that_is_cut_short_leaves_no_task_behind(tmp_path: Path) -> None:
    class Stuck(InlineRuntime):
        async def stop(self, attempt: Attempt) -> None:
            await asyncio.sleep(3600)

    async with collection(tmp_path, never) as b, Stuck(never, b.transport.deliver) as stuck:
        before = asyncio.all_tasks()

        async def life() -> None:
            async with b.runner(runtime=stuck, attempt_timeout_s=0.2, retries={}) as (_, runner):
                await runner.run(rollout())

        living = asyncio.create_task(life())
        while b.run_state.rollout_summary("r") is None:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.1)
        living.cancel()  # as Ctrl-C does while agents are being ended
        with pytest.raises(asyncio.CancelledError):
            await living
        left = {task for task in asyncio.all_tasks() - before if "_tear_down" in str(task.get_coro())}
        left |= {task for task in asyncio.all_tasks() - before if "AttemptWatcher" in str(task.get_coro())}
        assert not left


# --- sessions that are lost, agents that are found again -----------------------------------------


async def test_a_rollout_whose_session_the_gateway_lost_is_tried_again(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        reward = await good(task, context)
        if context.session_id.endswith(".1"):
            await b.up.ask("DELETE", f"/sessions/{context.session_id}")
        return reward

    async with collection(tmp_path, agent) as b, b.runner() as (_, runner):
        summary = await runner.run(rollout())
        assert summary.outcome.reward == 1.0 and summary.attempts == 2
        assert [f.attempts for f in b.seen.finished] == [2]  # told of once
        (first, _) = b.run_state.attempts("r")
        assert first.failure and first.failure.reason is Reason.ENGINE


async def test_one_session_that_cannot_be_read_costs_one_attempt_and_not_the_run(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:

        class Spoilt:
            def __getattr__(self, name: str) -> Any:
                return getattr(b.up.client, name)

            async def finalize(self, session_id: str) -> SessionRecord:
                if session_id == "r.1":
                    raise Unavailable("500: the turns of r.1 cannot be read")
                return await b.up.client.finalize(session_id)

        async with b.runner(gateway=Spoilt(), unavailable_timeout_s=0.3) as (_, runner):
            summary = await runner.run(rollout())
        assert summary.outcome.reward == 1.0 and summary.attempts == 2


async def test_a_finished_rollout_that_is_on_no_disk_any_more_is_run_again(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        async with b.runner() as (_, runner):
            await runner.run(rollout())
        b.rollout_store.remove("r")
        async with b.runner() as (_, runner):
            assert (await runner.run(rollout())).attempts == 1  # the gateway still has it
        b.rollout_store.remove("r")
        await b.up.ask("DELETE", "/sessions/r.1")
        async with b.runner() as (_, runner):
            summary = await runner.run(rollout())
        assert summary.outcome.reward == 1.0 and summary.attempts == 2
        assert b.rollout_store.get("r").outcome == summary.outcome
        assert b.run_state.rollout_summary("r") == summary


class Elsewhere(InlineRuntime):
    """Agents that outlive the collector."""

    async def adopt(self, attempt: Attempt) -> bool | None:
        return self._attempts.is_running(attempt.session_id)


async def test_adopted_attempt_keeps_its_original_deadline(tmp_path: Path) -> None:
    async with collection(tmp_path, never) as b, Elsewhere(never, b.transport.deliver) as there:
        for _ in range(4):
            with pytest.raises(RuntimeError, match="killed"):
                async with b.runner(runtime=there, attempt_timeout_s=2.0) as (_, runner):
                    runner.start(rollout())
                    await asyncio.sleep(0.6)
                    raise RuntimeError("killed")
        (first, *_) = b.run_state.attempts("r")
        assert first.failure and "no outcome within 2 s" in first.failure.message


async def test_what_an_attempt_cost_that_a_restart_gave_up_is_counted(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        reward = await good(task, context)
        if context.session_id.endswith(".1"):
            requested.set()
            await asyncio.sleep(3600)
        return reward

    requested = threading.Event()
    async with collection(tmp_path, agent) as b:
        with pytest.raises(RuntimeError, match="killed"):
            async with b.runner() as (_, runner):
                runner.start(rollout())
                await asyncio.to_thread(requested.wait, 20)
                raise RuntimeError("killed")
        async with InlineRuntime(agent, b.transport.deliver) as another, b.runner(runtime=another) as two:
            summary = await two[1].run(rollout())
        assert summary.attempts == 2
        assert b.run_state.wasted_tokens(["r"]) > 0


# --- a gateway that goes away --------------------------------------------------------------------


async def test_time_without_a_gateway_is_not_held_against_a_rollout(tmp_path: Path) -> None:
    """Nor is it the policy's failure."""
    away, requested, back = asyncio.Event(), threading.Event(), threading.Event()

    async def agent(task: dict[str, Any], context: Context) -> float:
        reward = float(await ask_model(context) == "Yes.")
        requested.set()
        await asyncio.to_thread(back.wait, 60)
        await ask_model(context, "again")
        return reward

    async with collection(tmp_path, agent) as b:

        class Away:
            def __getattr__(self, name: str) -> Any:
                return _unavailable if name == "states" and away.is_set() else getattr(b.up.client, name)

        async with b.runner(gateway=Away(), attempt_timeout_s=2.0, watch_interval_s=0.1, retries={}) as (
            _,
            runner,
        ):
            running = runner.start(rollout())
            assert await asyncio.to_thread(requested.wait, 60)
            away.set()
            await asyncio.sleep(2.5)
            away.clear()
            back.set()
            summary = await running
    assert summary.outcome.failure is None and summary.outcome.reward == 1.0


async def test_a_gateway_that_stays_unavailable_ends_the_work_with_its_name(tmp_path: Path) -> None:
    async with collection(tmp_path, never) as b:

        class Away:
            def __getattr__(self, name: str) -> Any:
                away = name in ("states", "version")  # nobody is answered
                return _unavailable if away else getattr(b.up.client, name)

        with pytest.raises(Unavailable, match="does not answer"):
            async with b.runner(gateway=Away(), watch_interval_s=0.1, unavailable_timeout_s=0.5) as (
                _,
                runner,
            ):
                await runner.run(rollout())


async def test_a_gateway_that_hangs_does_not_stop_the_clock_of_agents_that_ended(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], context: Context) -> float:
        return await good(task, context)

    class Lost(InlineRuntime):
        """Ends well, and its outcome never comes."""

        async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
            self._attempts.begin(attempt.session_id)
            self._attempts.record_exit(attempt.session_id, Exit())

    async with collection(tmp_path, agent) as b, Lost(agent, b.transport.deliver) as lost:

        class Hanging:
            def __getattr__(self, name: str) -> Any:
                return _hanging if name == "states" else getattr(b.up.client, name)

        limits: dict[str, Any] = {"upload_timeout_s": 0.3, "watch_interval_s": 0.05, "retries": {}}
        async with b.runner(gateway=Hanging(), runtime=lost, **limits) as (_, runner):
            summary = await asyncio.wait_for(runner.run(rollout()), 60)
    assert summary.outcome.failure and summary.outcome.failure.kind is FailureKind.INFRASTRUCTURE
    assert "without an outcome" in summary.outcome.failure.message


async def _unavailable(*_: object) -> Any:
    raise Unavailable("the gateway does not answer")


async def _hanging(*_: object) -> Any:
    await asyncio.sleep(3600)
