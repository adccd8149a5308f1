"""Tasks to groups: submit, watch, retry.

For every rollout: open a session, launch an attempt, wait for its outcome, and decide what it means.
Whatever happens to an attempt, it is decided exactly once: by its commit, or by our fence. A failure of
a task, a verifier or the infrastructure is tried again within its budget, in a fresh session; a policy
failure is an outcome like any other. Groups come out complete, every rollout with its outcome.
After a crash the same call goes on: finished rollouts are not run again, committed ones are adopted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from afield import wire
from afield.errors import RETRIED, AfieldError, Missing, RolloutFailure, WireError, first_cause
from afield.journal import Journal, Note
from afield.seams import Gateway, Record, Runtime, SessionSpec, Transport
from afield.types import (
    Attempt,
    Budget,
    Failure,
    FailureKind,
    Finished,
    Group,
    Outcome,
    Reason,
    Rollout,
    Sampling,
    Split,
    Task,
)

DEFAULT_RETRIES = {FailureKind.TASK: 1, FailureKind.VERIFIER: 1, FailureKind.INFRASTRUCTURE: 3}
HINT_WAIT_S = 1.0


class Plan(Struct, frozen=True, kw_only=True):
    """How to collect. `deadline_s` is for one attempt, from its launch to its outcome.

    An attempt that reaches its deadline is the policy's failure when the model was called within the
    last `silence_s`, and the infrastructure's otherwise.
    """

    exp_id: str
    model_id: str
    rollouts: int = 8
    concurrency: int = 64
    deadline_s: float = 300.0
    silence_s: float = 60.0
    sweep_s: float = 5.0
    retries: Mapping[FailureKind, int] = field(default_factory=lambda: dict(DEFAULT_RETRIES))
    sampling: Sampling = Sampling()
    budget: Budget = Budget()


class GroupWish(Struct, frozen=True):
    """A task to be attempted, and in which epoch of the data set."""

    id: str
    task: Task
    epoch: int
    split: Split = Split.TRAIN


class Watcher(Protocol):
    """Told of progress; for screens and metrics, never for decisions."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None: ...

    def rollout_finished(self, finished: Finished) -> None: ...


