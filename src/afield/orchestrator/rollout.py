"""Rollout runner: attempts with retries, then the rollout store.

1. Task, verifier and infrastructure failures are retried within their budgets, each in a fresh session.
   Policy failures are not retried.
2. The session of the attempt that counts is finalized; its record goes to the rollout store.
3. After a crash the same call continues: finished rollouts are not run again, running attempts are resumed.

An error about one rollout ends that rollout with a failure. Only an Outage, or a run state or rollout store
that cannot be written, ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

from msgspec import structs

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
from afield.orchestrator.state import AttemptRecord, RolloutStore, RolloutSummary, RunState
from afield.ratelimit import Limiter
from afield.types import (
    Attempt,
    Failure,
    FailureKind,
    Outcome,
    Reason,
    Rollout,
    RolloutResult,
    RolloutTimes,
    Split,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


class RolloutRunner:
    """Runs rollouts with their retries. Used in `async with`, from one event loop."""

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
        """Tasks of unfinished rollouts, by id."""
        self._queued: dict[str, asyncio.Timeout] = {}
        """Timeouts of rollouts that wait for a slot, by id; `cancel` expires them."""

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._attempt_runner.start(self._tasks)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """Stop running; the next process with this run state resumes the rollouts that still run."""
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
        """Whether another rollout would start at once."""
        return len(self._runs) < self._config.concurrency

    async def run(self, rollout: Rollout) -> RolloutSummary:
        """Run a rollout until it is in the rollout store. Repeating returns the same summary."""
        return await asyncio.shield(self.start(rollout))

    def start(self, rollout: Rollout) -> asyncio.Task[RolloutSummary]:
        """Start a rollout; `RolloutRunner.cancel` ends it, not `Task.cancel`."""
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

    def cancel(self, rollout_id: str, message: str, reason: Reason = Reason.CANCELLED) -> None:
        """Cancel a rollout that runs or waits for a slot; `run` returns this failure, and it is not retried.

        A rollout that has ended, or whose outcome is in the store already, keeps its outcome.
        """
        if rollout_id not in self._runs:
            return
        self._attempt_runner.cancel(rollout_id, infrastructure_failure(message, reason))
        queueing = self._queued.pop(rollout_id, None)
        if queueing and not queueing.expired():
            queueing.reschedule(loop_time())

    async def _run(self, rollout: Rollout) -> RolloutSummary:
        started_at = loop_time()
        self._attempt_runner.times[rollout.id] = {"submitted": time.time()}
        try:
            if summary := await self._finished_before(rollout):
                return summary
            entered = await self._acquire_slot(rollout.id)
            self._attempt_runner.times[rollout.id]["started"] = time.time()
            try:
                return await self._run_attempts(rollout, started_at)
            except Unavailable:
                raise
            except Exception as error:
                return await self._fail_unexpected(rollout, error)
            finally:
                if entered:
                    self._slots.release()
        finally:
            self._attempt_runner.forget(rollout.id)

    async def _finished_before(self, rollout: Rollout) -> RolloutSummary | None:
        """Return the summary of a rollout that ended before; None if it has to run.

        A result that is missing in the rollout store is read from the gateway again.
        """
        summary = await asyncio.to_thread(self._run_state.rollout_summary, rollout.id)
        if summary is None or self._rollout_store.holds(rollout.id):
            return summary
        outcome, record = await self._finalize(rollout, summary.outcome)
        if outcome is not summary.outcome:
            # Its record is lost, so it runs again.
            await asyncio.to_thread(self._run_state.forget_rollout, rollout.id)
            return None
        return await self._retry_unavailable(lambda: self._store(rollout, outcome, record, summary.attempts))

    async def _acquire_slot(self, rollout_id: str) -> bool:
        """Wait for a concurrency slot; False if the rollout was cancelled or timed out."""
        queue_timeout_s, others = self._config.deadlines.queue_timeout_s, self._config.concurrency
        try:
            async with asyncio.timeout(queue_timeout_s) as queueing:
                if rollout_id not in self._attempt_runner.cancelled:
                    self._queued[rollout_id] = queueing
                    return await self._slots.acquire()
        except TimeoutError:
            message = (
                f"waited {queue_timeout_s} s for a concurrency slot beside {others} other rollouts;"
                " raise concurrency or queue_timeout_s"
            )
            self._attempt_runner.cancelled.setdefault(
                rollout_id, infrastructure_failure(message, Reason.LAUNCH)
            )
        finally:
            self._queued.pop(rollout_id, None)
        return False

    async def _run_attempts(self, rollout: Rollout, started_at: float) -> RolloutSummary:
        """Run attempts until one counts or the retry budget is used up."""
        records = await asyncio.to_thread(self._run_state.attempts, rollout.id)
        attempts = len(records)
        records = records[await asyncio.to_thread(self._run_state.retried_attempts, rollout.id) :]
        failures = Counter(record.failure.kind for record in records if record.failure)
        outcome = await self._resume_last(rollout, records, started_at)
        while True:
            if outcome is None:
                attempts += 1
                outcome = await self._attempt_runner.run(rollout, Attempt(rollout.id, attempts), started_at)
            if outcome.failure is not None:
                await self._check_supported(rollout, outcome)
            if not self._may_retry(rollout, outcome, failures, started_at):
                final, record = await self._finalize(rollout, outcome)
                # `_finalize` turns an unusable reward into a failure, which may be retried as well.
                if final is outcome or not self._may_retry(
                    rollout, final, failures, started_at, graded=False
                ):
                    return await self._end(rollout, final, record, attempts)
                outcome = final
            await self._record_retried(rollout, outcome, failures)
            outcome = None

    async def _resume_last(
        self, rollout: Rollout, records: Sequence[AttemptRecord], started_at: float
    ) -> Outcome | None:
        """Take over the last attempt of an earlier process; None if there is none without a failure."""
        if not records:
            return None
        began = records[0].started_at
        self._attempt_runner.times[rollout.id].update(submitted=began, started=began)
        last = records[-1]
        return await self._attempt_runner.resume(rollout, last, started_at) if last.failure is None else None

    async def _record_retried(
        self, rollout: Rollout, outcome: Outcome, failures: Counter[FailureKind]
    ) -> None:
        """Record the failure of an attempt that is retried, in the run state and in `failures`."""
        assert outcome.failure is not None
        failures[outcome.failure.kind] += 1
        self._observer.attempt_ended(rollout, outcome, True)
        attempt = Attempt(rollout.id, outcome.attempt)
        sampled = await self._attempt_runner.sampled_tokens(attempt)
        await asyncio.to_thread(self._run_state.fail_attempt, attempt, outcome.failure, sampled)

    async def _check_supported(self, rollout: Rollout, outcome: Outcome) -> None:
        """End the run if the gateway reports that the model cannot serve this agent for any task."""
        if message := await self._attempt_runner.unsupported_reason(Attempt(rollout.id, outcome.attempt)):
            message = f"{rollout.id} was refused by the gateway, as every other rollout would be: {message}"
            # Raised in a separate task: the run ends, and this rollout records no failure.
            self._tasks.create_task(raise_in_task(UsageError(message)))
            await asyncio.Event().wait()  # cancelled when the run ends

    def _may_retry(
        self,
        rollout: Rollout,
        outcome: Outcome,
        failures: Counter[FailureKind],
        started_at: float,
        *,
        graded: bool = True,
    ) -> bool:
        """Whether a failed attempt is retried; `failures` counts those of the attempts before it.

        `graded` means that the outcome is the verifier's own: `VerifierRunner` has retried its failure.
        """
        if rollout.id in self._attempt_runner.cancelled:
            return False
        if outcome.failure is None or outcome.failure.kind not in RETRIED:
            return False
        if outcome.failure.reason is Reason.NO_AGENT:
            return False
        if graded and self._config.separate_verifier and outcome.failure.kind is FailureKind.VERIFIER:
            return False
        rollout_timeout_s = self._config.deadlines.rollout_timeout_s
        if rollout_timeout_s is not None and loop_time() - started_at > rollout_timeout_s:
            return False
        kind = outcome.failure.kind
        return failures[kind] < self._config.retries.get(kind, 0)

    async def _end(
        self, rollout: Rollout, outcome: Outcome, record: SessionRecord, attempts: int
    ) -> RolloutSummary:
        """Store the result of a rollout and record that it has finished."""
        summary = await self._retry_unavailable(lambda: self._store(rollout, outcome, record, attempts))
        await asyncio.to_thread(self._run_state.finish_rollout, rollout.id, summary)
        self._observer.attempt_ended(rollout, summary.outcome, False)
        return summary

    async def _fail_unexpected(self, rollout: Rollout, error: Exception) -> RolloutSummary:
        """End one rollout with an unexpected error as its failure."""
        log.error("rollout %s: unexpected error: %s", rollout.id, describe_error(error), exc_info=error)
        attempts = max(1, len(await asyncio.to_thread(self._run_state.attempts, rollout.id)))
        failure = failure_from_error(error, "the rollout failed unexpectedly")
        outcome = wire.failed(rollout.id, attempts, failure)
        return await self._end(rollout, outcome, SessionRecord(trajectories=(), excluded=()), attempts)

    async def _finalize(self, rollout: Rollout, outcome: Outcome) -> tuple[Outcome, SessionRecord]:
        """Finalize the session; a reward becomes a failure if its record is lost or unusable."""
        session_id = outcome.session_id
        try:
            record = await self._attempt_runner.gateway_calls.call(
                "finalize", lambda: self._gateway.finalize(session_id)
            )
        except Outage:
            raise
        except Exception as error:
            if outcome.failure is None:
                lost = failure_from_error(error, "its recorded turns cannot be read", Reason.ENGINE)
                outcome = wire.failed(outcome.rollout_id, outcome.attempt, lost)
            return outcome, SessionRecord(trajectories=(), excluded=())
        names = self._config.rewards if rollout.split is Split.TRAIN else ()
        outcome = self._check_turns(outcome, record)
        return validated_outcome(
            rollout_result(rollout, outcome, record, 1), names, self._config.max_reward
        ), record

    def _check_turns(self, outcome: Outcome, record: SessionRecord) -> Outcome:
        """Apply `no_turns`: a reward without model calls trains no token but shifts the group's baseline."""
        unrewarded = outcome.reward is None and not outcome.reward_pending
        if unrewarded or record.turns or self._config.no_turns == "accept":
            return outcome
        reward = "no reward yet" if outcome.reward is None else f"the reward {outcome.reward:g}"
        message = f"{outcome.session_id} has {reward} and made no model call"
        if self._config.no_turns == "flag":
            log.warning("%s through its gateway", message)
            return outcome
        failure = Failure(FailureKind.TASK, Reason.REWARD, f"{message}: nothing can be trained with it")
        return wire.failed(outcome.rollout_id, outcome.attempt, failure)

    async def _store(
        self, rollout: Rollout, outcome: Outcome, record: SessionRecord, attempts: int
    ) -> RolloutSummary:
        """Write the result to the rollout store and return its summary."""
        times = RolloutTimes(**self._attempt_runner.times[rollout.id], ended=time.time())
        returned, left_out = await self._returned_values(rollout.id)
        result = structs.replace(
            rollout_result(rollout, outcome, record, attempts, times),
            returned=returned,
            returned_left_out=left_out,
        )
        await asyncio.to_thread(self._rollout_store.put, result)
        self._observer.rollout_finished(result)
        spans = [span for trajectory in result.trajectories for span in trajectory.versions]
        return RolloutSummary(
            outcome,
            attempts,
            tokens=sum(trajectory.owned for trajectory in result.trajectories),
            min_version=min((span.low for span in spans), default=None),
            max_version=max((span.high for span in spans), default=None),
        )

    async def _returned_values(self, rollout_id: str) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the further values that the agent returned, and the sizes of those that are too large."""
        extra = self._attempt_runner.returned.get(rollout_id, {})
        returned, left_out = await asyncio.to_thread(wire.bounded, extra) if extra else ({}, {})
        if left_out:
            sizes = ", ".join(f"{name} {size} bytes" for name, size in left_out.items())
            limit = wire.MAX_RETURNED_BYTES
            log.warning("rollout %s: returned values beyond %d bytes: %s", rollout_id, limit, sizes)
        return returned, left_out

    async def _retry_unavailable(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_unavailable(call, self._config.unavailable_timeout_s)


async def raise_in_task(error: Exception) -> None:
    """Raise `error` in a task, which ends its task group."""
    raise error


def rollout_result(
    rollout: Rollout,
    outcome: Outcome,
    record: SessionRecord,
    attempts: int,
    times: RolloutTimes = RolloutTimes(),  # noqa: B008 - frozen
) -> RolloutResult:
    return RolloutResult(
        rollout=rollout,
        outcome=outcome,
        trajectories=record.trajectories,
        excluded=record.excluded,
        turns=record.turns,
        attempts=attempts,
        images=record.images,
        refused=record.refused,
        times=times,
    )
