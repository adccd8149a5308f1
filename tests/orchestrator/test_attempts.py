"""Collection: every attempt decided once, failures retried by class, groups complete or explained."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from afield.engines.scripted import ScriptedEngine
from afield.errors import InfrastructureFailure, TaskFailure, VerifierFailure
from afield.interfaces import Capabilities
from afield.orchestrator.state import RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, FailureKind, Reason
from afield.wire import OutcomeRecord
from support.gateways import running
from support.in_process_collection import YES, Collection, ask_model, collection, good, waiting

pytestmark = pytest.mark.anyio


async def test_groups_come_complete_with_rewards_and_trajectories(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        groups = await b.collect(tasks=3, rollouts=4)
    assert [g.task_id for g in groups] == ["t0", "t1", "t2"]
    for i, group in enumerate(groups):
        assert [f.outcome.reward for f in group.finished] == [1 / (1 + i)] * 4
        assert all(len(f.trajectories) == 1 and f.attempts == 1 for f in group.finished)
    assert len(b.seen.finished) == 12


@pytest.mark.parametrize(
    ("error", "kind", "attempts"),
    [
        (TaskFailure("no such table"), FailureKind.TASK, 2),
        (KeyError("x"), FailureKind.TASK, 2),
        (VerifierFailure("grader died"), FailureKind.VERIFIER, 2),
        (InfrastructureFailure("disk full"), FailureKind.INFRASTRUCTURE, 4),
    ],
)
async def test_failures_are_retried_by_class_within_their_budget(
    tmp_path: Path, error: Exception, kind: FailureKind, attempts: int
) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        raise error

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(rollouts=1)
    (finished,) = group.finished
    assert finished.outcome.failure and finished.outcome.failure.kind is kind
    assert finished.outcome.reward is None
    assert finished.attempts == attempts
    assert [again for _, again in b.seen.ended] == [True] * (attempts - 1) + [False]
    assert group.unusable_because(2)


async def test_a_retry_has_a_fresh_session_and_only_it_counts(tmp_path: Path) -> None:
    tries: Counter[str] = Counter()

    async def agent(task: dict[str, Any], rollout: Context) -> float:
        await ask_model(rollout)
        tries[rollout.rollout_id] += 1
        if tries[rollout.rollout_id] == 1:
            raise RuntimeError("not yet")
        return 1.0

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect()
        for finished in group.finished:
            assert finished.outcome.session_id.endswith(".2")
            assert len(finished.turns) == 1
            assert (await b.up.client.state(finished.rollout.id + ".1")).turns == 1
    assert len(tries) == 2


async def test_bad_results_are_the_verifiers_failure(tmp_path: Path) -> None:
    results = {0: float("nan"), 1: "great", 2: None}

    async def agent(task: dict[str, Any]) -> Any:
        return results[task["n"]]

    async with collection(tmp_path, agent) as b:
        groups = await b.collect(tasks=3, rollouts=1, retries={})
    failures = [g.finished[0].outcome.failure for g in groups]
    assert [f.kind for f in failures if f] == [FailureKind.VERIFIER] * 3
    assert "nan" in failures[0].message
    assert "great" in failures[1].message


async def test_an_agent_that_never_returns_is_cut_at_its_deadline(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        await asyncio.sleep(3600)
        return 1.0

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(attempt_timeout_s=0.3, retries={})
    for finished in group.finished:
        failure = finished.outcome.failure
        assert failure and (failure.kind, failure.reason) == (FailureKind.INFRASTRUCTURE, Reason.TIMEOUT)
        assert "never called" in failure.message


async def test_looping_with_the_model_until_the_deadline_is_the_policys_failure(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        while True:
            await ask_model(rollout)
            await asyncio.sleep(0.05)

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(attempt_timeout_s=3.0, active_s=2.5)
    for finished in group.finished:
        failure = finished.outcome.failure
        assert failure and (failure.kind, failure.reason) == (FailureKind.POLICY, Reason.TIMEOUT)
        assert finished.attempts == 1
        assert finished.outcome.reward_or_floor(0.0) == 0.0
        assert finished.trajectories
    assert group.unusable_because(2) is None


async def test_an_outcome_after_the_fence_is_refused(tmp_path: Path) -> None:
    late = asyncio.Event()
    answers: list[bool] = []

    class Slow(MemoryTransport):
        async def deliver(self, invocation: Any, record: OutcomeRecord) -> bool:
            await late.wait()
            answers.append(await super().deliver(invocation, record))
            return answers[-1]

    transport = Slow()
    runtime = InlineRuntime(good, deliver=transport.deliver)
    async with running(ScriptedEngine(lambda _: YES), tmp_path / "g") as up, transport, runtime:
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            b = Collection(tmp_path, up, transport, run_state, runtime)
            (group,) = await b.collect(rollouts=1, attempt_timeout_s=1.0, active_s=0.01, retries={})
            late.set()
            for _ in range(3000):
                if answers:
                    break
                await asyncio.sleep(0.02)
    assert group.finished[0].outcome.failure
    assert answers == [False]


async def test_a_hint_that_a_dead_collector_held_is_gone_when_the_next_one_ends(tmp_path: Path) -> None:
    class Dying(MemoryTransport):
        """Killed after it noted how the rollouts ended and before it acknowledged their hints."""

        async def acknowledge(self, exp_id: str, attempts: Sequence[Attempt]) -> None:
            pass

    async with collection(tmp_path, good) as b:
        dying = Dying()
        dying.store, dying.notifier = b.transport.store, b.transport.notifier
        async with dying:
            await b.collect(transport=dying)
        assert not await b.transport.notifier.lease("exp", 0.0), "they are leased"
        assert len(await b.transport.unacknowledged("exp")) == 2
        await b.collect()
        assert await b.transport.unacknowledged("exp") == []


async def test_lost_hints_are_found_by_the_sweep(tmp_path: Path) -> None:
    class Deaf(MemoryTransport):
        async def hints(self, exp_id: str, wait_s: float) -> list[Attempt]:
            await asyncio.sleep(wait_s)
            return []

    class Endless(InlineRuntime):
        """Never reports the end of an attempt, so that only the transport can."""

        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(isolation="none", lingers=True)

        async def wait(self, attempt: Attempt) -> Any:
            await asyncio.Event().wait()

    transport = Deaf()
    runtime = Endless(good, deliver=transport.deliver)
    async with running(ScriptedEngine(lambda _: YES), tmp_path / "g") as up, transport, runtime:
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            (group,) = await Collection(tmp_path, up, transport, run_state, runtime).collect(
                poll_interval_s=0.2
            )
    assert [f.outcome.reward for f in group.finished] == [1.0, 1.0]


async def test_finished_rollouts_are_not_run_again_and_committed_ones_are_adopted(tmp_path: Path) -> None:
    runs: Counter[str] = Counter()

    async def agent(task: dict[str, Any], rollout: Context) -> float:
        runs[rollout.session_id] += 1
        return await good(task, rollout)

    async with collection(tmp_path, agent) as b:
        (first,) = await b.collect(rollouts=2)
        # As if the collector had died after rollout 2's outcome was committed and before it was noted.
        (third,) = await b.collect(rollouts=3)
        with closing(sqlite3.connect(tmp_path / "run_state.sqlite", isolation_level=None)) as notes:
            notes.execute("DELETE FROM finished WHERE rollout_id LIKE '%r2'")
        (again,) = await b.collect(rollouts=3)
    assert first.finished == again.finished[:2]
    # The times of an adopted rollout are not known: the collector that measured them has ended.
    adopted = structs.replace(third.finished[2], times=again.finished[2].times)
    assert (*third.finished[:2], adopted) == again.finished
    assert set(runs.values()) == {1}


async def test_an_attempt_cut_off_by_a_crash_is_abandoned_and_retried(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        b.run_state.begin_attempt(Attempt("exp-e0-t0-r0", 1))
        (group,) = await b.collect(rollouts=1, retries={})
        stands = await b.transport.decision(waiting("exp-e0-t0-r0"))
    assert not isinstance(stands, OutcomeRecord) and stands is not None
    assert group.finished[0].outcome.session_id == "exp-e0-t0-r0.2"
    assert group.finished[0].outcome.reward == 1.0


async def test_no_more_rollouts_run_at_once_than_allowed(tmp_path: Path) -> None:
    now = most = 0

    async def agent(task: dict[str, Any], rollout: Context) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.2)
        now -= 1
        return 1.0

    async with collection(tmp_path, agent) as b:
        await b.collect(tasks=4, rollouts=4, concurrency=3)
    assert 1 < most <= 3


async def test_budget_and_context_refusals_are_the_policys_failures(tmp_path: Path) -> None:
    from afield.types import Budget

    async def agent(task: dict[str, Any], rollout: Context) -> float:
        for _ in range(5):
            await ask_model(rollout, "x" * 50 * task["n"])
        return 1.0

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect(budget=Budget(calls=2))
    for finished in group.finished:
        failure = finished.outcome.failure
        assert failure and (failure.kind, failure.reason) == (FailureKind.POLICY, Reason.BUDGET)
        assert sum(t.owned for t in finished.trajectories) > 0


async def test_garbage_posted_to_the_gateway_gets_400_and_changes_no_rollout(tmp_path: Path) -> None:
    async def agent(task: dict[str, Any], rollout: Context) -> float:
        import aiohttp

        headers = {"authorization": f"Bearer {rollout.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for body in (os.urandom(200), b"{}", b'{"messages": 3}', b"[" * 5000):
                async with http.post(f"{rollout.openai_base_url}/chat/completions", data=body) as answer:
                    assert answer.status == 400
        return await good(task, rollout)

    async with collection(tmp_path, agent) as b:
        (group,) = await b.collect()
    assert [f.outcome.reward for f in group.finished] == [1.0, 1.0]
    assert all(len(f.turns) == 1 for f in group.finished)


async def test_retries_spent_before_a_crash_stay_spent(tmp_path: Path) -> None:
    runs: Counter[str] = Counter()

    async def agent(task: dict[str, Any], rollout: Context) -> float:
        runs[rollout.session_id] += 1
        raise RuntimeError("always")

    async with collection(tmp_path, agent) as b:
        await b.collect(rollouts=1)
        for _ in range(3):  # as if the collector had died each time before it noted how it ended
            with closing(sqlite3.connect(tmp_path / "run_state.sqlite", isolation_level=None)) as notes:
                notes.execute("DELETE FROM finished")
            (group,) = await b.collect(rollouts=1)
    assert sum(runs.values()) == 2
    assert group.finished[0].attempts == 2