class Collector:
    def __init__(
        self,
        plan: Plan,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        journal: Journal,
        watcher: Watcher,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._journal = journal
        self._watcher = watcher
        self._clock = clock
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._hinted: dict[str, asyncio.Event] = {}

    async def collect(self, wishes: Sequence[GroupWish]) -> list[Group]:
        """All these groups, complete, in the order they were asked for."""
        try:
            async with asyncio.TaskGroup() as tasks:
                listeners = [tasks.create_task(self._listen()), tasks.create_task(self._sweep())]
                try:
                    async with asyncio.TaskGroup() as collecting:
                        running = [collecting.create_task(self._group(wish)) for wish in wishes]
                finally:
                    for listener in listeners:
                        listener.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        return [task.result() for task in running]

    async def _group(self, wish: GroupWish) -> Group:
        rollouts = [
            Rollout(
                id=f"{wish.id}-r{k}",
                exp_id=self._plan.exp_id,
                group_id=wish.id,
                task=wish.task,
                split=wish.split,
            )
            for k in range(self._plan.rollouts)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._rollout(rollout)) for rollout in rollouts]
        finished = tuple(task.result() for task in running)
        return Group(id=wish.id, task_id=wish.task.id, epoch=wish.epoch, split=wish.split, finished=finished)

    async def _rollout(self, rollout: Rollout) -> Finished:
        async with self._slots:
            note = self._journal.finished(rollout.id) or await self._until_it_counts(rollout)
            record = await self._record(note.outcome)
            self._journal.finish(rollout.id, note)
        finished = Finished(
            rollout=rollout,
            outcome=note.outcome,
            trajectories=record.trajectories,
            excluded=record.excluded,
            turns=record.turns,
            attempts=note.attempts,
        )
        self._watcher.rollout_finished(finished)
        return finished

    async def _record(self, outcome: Outcome) -> Record:
        try:
            return await self._gateway.finalize(outcome.session_id)
        except Missing:
            if outcome.failure is None:
                raise
            return Record(trajectories=(), excluded=())

    async def _until_it_counts(self, rollout: Rollout) -> Note:
        """Attempts until one has an outcome that stands, or a budget of retries is used up."""
        failures = self._journal.failures(rollout.id)
        spent = Counter(failures.values())
        n = self._journal.last_attempt(rollout.id)
        undecided = n > 0 and n not in failures
        adopted = await self._adopt(rollout, Attempt(rollout.id, n)) if undecided else None
        while True:
            if adopted is None:
                n += 1
                outcome = await self._attempt(rollout, Attempt(rollout.id, n))
            else:
                outcome, adopted = adopted, None
            again = outcome.failure is not None and self._may_retry(outcome.failure.kind, spent)
            self._watcher.attempt_ended(rollout, outcome, again)
            if not again:
                return Note(outcome, n)
            assert outcome.failure is not None
            self._journal.fail(rollout.id, n, outcome.failure.kind)

    def _may_retry(self, kind: FailureKind, spent: Counter[FailureKind]) -> bool:
        spent[kind] += 1
        return kind in RETRIED and spent[kind] <= self._plan.retries.get(kind, 0)

    async def _adopt(self, rollout: Rollout, attempt: Attempt) -> Outcome | None:
        """An attempt a collector before us began: its outcome if it was committed, else it is given up."""
        try:
            stands = await self._transport.fence(rollout.exp_id, attempt, "the collector was restarted")
        except WireError:  # what it left behind cannot be read; the next attempt takes its place
            stands = None
        if isinstance(stands, wire.OutcomeRecord):
            outcome = _checked(stands.outcome, attempt)
            if outcome.failure:
                await self._quietly_abort(attempt, outcome.failure.message)
            return outcome
        await self._runtime.stop(attempt)
        await self._quietly_abort(attempt, "the collector was restarted")
        return None

    async def _attempt(self, rollout: Rollout, attempt: Attempt) -> Outcome:
        self._journal.begin(rollout.id, attempt.n)
        self._hinted[attempt.session_id] = asyncio.Event()
        failure: Failure | None = None
        try:
            await self._launch(rollout, attempt)
            failure = await self._wait(rollout, attempt)
        except RolloutFailure as error:
            failure = error.failure
        except AfieldError as error:
            failure = Failure(FailureKind.INFRASTRUCTURE, Reason.LAUNCH, f"{type(error).__name__}: {error}")
        finally:
            del self._hinted[attempt.session_id]
        return await self._decide(rollout, attempt, failure)

    async def _launch(self, rollout: Rollout, attempt: Attempt) -> None:
        spec = SessionSpec(
            id=attempt.session_id,
            rollout_id=rollout.id,
            attempt=attempt.n,
            group_id=rollout.group_id,
            split=rollout.split,
            sampling=self._plan.sampling,
            budget=self._plan.budget,
        )
        ticket = await self._gateway.open(spec)
        invocation = wire.invocation_for(
            rollout,
            attempt,
            base_url=ticket.base_url,
            api_key=ticket.api_key,
            model_id=self._plan.model_id,
            sampling=self._plan.sampling,
            **self._transport.address(),
        )
        await self._runtime.launch(attempt, wire.build_payload(rollout.task, invocation))

    async def _wait(self, rollout: Rollout, attempt: Attempt) -> Failure | None:
        """None once the attempt is decided or has ended by itself; else why it is given up."""
        hinted = self._hinted[attempt.session_id]
        exited = asyncio.create_task(self._runtime.wait(attempt))
        end = asyncio.get_running_loop().time() + self._plan.deadline_s
        try:
            while (left := end - asyncio.get_running_loop().time()) > 0:
                hint = asyncio.create_task(hinted.wait())
                await asyncio.wait((hint, exited), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                hint.cancel()
                if exited.done():
                    return exited.result().failure
                hinted.clear()
                if await self._transport.decision(rollout.exp_id, attempt) is not None:
                    return None
            return await self._why_late(attempt)
        finally:
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)

    async def _why_late(self, attempt: Attempt) -> Failure:
        state = await self._gateway.state(attempt.session_id)
        idle = self._clock() - state.last_activity
        late = f"no outcome within {self._plan.deadline_s:g} s; "
        if state.calls and idle <= self._plan.silence_s:
            told = f"the model was still being called ({state.calls} calls)"
            return Failure(FailureKind.POLICY, Reason.TIMEOUT, late + told)
        told = f"the last model call was {idle:.0f} s ago" if state.calls else "the model was never called"
        return Failure(FailureKind.INFRASTRUCTURE, Reason.TIMEOUT, late + told)

    async def _decide(self, rollout: Rollout, attempt: Attempt, failure: Failure | None) -> Outcome:
        """What stands in the store, or our fence with the failure we saw. Cleans up after the attempt."""
        reason = failure.message if failure else "the agent ended without an outcome"
        try:
            stands = await self._transport.fence(rollout.exp_id, attempt, reason)
        except AfieldError as error:
            stands = None
            failure = Failure(FailureKind.INFRASTRUCTURE, Reason.UPLOAD, str(error))
        if isinstance(stands, wire.OutcomeRecord):
            outcome = _checked(stands.outcome, attempt)
        else:
            await self._runtime.stop(attempt)
            missing = Failure(FailureKind.INFRASTRUCTURE, Reason.DIED, reason)
            outcome = wire.failed(rollout.id, attempt.n, failure or missing)
        if outcome.failure:
            await self._quietly_abort(attempt, outcome.failure.message)
        return outcome

    async def _quietly_abort(self, attempt: Attempt, reason: str) -> None:
        """A session that was never opened has nothing to abort."""
        try:
            await self._gateway.abort(attempt.session_id, reason)
        except AfieldError:
            return

    # --- how decisions are noticed: hints, and a sweep for those that were lost -------------------

    async def _listen(self) -> None:
        while True:
            for attempt in await self._transport.hints(self._plan.exp_id, HINT_WAIT_S):
                self._notice(attempt)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._plan.sweep_s)
            for attempt in await self._transport.sweep(self._plan.exp_id):
                self._notice(attempt)

    def _notice(self, attempt: Attempt) -> None:
        if waiting := self._hinted.get(attempt.session_id):
            waiting.set()


def _checked(outcome: Outcome, attempt: Attempt) -> Outcome:
    if (outcome.rollout_id, outcome.attempt) == (attempt.rollout_id, attempt.n):
        return outcome
    told = f"the outcome stored for {attempt.session_id} says it is of {outcome.session_id}"
    return wire.failed(attempt.rollout_id, attempt.n, Failure(FailureKind.VERIFIER, Reason.REWARD, told))
