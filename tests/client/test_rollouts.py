"""RolloutClient: futures, batches and groups; rollouts that no caller waits for are ended."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from afield.client import RolloutFuture, RolloutTimeout
from afield.errors import Conflict, PolicyFailure, TaskFailure, UsageError, VerifierFailure
from afield.interfaces import Exit
from afield.orchestrator.state import RunState
from afield.runtimes.inline import InlineRuntime
from afield.sdk.agent import Context
from afield.transports.stores.memory import MemoryTransport
from afield.types import Attempt, FailureKind, Group, Reason, Sampling, Split, Task
from support.client_gateway import BlockingAgent, ThreadedGateway, threaded_gateway, yes_agent
from support.processes import until


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ThreadedGateway]:
    with threaded_gateway(tmp_path) as gateway:
        yield gateway


@pytest.fixture
def blocking() -> Iterator[BlockingAgent]:
    blocking = BlockingAgent()
    yield blocking
    blocking.release.set()


# --- futures -------------------------------------------------------------------------------------


def test_a_submitted_rollout_gives_its_reward_turns_and_trajectories(gateway: ThreadedGateway) -> None:
    with gateway.client() as client:
        future = client.submit({"question": "?"}, input_id="q1")
        finished = future.result(timeout=60)
        assert future.done() and not future.cancelled() and future.exception() is None
    assert finished.outcome.reward == 1.0
    assert len(finished.turns) == len(finished.trajectories) == 1
    assert (finished.rollout.id, finished.rollout.task) == ("exp-q1-r0", Task("q1", {"question": "?"}))
    assert future.result().turns == finished.turns  # also after the client is closed


def test_submit_returns_at_once_and_is_thread_safe(gateway: ThreadedGateway, blocking: BlockingAgent) -> None:
    with gateway.client(blocking) as client:
        futures = asyncio.run(_in_threads(lambda n: client.submit({"n": n % 4}), 12))
        assert not any(future.done() for future in futures)
        blocking.release.set()
        assert [future.result(60).outcome.reward for future in futures] == [1.0] * 12
    assert len({future.rollout.id for future in futures}) == 12


async def _in_threads(call: Any, count: int) -> list[Any]:
    return await asyncio.gather(*(asyncio.to_thread(call, n) for n in range(count)))


def test_a_future_can_be_awaited_or_waited_for_inside_an_event_loop(gateway: ThreadedGateway) -> None:
    async def notebook() -> None:
        async with gateway.client() as client:
            first, second = client.submit({"id": "a"}), client.submit({"id": "b"})
            assert (await first).outcome.reward == (await first).outcome.reward == 1.0
            assert second.result(60).outcome.reward == 1.0  # blocks this loop, not the client's
            third = await asyncio.gather(*(client.submit({"id": str(n)}) for n in range(3)))
            assert [finished.outcome.reward for finished in third] == [1.0] * 3

    asyncio.run(notebook())


def test_a_repeated_rollout_id_needs_the_same_row(gateway: ThreadedGateway, blocking: BlockingAgent) -> None:
    with gateway.client(blocking) as client:
        future = client.submit({"n": 1}, input_id="q", rollout_id="mine")
        assert client.submit({"n": 1}, input_id="q", rollout_id="mine") is future
        with pytest.raises(Conflict, match="mine exists with another row, of input 'q'"):
            client.submit({"n": 2}, input_id="other", rollout_id="mine")
        with pytest.raises(Conflict, match="two different rows are called 'q'"):
            client.submit({"n": 2}, input_id="q")
        blocking.release.set()
        first = future.result(60)
        assert client.submit({"n": 1}, input_id="q", rollout_id="mine").result(60) == first
        with pytest.raises(Conflict, match="mine exists with another row"):
            client.submit({"n": 2}, input_id="other", rollout_id="mine").result(60)
        with pytest.raises(Conflict, match="another split or sampling"):
            client.submit({"n": 1}, input_id="q", rollout_id="mine", split=Split.VAL).result(60)
    assert blocking.started == ["mine.1"]


def test_changing_a_row_after_submit_changes_no_rollout(gateway: ThreadedGateway) -> None:
    row: dict[str, Any] = {"question": ["a"]}
    with gateway.client() as client:
        future = client.submit(row)
        row["question"].append("b")
        assert future.result(60).rollout.task.input == {"question": ["a"]}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1], "a row is a JSON object"),
        ({"x": object()}, "cannot be written as JSON"),
        ({"id": "q", "x": float("nan")}, "'q': nan is not a JSON number"),
        ({"_rollout": 1}, "reserved"),
    ],
)
def test_invalid_rows_are_refused_at_once(gateway: ThreadedGateway, row: Any, told: str) -> None:
    with gateway.client() as client, pytest.raises(UsageError, match=told):
        client.submit(row)


def test_a_failed_rollout_raises_its_error_type_with_the_agents_traceback(
    gateway: ThreadedGateway,
) -> None:
    def agent(task: dict[str, Any]) -> float:
        if task["id"] == "grader":
            raise VerifierFailure("the grader is out")
        raise KeyError("such a table")

    with gateway.client(agent, retries={FailureKind.TASK: 1}) as client:
        broken, ungraded = client.submit({"id": "broken"}), client.submit({"id": "grader"})
        with pytest.raises(TaskFailure, match="such a table") as caught:
            broken.result(60)
        assert "in agent" in caught.value.failure.traceback
        assert isinstance(ungraded.exception(60), VerifierFailure)
        finished = broken.finished()
    assert finished.attempts == 2
    assert finished.outcome.failure and finished.outcome.failure.kind is FailureKind.TASK


def test_a_policy_failure_is_a_result(gateway: ThreadedGateway) -> None:
    def agent(task: dict[str, Any], rollout: Context) -> float:
        yes_agent(task, rollout)
        raise PolicyFailure("it gave up")

    with gateway.client(agent) as client:
        finished = client.submit({}).result(60)
    assert finished.outcome.failure and finished.outcome.failure.kind is FailureKind.POLICY
    assert finished.trajectories


# --- timeouts and cancellation -------------------------------------------------------------------


def test_a_timeout_ends_the_remote_session(gateway: ThreadedGateway, blocking: BlockingAgent) -> None:
    with gateway.client(blocking) as client:
        future = client.submit({"id": "q"})
        blocking.wait_started(1)
        with pytest.raises(TimeoutError, match=r"exp-q-r0 had no outcome in the 0\.2 s"):
            future.result(timeout=0.2)
        gateway.wait_closed("exp-q-r0.1")
        assert future.done() and not future.cancel()
        with pytest.raises(RolloutTimeout) as caught:
            future.result()
        assert caught.value.failure.reason is Reason.TIMEOUT
        blocking.release.set()
        again = client.submit({"id": "q"}, rollout_id="exp-q-r0").result(60)  # it is wanted after all
    assert again.outcome.session_id == "exp-q-r0.2"


def test_cancelling_ends_the_remote_session(gateway: ThreadedGateway, blocking: BlockingAgent) -> None:
    with gateway.client(blocking) as client:
        future = client.submit({"id": "q"})
        blocking.wait_started(1)
        assert future.cancel() and future.cancel() and future.cancelled()
        with pytest.raises(CancelledError):
            future.result()
        gateway.wait_closed("exp-q-r0.1")
        blocking.release.set()
        done = client.submit({"id": "other"})
        done.result(60)
        assert not done.cancel() and not done.cancelled()


def test_a_rollout_that_is_cancelled_while_it_waits_for_a_slot_never_starts(
    gateway: ThreadedGateway, blocking: BlockingAgent
) -> None:
    with gateway.client(blocking, concurrency=1) as client:
        first, second, third = (client.submit({"id": name}) for name in "abc")
        blocking.wait_started(1)
        assert second.cancel()
        blocking.release.set()
        assert [f.result(60).outcome.reward for f in (first, third)] == [1.0, 1.0]
    assert blocking.started == ["exp-a-r0.1", "exp-c-r0.1"]


def test_cancelling_an_await_ends_the_remote_session(
    gateway: ThreadedGateway, blocking: BlockingAgent
) -> None:
    async def program() -> None:
        async with gateway.client(blocking) as client:
            future = client.submit({"id": "q"})
            await asyncio.to_thread(blocking.wait_started, 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await future
            assert future.cancelled()
            with pytest.raises(asyncio.CancelledError):
                await future
            await asyncio.to_thread(gateway.wait_closed, "exp-q-r0.1")

    asyncio.run(program())


def test_cancelling_reaches_an_attempt_of_an_earlier_program_while_it_is_resumed(
    gateway: ThreadedGateway, blocking: BlockingAgent
) -> None:
    looking, found = threading.Event(), threading.Event()

    class Elsewhere(InlineRuntime):
        """Finds one attempt running, and takes its time to."""

        async def adopt(self, attempt: Attempt) -> bool | None:
            looking.set()
            return await asyncio.to_thread(found.wait, 60)

        async def wait(self, attempt: Attempt) -> Exit:
            return await (asyncio.Future() if "old" in attempt.rollout_id else super().wait(attempt))

    transport = MemoryTransport()
    client = gateway.client(
        runtime=Elsewhere(yes_agent, transport.deliver), transport=transport, concurrency=1
    )
    with RunState(client.rundir.run_state) as ledger:
        ledger.begin_attempt(Attempt("exp-old-r0", 1))
    with client:
        future = client.submit({"id": "old"})
        assert looking.wait(60)
        future.cancel()
        found.set()
        assert client.submit({"id": "new"}).result(60).outcome.reward == 1.0


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_yields_rollouts_in_the_order_in_which_they_end(gateway: ThreadedGateway) -> None:
    """Each agent waits until the earlier items have been yielded."""
    turns = [threading.Event() for _ in range(3)]
    turns[2].set()

    def agent(task: dict[str, Any], rollout: Context) -> float:
        assert turns[task["n"]].wait(60)
        time.sleep(task["s"])
        if task["n"] == 1:
            raise RuntimeError("half")
        return yes_agent(task, rollout)

    rows = [{"n": 0, "s": 0.2}, {"n": 1, "s": 0.1}, {"n": 2, "s": 0.0}]
    items: list[Any] = []
    with gateway.client(agent) as client:
        for item in client.run_batch(rows, rollouts=2, timeout=150):
            items.append(item)
            turns[2 - len(items) // 2].set()
    assert [item.index for item in items] == [2, 2, 1, 1, 0, 0]
    assert sorted((item.index, item.rollout) for item in items) == [(i, k) for i in range(3) for k in (0, 1)]
    kinds = [item.failure.kind if item.failure else item.outcome.reward for item in items]
    assert kinds == [1.0, 1.0, FailureKind.TASK, FailureKind.TASK, 1.0, 1.0]
    assert all(item.elapsed >= rows[item.index]["s"] for item in items)
    assert [len(item.finished.turns) for item in items] == [1, 1, 0, 0, 1, 1]
    assert items[0].input_id == items[1].input_id != items[2].input_id


def test_a_batch_timeout_returns_the_rest_as_failures(
    gateway: ThreadedGateway, blocking: BlockingAgent
) -> None:
    def agent(task: dict[str, Any], rollout: Context) -> float:
        return yes_agent(task, rollout) if task["id"] == "0" else blocking(task, rollout)

    rows = [{"id": str(n)} for n in range(8)]
    with gateway.client(agent) as client:
        client.submit(rows[0]).result(60)
    # A new client with the same run directory returns the first row from the rollout store.
    with gateway.client(agent, concurrency=2) as client:
        items = {item.index: item for item in client.run_batch(rows, rollouts=1, timeout=2.0)}
        for session_id in blocking.started:
            gateway.wait_closed(session_id)
    assert sorted(items) == list(range(8))
    assert items.pop(0).outcome.reward == 1.0
    for item in items.values():
        assert item.failure and (item.failure.kind, item.failure.reason) == (
            FailureKind.INFRASTRUCTURE,
            Reason.TIMEOUT,
        )
        assert "2 s of its batch" in item.failure.message
    assert len(blocking.started) <= 2


@pytest.mark.parametrize("how", ["break", "raise"])
def test_leaving_a_batch_loop_ends_the_running_rollouts(
    gateway: ThreadedGateway, blocking: BlockingAgent, how: str
) -> None:
    def agent(task: dict[str, Any], rollout: Context) -> float:
        if task["id"] == "quick":
            blocking.wait_started(2)
            return 1.0
        return blocking(task, rollout)

    def loop() -> None:
        for _ in client.run_batch([{"id": "quick"}, {"id": "a"}, {"id": "b"}], rollouts=1):
            if how == "raise":
                raise ZeroDivisionError
            break

    with gateway.client(agent) as client:
        try:
            loop()
        except ZeroDivisionError:
            assert how == "raise"
        gateway.wait_closed("exp-a-r0.1")
        gateway.wait_closed("exp-b-r0.1")


def test_batches_and_groups_for_async_code(gateway: ThreadedGateway) -> None:
    async def program() -> None:
        async with gateway.client() as client:
            rows = [{"id": "a"}, {"id": "b"}]
            items = [item async for item in client.run_batch_async(rows, rollouts=2)]
            assert Counter(item.input_id for item in items) == {"a": 2, "b": 2}
            groups = [group async for group in client.run_groups_async(rows, rollouts=2)]
            assert sorted(group.task_id for group in groups) == ["a", "b"]
            ids = {finished.rollout.id for group in groups for finished in group.finished}
            assert ids == {f"exp-{name}-r{k}" for name in "ab" for k in (2, 3)}
            async for _ in client.run_batch_async(rows, rollouts=1):
                break

    asyncio.run(program())


def test_each_group_is_yielded_once_it_is_complete(gateway: ThreadedGateway) -> None:
    def agent(task: dict[str, Any], rollout: Context) -> float:
        if (task["id"], rollout.rollout_id[-1]) == ("slow", "0"):
            assert quick.wait(60)
        return float(rollout.rollout_id[-1])

    quick = threading.Event()
    groups: list[Group] = []
    with gateway.client(agent, rollouts=3) as client:
        for group in client.run_groups([{"id": "slow"}, {"id": "quick"}]):
            groups.append(group)
            quick.set()
    assert [group.task_id for group in groups] == ["quick", "slow"]
    assert [[f.outcome.reward for f in group.finished] for group in groups] == [[0.0, 1.0, 2.0]] * 2


def test_rollouts_start_in_the_order_of_their_rows_within_the_concurrency(
    gateway: ThreadedGateway,
) -> None:
    begun: list[str] = []
    most: list[int] = []
    now: set[str] = set()

    def agent(task: dict[str, Any], rollout: Context) -> float:
        begun.append(rollout.rollout_id)
        now.add(rollout.rollout_id)
        most.append(len(now))
        time.sleep(0.02)
        now.discard(rollout.rollout_id)
        return 1.0

    rows = [{"id": f"{n:02}"} for n in range(12)]
    with gateway.client(agent, concurrency=1) as client:
        assert len(list(client.run_batch(rows, rollouts=1))) == 12
    assert begun == [f"exp-{n:02}-r0" for n in range(12)]
    assert max(most) == 1


def test_validation_has_its_own_ids_and_greedy_reaches_the_session(gateway: ThreadedGateway) -> None:
    greedy = Sampling(temperature=0.0)
    with gateway.client() as client:
        train = client.submit({"id": "q"}).result(60)
        (item,) = client.run_batch([{"id": "q"}], rollouts=1, sampling=greedy, split=Split.VAL)
    assert (train.rollout.id, item.finished.rollout.id) == ("exp-q-r0", "exp-q-v0")
    assert item.finished.rollout.split is Split.VAL
    assert [turn.sampling.temperature for turn in (*train.turns, *item.finished.turns)] == [1.0, 0.0]


def test_after_any_mix_of_concurrent_calls_every_future_ends_and_no_session_stays_open(
    gateway: ThreadedGateway,
) -> None:
    def agent(task: dict[str, Any], rollout: Context) -> float:
        working.add(rollout.session_id)
        try:
            yes_agent(task, rollout)
            time.sleep(task["s"])
        finally:
            working.discard(rollout.session_id)
        return 1.0

    futures: list[RolloutFuture] = []
    working: set[str] = set()

    def caller(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            n = rng.randrange(24)
            future = client.submit({"s": (0.0, 0.05, 0.15)[n % 3]}, rollout_id=f"x{n}")
            futures.append(future)
            time.sleep(rng.random() * 0.05)
            if rng.random() < 0.3:
                future.cancel()
            elif rng.random() < 0.3:
                with contextlib.suppress(CancelledError):
                    future.exception(timeout=rng.random() * 0.1)

    with gateway.client(agent, concurrency=6) as client:
        threads = [threading.Thread(target=caller, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(futures) == 120
    assert all(future.done() for future in futures)
    for session_id in {f"x{n}.{k}" for n in range(24) for k in range(1, 11)}:
        assert gateway.phase(session_id) in (None, "finalized", "aborted", "completed")
    until(lambda: not working, "the threads of agents that were stopped are done")
