"""One rollout, from its first attempt to the outcome that stands.

A failure of a task, a verifier or the infrastructure is tried again within its budget, in a fresh
session; a policy failure is an outcome like any other. What is finished goes to the rollout_store and leaves
memory. After a crash the same call goes on: finished rollouts are not run again, and an attempt that
was under way is resumed. How an attempt comes to its outcome is the business of `decide`. What goes wrong
with one rollout ends this rollout, with a failure that says what it was; only an Outage, or a run_state or a
rollout_store that cannot be written, ends them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from afield import wire
from afield.batches.rewards import validated_outcome
from afield.errors import RETRIED, Outage, Unavailable, UsageError, root_cause
from afield.interfaces import Gateway, Runtime, SessionRecord, Transport
from afield.orchestrator.attempt import AttemptRunner
from afield.orchestrator.availability import (
    describe_error,
    failure_from_error,
    infrastructure_failure,
    loop_time,
    retry_unavailable,
)
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.state import RolloutStore, RolloutSummary, RunState
from afield.ratelimit import Limiter
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason, Rollout, RolloutResult, Split

log = logging.getLogger("afield.orchestrator.groups")
T = TypeVar("T")


class RolloutRunner:
    """`async with` listens to hints, sweeps the store and watches the sessions; used from one event loop."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        run_state: RunState,
        rollout_store: RolloutStore,
        observer: RolloutObserver,
        limiter: Limiter | None = None,
        verifiers: Runtime | None = None,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._run_state = run_state
        self._rollout_store = rollout_store
        self._observer = observer
        self._attempt_runner = AttemptRunner(
            config,
            gateway=gateway,
            runtime=runtime,
            transport=transport,
            run_state=run_state,
            limiter=limiter,
            verifiers=verifiers,
        )
        self._slots = asyncio.Semaphore(config.concurrency)
        self._runs: dict[str, asyncio.Task[RolloutSummary]] = {}
        self._queued: dict[str, asyncio.Timeout] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._attempt_runner.start(self._tasks)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """What still runs is left undecided: another conductor of the same run_state goes on with it."""
        try:
            if exc[0] is None:
                await self._attempt_runner.wait_for_teardown()
        except BaseException as error:
            exc = (type(error), error, error.__traceback__)
            raise
        finally:
            for task in self._runs.values():
                task.cancel()
            self._attempt_runner.close()
            try:
                await self._tasks.__aexit__(*exc)
            except BaseExceptionGroup as errors:
                raise root_cause(errors) from errors

    @property
    def has_room(self) -> bool:
        """Whether another rollout would begin at once."""
        return len(self._runs) < self._config.concurrency

    async def run(self, rollout: Rollout) -> RolloutSummary:
        """Run a rollout until it is in the rollout store. Repeating returns the same summary."""
        return await asyncio.shield(self.start(rollout))

    def start(self, rollout: Rollout) -> asyncio.Task[RolloutSummary]:
        """The same, under way. The task is the conductor's: `cancel` ends the rollout, not `Task.cancel`."""
        task = self._runs.get(rollout.id)
        if task is None:
            work = self._run(rollout)
            try:
                task = self._runs[rollout.id] = self._tasks.create_task(work)
            except RuntimeError:  # the run is ending
                work.close()
                raise
            task.add_done_callback(lambda _: self._runs.pop(rollout.id, None))
        return task

    def cancel(self, rollout_id: str, why: str, reason: Reason = Reason.CANCELLED) -> None:
        """End a rollout that runs or waits; `run` ends with this failure, and nothing is tried again.

        One that has ended, or whose outcome is in the store already, keeps its outcome.
        """
        if rollout_id not in self._runs:
            return
        self._attempt_runner.cancel(rollout_id, infrastructure_failure(why, reason))
        queueing = self._queued.pop(rollout_id, None)
        if queueing and not queueing.expired():
            queueing.reschedule(loop_time())

    async def _run(self, rollout: Rollout) -> RolloutSummary:
        born = loop_time()
        try:
            if note := await self._known(rollout):
                return note
            entered = await self._enters(rollout.id)
            try:
                return await self._until_it_counts(rollout, born)
            except Unavailable:
                raise
            except Exception as error:
                return await self._unexpected(rollout, error)
            finally:
                if entered:
                    self._slots.release()
        finally:
            self._attempt_runner.cancelled.pop(rollout.id, None)

    async def _known(self, rollout: Rollout) -> RolloutSummary | None:
        """How it ended, if it has; what is not in the rollout_store any more the gateway gives again."""
        note = await asyncio.to_thread(self._run_state.rollout_summary, rollout.id)
        if note is None or self._rollout_store.holds(rollout.id):
            return note
        outcome, record = await self._recorded(rollout, note.outcome)
        if outcome is not note.outcome:
            await asyncio.to_thread(
                self._run_state.forget_rollout, rollout.id
            )  # nothing is left of what it sampled
            return None
        return await self._patiently(lambda: self._keep(rollout, outcome, record, note.attempts))

    async def _enters(self, rollout_id: str) -> bool:
        """Whether there was a place; without one it is cancelled."""
        queue_timeout_s, others = self._config.deadlines.queue_timeout_s, self._config.concurrency
        try:
            async with asyncio.timeout(queue_timeout_s) as queueing:
                if rollout_id not in self._attempt_runner.cancelled:
                    self._queued[rollout_id] = queueing
                    return await self._slots.acquire()
        except TimeoutError:
            told = (
                f"waited {queue_timeout_s} s for a concurrency slot beside {others} other rollouts;"
                " raise concurrency or queue_timeout_s"
            )
            self._attempt_runner.cancelled.setdefault(rollout_id, infrastructure_failure(told, Reason.LAUNCH))
        finally:
            self._queued.pop(rollout_id, None)
        return False

    async def _until_it_counts(self, rollout: Rollout, born: float) -> RolloutSummary:
        """Attempts until one has an outcome that stands, or a budget of retries is used up."""
        tried = await asyncio.to_thread(self._run_state.attempts, rollout.id)
        spent = Counter(t.failure.kind for t in tried if t.failure)
        n = len(tried)
        undecided = tried[-1] if tried and tried[-1].failure is None else None
        outcome = await self._attempt_runner.resume(rollout, undecided, born) if undecided else None
        while True:
            if outcome is None:
                n += 1
                outcome = await self._attempt_runner.run(rollout, Attempt(rollout.id, n), born)
            if outcome.failure is not None:
                await self._check_supported(rollout, outcome)
            if not self._will_retry(rollout, outcome, spent, born):
                kept, record = await self._recorded(rollout, outcome)
                again = kept is not outcome and self._will_retry(rollout, kept, spent, born, graded=False)
                if not again:
                    return await self._end(rollout, kept, record, n)
                outcome = kept
            assert outcome.failure is not None
            self._observer.attempt_ended(rollout, outcome, True)
            attempt = Attempt(rollout.id, outcome.attempt)
            sampled = await self._attempt_runner.sampled_tokens(attempt)
            await asyncio.to_thread(self._run_state.fail_attempt, attempt, outcome.failure, sampled)
            outcome = None

    async def _check_supported(self, rollout: Rollout, outcome: Outcome) -> None:
        """Ends the run where no other attempt, of this rollout or another, could end otherwise."""
        if why := await self._attempt_runner.unsupported_reason(Attempt(rollout.id, outcome.attempt)):
            told = f"{rollout.id} was refused by the gateway, as every other rollout would be: {why}"
            # A task of its own: it is not this rollout's failure, and nothing is noted of it.
            self._tasks.create_task(_ending(UsageError(told)))
            await asyncio.Event().wait()  # until the run has ended

    def _will_retry(
        self,
        rollout: Rollout,
        outcome: Outcome,
        spent: Counter[FailureKind],
        born: float,
        *,
        graded: bool = True,
    ) -> bool:
        """Who is judged does not run again because its verifiers failed: `judge` gave them their chances."""
        if rollout.id in self._attempt_runner.cancelled:
            return False
        if outcome.failure is None or outcome.failure.kind not in RETRIED:
            return False
        if outcome.failure.reason is Reason.NO_AGENT:
            return False
        if graded and self._config.separate_verifier and outcome.failure.kind is FailureKind.VERIFIER:
            return False
        rollout_timeout_s = self._config.deadlines.rollout_timeout_s
        if rollout_timeout_s is not None and loop_time() - born > rollout_timeout_s:
            return False
        kind = outcome.failure.kind
        spent[kind] += 1
        return spent[kind] <= self._config.retries.get(kind, 0)

    async def _end(self, rollout: Rollout, outcome: Outcome, record: SessionRecord, n: int) -> RolloutSummary:
        note = await self._patiently(lambda: self._keep(rollout, outcome, record, n))
        await asyncio.to_thread(self._run_state.finish_rollout, rollout.id, note)
        self._observer.attempt_ended(rollout, note.outcome, False)
        return note

    async def _unexpected(self, rollout: Rollout, error: Exception) -> RolloutSummary:
        """What nobody thought of went wrong with one rollout: that is its failure, and says where."""
        log.error(
            "%s failed in a way that nothing foresees: %s", rollout.id, describe_error(error), exc_info=error
        )
        n = max(1, len(await asyncio.to_thread(self._run_state.attempts, rollout.id)))
        outcome = wire.failed(rollout.id, n, failure_from_error(error, "it was given up"))
        return await self._end(rollout, outcome, SessionRecord(trajectories=(), excluded=()), n)

    async def _recorded(self, rollout: Rollout, outcome: Outcome) -> tuple[Outcome, SessionRecord]:
        """What its session sampled. A reward for a session that is gone, or cannot be read, is none; nor is
        one that nothing can be trained with."""
        session_id = outcome.session_id
        try:
            record = await self._attempt_runner.gateway_calls.call(
                "finalize", lambda: self._gateway.finalize(session_id)
            )
        except Outage:
            raise
        except Exception as error:
            if outcome.failure is None:
                lost = failure_from_error(error, "what it sampled cannot be read", Reason.ENGINE)
                outcome = wire.failed(outcome.rollout_id, outcome.attempt, lost)
            return outcome, SessionRecord(trajectories=(), excluded=())
        names = self._config.rewards if rollout.split is Split.TRAIN else ()
        outcome = self._sampled(outcome, record)
        return validated_outcome(
            rollout_result(rollout, outcome, record, 1), names, self._config.max_reward
        ), record

    def _sampled(self, outcome: Outcome, record: SessionRecord) -> Outcome:
        """A reward that nothing was sampled for trains nothing, and would still move its group's baseline."""
        if outcome.reward is None or record.turns:
            return outcome
        told = f"{outcome.session_id} has the reward {outcome.reward:g} and made no model call"
        if self._config.no_turns == "flag":
            log.warning("%s through its gateway", told)
            return outcome
        failure = Failure(FailureKind.TASK, Reason.REWARD, f"{told}: nothing can be trained with it")
        return wire.failed(outcome.rollout_id, outcome.attempt, failure)

    async def _keep(
        self, rollout: Rollout, outcome: Outcome, record: SessionRecord, n: int
    ) -> RolloutSummary:
        """Everything there is of a rollout, to the rollout_store."""
        finished = rollout_result(rollout, outcome, record, n)
        await asyncio.to_thread(self._rollout_store.put, finished)
        self._observer.rollout_finished(finished)
        spans = [span for trajectory in finished.trajectories for span in trajectory.versions]
        return RolloutSummary(
            outcome,
            n,
            sum(t.owned for t in finished.trajectories),
            min((s.low for s in spans), default=None),
            max((s.high for s in spans), default=None),
        )

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await retry_unavailable(ask, self._config.unavailable_timeout_s)


async def _ending(error: Exception) -> None:
    """A task that ends the group it belongs to."""
    raise error


def rollout_result(rollout: Rollout, outcome: Outcome, record: SessionRecord, attempts: int) -> RolloutResult:
    return RolloutResult(
        rollout=rollout,
        outcome=outcome,
        trajectories=record.trajectories,
        excluded=record.excluded,
        turns=record.turns,
        attempts=attempts,
        images=record.images,
    )
