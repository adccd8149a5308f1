"""What every transport promises. A backend is done when it passes this.

A backend is a place: each `transport()` is another door to it, as another process would open one.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import pytest

from afield import wire
from afield.interfaces.transport import Fence, PendingAttempt
from afield.sdk.deliver import deliver as sdk_deliver
from afield.transports.transport import StoreTransport
from afield.types import Attempt, FailureKind, Outcome, Rollout, Task
from afield.wire import Hint, OutcomeRecord
from agents.invoking import EXP, invocation, record

TASK_IDS = ("a/b c", "..", ".", "commits", "late", "adopted", "ü" * 300, "x%2Fy", "../../../etc", "a+b")


class Backend(Protocol):
    name: str

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport: ...

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        """Their reasons or bodies, as a person would look at them."""
        ...


def waiting(rollout_id: str = "r", n: int = 1, *, input_id: str = "t", exp_id: str = EXP) -> PendingAttempt:
    rollout = Rollout(id=rollout_id, exp_id=exp_id, group_id="g", task=Task(input_id, {}))
    return PendingAttempt(rollout, Attempt(rollout_id, n))


def hint(session_id: str, exp_id: str = EXP) -> bytes:
    return wire.encode(Hint(exp_id=exp_id, session_id=session_id))


async def every_hint(
    transport: StoreTransport, count: int, seconds: float = 90, exp_id: str = EXP
) -> set[Attempt]:
    """Hints until so many attempts were named; a queue hands them out in whatever portions it likes."""
    found: set[Attempt] = set()
    with anyio.move_on_after(seconds):
        while len(found) < count:
            found |= set(await transport.hints(exp_id, 1))
    return found


class TransportContract:
    """Subclasses give a `backend` fixture. A lease of 1 s is the shortest that all queues know."""

    lease_s = 1.0

    @pytest.fixture
    async def transport(self, backend: Backend) -> AsyncIterator[StoreTransport]:
        async with backend.transport() as made:
            yield made

    # --- decisions ---------------------------------------------------------------------------------

    async def test_an_attempt_is_open_until_it_is_decided(self, transport: StoreTransport) -> None:
        one = invocation()
        assert await transport.decision(waiting()) is None
        assert await transport.deliver(one, record(one, 0.5))
        standing = await transport.decision(waiting())
        assert isinstance(standing, OutcomeRecord) and standing == record(one, 0.5)

    async def test_the_first_outcome_wins(self, transport: StoreTransport) -> None:
        one = invocation()
        assert await transport.deliver(one, record(one, 1.0))
        assert not await transport.deliver(one, record(one, 0.0))
        assert await transport.deliver(one, record(one, 1.0)), "the same again stands already"
        standing = await transport.decision(waiting())
        assert isinstance(standing, OutcomeRecord) and standing.outcome.reward == 1.0

    async def test_a_fenced_attempt_takes_no_outcome(self, transport: StoreTransport) -> None:
        one = invocation()
        assert await transport.fence(waiting(), "deadline") == Fence("deadline")
        assert not await transport.deliver(one, record(one))
        assert await transport.decision(waiting()) == Fence("deadline")
        assert await transport.fence(waiting(), "another reason") == Fence("deadline")

    async def test_a_fence_that_comes_late_answers_with_the_outcome(self, transport: StoreTransport) -> None:
        one = invocation()
        await transport.deliver(one, record(one, 0.25))
        standing = await transport.fence(waiting(), "deadline")
        assert isinstance(standing, OutcomeRecord) and standing.outcome.reward == 0.25

    async def test_a_fence_fences_one_attempt_only(self, transport: StoreTransport) -> None:
        await transport.fence(waiting(), "deadline")
        two = invocation(n=2)
        assert await transport.deliver(two, record(two))
        assert await transport.decision(waiting(exp_id="other")) is None

    async def test_a_refused_outcome_is_kept_and_listed(self, transport: StoreTransport) -> None:
        one, two, three = invocation(), invocation(n=2), invocation(n=3)
        await transport.fence(waiting(), "deadline")
        await transport.deliver(one, record(one, 0.5))
        await transport.deliver(two, record(two, 1.0))
        await transport.deliver(two, record(two, 0.0))
        await transport.deliver(three, record(three))
        await transport.deliver(three, record(three))
        assert await transport.late(EXP) == [Attempt("r", 1), Attempt("r", 2)]
        assert await transport.late("other") == []
        kept = transport.store.get(wire.late_key(EXP, "r.1"))
        assert kept is not None and json.loads(kept)["outcome"]["reward"] == 0.5

    async def test_an_attempt_is_committed_or_fenced_and_never_both(self, transport: StoreTransport) -> None:
        for i in range(20):
            one, wait = invocation(f"race-{i}"), waiting(f"race-{i}")
            answers: dict[str, object] = {}

            async def commit(one=one, answers=answers) -> None:
                answers["won"] = await transport.deliver(one, record(one))

            async def fence(wait=wait, answers=answers) -> None:
                answers["stands"] = await transport.fence(wait, "raced")

            async with anyio.create_task_group() as group:
                for work in (commit, fence) if i % 2 else (fence, commit):
                    group.start_soon(work)
            standing = await transport.decision(wait)
            assert standing == answers["stands"]
            assert answers["won"] is isinstance(standing, OutcomeRecord)

    async def test_of_several_committers_one_wins_and_its_record_is_kept(self, backend: Backend) -> None:
        async with backend.transport() as here, backend.transport() as there:
            for i in range(10):
                one = invocation(f"race-{i}")
                won: list[float] = []

                async def commit(transport: StoreTransport, reward: float, one=one, won=won) -> None:
                    if await transport.deliver(one, record(one, reward)):
                        won.append(reward)

                async with anyio.create_task_group() as group:
                    for reward in range(4):
                        group.start_soon(commit, here if reward % 2 else there, float(reward))
                standing = await here.decision(waiting(f"race-{i}"))
                assert isinstance(standing, OutcomeRecord)
                assert won == [standing.outcome.reward]

    async def test_a_task_may_have_any_id(self, transport: StoreTransport) -> None:
        for n, input_id in enumerate(TASK_IDS):
            one, wait = invocation(f"r{n}", input_id=input_id), waiting(f"r{n}", input_id=input_id)
            assert await transport.decision(wait) is None
            assert await transport.sweep([wait]) == []
            assert await transport.deliver(one, record(one))
            assert not await transport.deliver(one, record(one, 0.0))
            assert await transport.decision(wait) == record(one)
            assert await transport.sweep([wait]) == [Attempt(f"r{n}", 1)]

    async def test_big_payloads_come_back_whole(self, transport: StoreTransport) -> None:
        one = invocation()
        big = {"text": "ü" * 2_500_000}
        assert await transport.deliver(one, record(one, payload=big))
        standing = await transport.decision(waiting())
        assert isinstance(standing, OutcomeRecord) and standing.payload == big

    async def test_a_reader_never_sees_half_a_record(self, backend: Backend) -> None:
        one = invocation()
        big = {"text": "x" * 3_000_000}
        seen: list[bool] = []
        async with backend.transport() as writer, backend.transport() as reader:

            async def read() -> None:
                while not seen:
                    standing = await reader.decision(waiting())
                    if standing is not None:
                        seen.append(isinstance(standing, OutcomeRecord) and standing.payload == big)
                    await anyio.lowlevel.checkpoint()

            with anyio.fail_after(90):
                async with anyio.create_task_group() as group:
                    group.start_soon(read)
                    await writer.deliver(one, record(one, payload=big))
        assert seen == [True]

    # --- hints -------------------------------------------------------------------------------------

    async def test_delivery_sends_a_hint_to_its_experiment(self, transport: StoreTransport) -> None:
        one = invocation()
        assert await transport.hints(EXP, 0) == []
        await transport.deliver(one, record(one))
        assert await transport.hints("other", 0) == []
        assert await transport.hints(EXP, 60) == [Attempt("r", 1)]
        assert await transport.hints(EXP, 0) == [], "it is leased"

    async def test_waiting_for_hints_ends_when_one_comes(self, transport: StoreTransport) -> None:
        one = invocation()
        got: list[Attempt] = []

        async def wait() -> None:
            got.extend(await transport.hints(EXP, 600))

        with anyio.fail_after(90):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.sleep(0.05)
                await transport.deliver(one, record(one))
        assert got == [Attempt("r", 1)]

    async def test_a_hint_comes_again_unless_it_is_acknowledged(self, backend: Backend) -> None:
        one, two = invocation(), invocation(n=2)
        async with (
            backend.transport(lease_s=self.lease_s) as here,
            backend.transport(lease_s=self.lease_s) as there,
        ):
            await here.deliver(one, record(one))
            await here.deliver(two, record(two))
            assert await every_hint(here, 2) == {Attempt("r", 1), Attempt("r", 2)}
            await here.acknowledge(EXP, [Attempt("r", 1), Attempt("never-hinted", 1)])
            assert await every_hint(there, 1) == {Attempt("r", 2)}
            await there.acknowledge(EXP, [Attempt("r", 2)])
            assert await there.hints(EXP, 2.5 * self.lease_s) == []

    async def test_doubled_and_reordered_hints_change_nothing(self, backend: Backend) -> None:
        async with backend.transport(lease_s=self.lease_s) as transport:
            for n in (3, 1, 2, 3, 1):
                await transport.notifier.send(EXP, hint(f"r.{n}"))
            found = await every_hint(transport, 3)
            assert found == {Attempt("r", n) for n in (1, 2, 3)}
            assert [await transport.decision(waiting(n=n)) for n in (1, 2, 3)] == [None] * 3
            one = invocation()
            await transport.deliver(one, record(one))
            await transport.acknowledge(EXP, sorted(found, key=lambda a: a.n))
            assert set(await transport.hints(EXP, 3 * self.lease_s)) == set(), (
                "doubles of what was acknowledged go as well"
            )

    async def test_late_hint_of_a_fenced_attempt_is_removed(self, backend: Backend) -> None:
        async with backend.transport(lease_s=self.lease_s) as transport:
            await transport.fence(waiting(), "deadline")
            await transport.notifier.send(EXP, hint("r.1"))
            assert await transport.hints(EXP, 2.5 * self.lease_s) == []
            assert await backend.dead_letters(transport, EXP) == []

    async def test_a_hint_that_comes_long_after_a_sweep_is_not_handed_out(self, backend: Backend) -> None:
        one = invocation()
        async with backend.transport(lease_s=self.lease_s) as transport:
            transport.store.put_if_absent(one.data_key, wire.encode(record(one)))
            commit = wire.CommitRecord(session_id="r.1", data_key=one.data_key)
            transport.store.put_if_absent(one.commit_key, wire.encode(commit))
            assert await transport.sweep([waiting()]) == [Attempt("r", 1)]
            assert await transport.decision(waiting()) == record(one)
            await transport.acknowledge(EXP, [Attempt("r", 1)])
            await transport.notifier.send(EXP, hint("r.1"))
            assert await transport.hints(EXP, 2.5 * self.lease_s) == []
            assert await backend.dead_letters(transport, EXP) == []

    async def test_unreadable_message_becomes_a_dead_letter(
        self, backend: Backend, caplog: pytest.LogCaptureFixture
    ) -> None:
        one = invocation()
        async with backend.transport() as transport:
            await transport.notifier.send(EXP, b"not a hint")
            await transport.deliver(one, record(one))
            assert await every_hint(transport, 1) == {Attempt("r", 1)}
            await transport.acknowledge(EXP, [Attempt("r", 1)])
            with anyio.fail_after(90):
                while not (letters := await backend.dead_letters(transport, EXP)):
                    await transport.hints(EXP, 0.2)
        assert len(letters) == 1 and "not a hint" in letters[0]
        assert "dead letter" in caplog.text

    async def test_message_that_is_never_acknowledged_becomes_a_dead_letter(self, backend: Backend) -> None:
        async with backend.transport(lease_s=self.lease_s, max_deliveries=2) as transport:
            await transport.notifier.send(EXP, hint("lonely.1"))
            seen = 0
            with anyio.fail_after(90):
                while not (letters := await backend.dead_letters(transport, EXP)):
                    seen += len(await transport.hints(EXP, 1))
        assert 2 <= seen <= 3 and len(letters) == 1 and "lonely.1" in letters[0]

    async def test_experiments_do_not_see_each_other(self, transport: StoreTransport) -> None:
        one = invocation()
        await transport.deliver(one, record(one))
        assert await transport.decision(waiting(exp_id="exp-2")) is None
        assert await transport.sweep([waiting(exp_id="exp-2"), waiting(exp_id="ex")]) == []
        assert await transport.hints("exp-2", 0) == []
        assert await transport.hints(EXP, 60) == [Attempt("r", 1)]

    # --- sweeps ------------------------------------------------------------------------------------

    async def test_sweep_finds_outcomes_without_a_hint(self, transport: StoreTransport) -> None:
        for n in (1, 2):
            one = invocation(n=n)
            await transport.deliver(one, record(one))
        await transport.fence(waiting(n=3), "deadline")
        await transport.hints(EXP, 0)
        found = await transport.sweep([waiting(n=n) for n in range(1, 6)])
        assert found == [Attempt("r", n) for n in (1, 2, 3)]
        assert await transport.sweep([]) == []

    async def test_a_sweep_of_many_finds_the_same_as_one_of_few(self, backend: Backend) -> None:
        every = [waiting(f"r{i}", input_id=f"task {i}") for i in range(20)]
        async with backend.transport(single_reads=4) as many, backend.transport(single_reads=100) as few:
            for i in range(0, 20, 3):
                one = invocation(f"r{i}", input_id=f"task {i}")
                await many.deliver(one, record(one))
            expected = [Attempt(f"r{i}", 1) for i in range(0, 20, 3)]
            assert await many.sweep(every) == expected
            assert await few.sweep(every) == expected

    # --- agents ------------------------------------------------------------------------------------

    async def test_its_address_is_one_an_agent_can_be_given(self, transport: StoreTransport) -> None:
        one = invocation(**{"outcome_url": None, **transport.address(EXP)})
        assert one.outcome_url or one.s3_bucket

    async def test_a_result_without_a_commit_is_committed_by_the_collector(
        self, transport: StoreTransport
    ) -> None:
        def put(n: int, **result: Any) -> None:
            body = {
                "stop_reason": "end_turn",
                "input_id": "t",
                "s3_bucket": "b",
                "payload": payload,
                **result,
            }
            transport.store.put_if_absent(f"{EXP}/t/r.{n}.json", json.dumps(body).encode())

        payload = {"question": "2+2", "_rollout": {"api_key": "sk-secret"}}
        put(1, status_code=200, rewards=[0.0, 0.25], note="kept", metrics={"turns": 2})
        put(2, status_code=500, stop_reason="boom", traceback="Traceback ... boom")
        put(3, status_code=200, answer="no reward")
        put(4, status_code=200, rewards={"format": 1.0, "answer": 0.5}, reward=0.75)
        put(5, status_code=200, rewards=float("nan"))
        every = [waiting(n=n) for n in range(1, 6)]
        assert await transport.sweep(every) == [one.attempt for one in every]
        assert [await transport.decision(one) for one in every] == [None] * 5, "reading commits nothing"
        found = [await transport.commit_result(one) for one in every]
        assert [await transport.decision(one) for one in every] == found
        outcomes: list[Outcome] = [one.outcome for one in found if isinstance(one, OutcomeRecord)]
        assert [one.reward for one in outcomes] == [0.25, None, None, 0.75, None]
        kinds = [one.failure and one.failure.kind for one in outcomes]
        assert kinds == [None, FailureKind.TASK, FailureKind.VERIFIER, None, FailureKind.VERIFIER]
        assert outcomes[1].failure and outcomes[1].failure.traceback == "Traceback ... boom"
        first = found[0]
        assert isinstance(first, OutcomeRecord)
        assert first.payload == {"question": "2+2"} and first.extra == {"note": "kept"}
        assert first.outcome.metrics == {"turns": 2.0}
        assert b"sk-secret" not in (transport.store.get(wire.adopted_key(EXP, "r.1")) or b"sk-secret")
        assert await transport.fence(every[0], "too late") == first

    async def test_a_result_without_a_commit_comes_too_late_after_a_fence(
        self, transport: StoreTransport
    ) -> None:
        await transport.fence(waiting(), "deadline")
        body = json.dumps({"status_code": 200, "rewards": 1.0}).encode()
        transport.store.put_if_absent(f"{EXP}/t/r.1.json", body)
        assert await transport.decision(waiting()) == Fence("deadline")
        assert await transport.commit_result(waiting()) == Fence("deadline")

    async def test_a_writer_that_died_before_its_commit_leaves_the_attempt_open(
        self, transport: StoreTransport
    ) -> None:
        one = invocation()
        transport.store.put_if_absent(one.data_key, wire.encode(record(one)))
        assert await transport.decision(waiting()) is None
        assert await transport.commit_result(waiting()) is None
        assert await transport.deliver(one, record(one))

    async def test_an_object_is_put_once_also_with_the_same_bytes(self, transport: StoreTransport) -> None:
        data = b"{}"
        put = transport.store.put_if_absent
        assert [await anyio.to_thread.run_sync(put, f"{EXP}/t/r.1.json", data) for _ in range(2)] == [
            True,
            False,
        ]


class AgentsContract:
    """For backends that agents of other processes reach with the SDK."""

    async def test_what_the_sdk_delivers_comes_back_through_the_transport(self, backend: Backend) -> None:
        async with backend.transport() as transport:
            one = invocation(**{"outcome_url": None, **transport.address(EXP)})
            assert await anyio.to_thread.run_sync(sdk_deliver, one, record(one, 0.75))
            assert await transport.hints(EXP, 60) == [Attempt("r", 1)]
            assert await transport.decision(waiting()) == record(one, 0.75)
            assert not await anyio.to_thread.run_sync(sdk_deliver, one, record(one, 0.0))
            assert await anyio.to_thread.run_sync(sdk_deliver, one, record(one, 0.75))
            assert await transport.late(EXP) == [Attempt("r", 1)]

    async def test_values_that_an_agent_returns_come_back_through_the_transport(
        self, backend: Backend
    ) -> None:
        values = {
            "conversation": [{"role": "user", "content": "\u6c34 \U0001f600"}],
            "artifacts": {"n": 2**63, "share": 0.1, "none": None, "nested": [[[]]]},
            "log": "y" * 1_000_000,
        }
        async with backend.transport() as transport:
            one = invocation(**{"outcome_url": None, **transport.address(EXP)})
            assert await anyio.to_thread.run_sync(sdk_deliver, one, record(one, extra=values))
            standing = await transport.decision(waiting())
        assert isinstance(standing, OutcomeRecord) and standing.extra == values

    async def test_of_several_processes_one_wins(self, backend: Backend) -> None:
        async with backend.transport() as transport:
            where = {"outcome_url": None, **transport.address(EXP)}
            tried = [invocation(f"race-{i}", **where) for i in range(4)]
            documents = [wire.encode(one).decode() for one in tried]
            said = await asyncio.gather(*(_committer(float(n), documents) for n in range(4)))
            standing = [await transport.decision(waiting(f"race-{i}")) for i in range(4)]
        for i, one in enumerate(standing):
            assert isinstance(one, OutcomeRecord) and one.outcome.reward is not None
            won = [float(n) for n, answers in enumerate(said) if answers[i]]
            assert won == [one.outcome.reward]


COMMITTER = """
import json, sys
from afield import wire
from afield.sdk.deliver import deliver
from afield.types import Outcome

reward, documents = json.load(sys.stdin)
answers = []
for document in documents:
    one = wire.decode(document, wire.Invocation, "test")
    outcome = Outcome(rollout_id=one.rollout_id, attempt=one.attempt, reward=reward)
    answers.append(deliver(one, wire.OutcomeRecord.of(one, outcome)))
print(json.dumps(answers))
"""


async def _committer(reward: float, documents: list[str]) -> list[bool]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COMMITTER, stdin=pipe, stdout=pipe)
    out, _ = await asyncio.wait_for(process.communicate(json.dumps([reward, documents]).encode()), 150)
    return json.loads(out)
