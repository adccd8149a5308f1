"""Attempt runner: launch, wait for the outcome, decide, tear down.

1. `run` launches an attempt and waits until the store has its outcome, its agent ends, or a deadline passes.
2. Each attempt is decided exactly once: by the agent's commit or by the collector's fence.
3. Its agent is then stopped in the background.
4. `resume` takes over an attempt of an earlier process: it uses a committed outcome, waits if the agent
   still runs, and abandons the attempt otherwise.

An error in one attempt is that attempt's failure; only an Outage ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from msgspec import structs

from afield import wire
from afield.errors import Outage, RolloutFailure, WireError
from afield.interfaces import Exit, Fence, Gateway, PendingAttempt, Runtime, Transport
from afield.orchestrator.availability import (
    BACKOFF_S,
    Availability,
    describe_error,
    failure_from_error,
    infrastructure_failure,
    loop_time,
)
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.launcher import Launcher
from afield.orchestrator.state import AttemptRecord, RunState
from afield.orchestrator.verifier import VerifierRunner
from afield.orchestrator.watcher import STATES_TIMEOUT_INTERVALS, AttemptWatcher, RunningAttempt
from afield.ratelimit import Limiter, LocalLimiter, RateLimits, Unlimited
from afield.sdk.results import AGENT_REWARD
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason, Rollout, Task
from afield.utils.backoff import Backoff
from afield.wire import OutcomeRecord

log = logging.getLogger(__name__)

LINGER_S = 5.0
"""Seconds that an agent has to exit after it delivered, before it is stopped."""


class AttemptRunner:
    """Runs attempts. Between `start` and `close` it also watches hints, store and sessions."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        run_state: RunState,
        limiter: Limiter | None,
        verifiers: Runtime | None,
    ) -> None:
        self._config = config
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._run_state = run_state
        probe = _probe_attempt(config.exp_id)
        self.gateway_calls = Availability("the gateway", config, gateway.version)
        self._store_calls = Availability("the store of outcomes", config, lambda: transport.decision(probe))
        shared = {"gateway": gateway, "transport": transport, "gateway_calls": self.gateway_calls}
        self._launcher = Launcher(config, runtime=runtime, limiter=limiter or Unlimited(), **shared)
        self._verifier: VerifierRunner | None = None
        if verifiers:
            # Verifiers have their own runtime and limiter: the launch rate is for agents only.
            own = LocalLimiter(RateLimits())
            self._verifier = VerifierRunner(
                self._launcher, Launcher(config, runtime=verifiers, limiter=own, **shared)
            )
        if config.separate_verifier != (verifiers is not None):
            raise ValueError("separate_verifier must be set if and only if there is a runtime for verifiers")
        self._watcher = AttemptWatcher(
            config, runtime=runtime, run_state=run_state, store_calls=self._store_calls, **shared
        )
        self.cancelled: dict[str, Failure] = {}
        """Cancelled rollouts by id, with the failure that each ends with."""
        self.times: dict[str, dict[str, float]] = {}
        """Fields of `RolloutTimes` of the running rollouts, by id."""
        self.returned: dict[str, dict[str, Any]] = {}
        """Further values that agents returned in the last attempt with an outcome, by rollout id."""
        self._teardowns: set[asyncio.Task[None]] = set()
        """Tasks that stop the agents of decided attempts."""

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start watching; `tasks` runs the watcher and the stops of agents."""
        self._tasks = tasks
        self._watcher.start(tasks)

    async def wait_for_teardown(self) -> None:
        """Wait until the agents of decided attempts have ended and their hints are acknowledged."""
        if self._teardowns:
            await asyncio.wait(self._teardowns)  # each has its own deadline
        await self._watcher.flush()

    def close(self) -> None:
        self._watcher.close()
        for task in self._teardowns:
            task.cancel()

    def cancel(self, rollout_id: str, failure: Failure) -> None:
        """Abandon the running attempt of a rollout; its later attempts end with this failure at once."""
        self.cancelled[rollout_id] = failure
        for running in self._watcher.running.values():
            if running.pending.rollout.id == rollout_id:
                running.abandon(failure)

    def forget(self, rollout_id: str) -> None:
        """Drop what is kept of a rollout that has ended."""
        self.cancelled.pop(rollout_id, None)
        self.times.pop(rollout_id, None)
        self.returned.pop(rollout_id, None)

    async def run(self, rollout: Rollout, attempt: Attempt, rollout_started_at: float) -> Outcome:
        """Launch an attempt and return its outcome."""
        await asyncio.to_thread(self._run_state.begin_attempt, attempt)
        self._begin_times(rollout.id, attempted=time.time())
        self.returned.pop(rollout.id, None)
        running = RunningAttempt(rollout, attempt, rollout_started_at, reward_from=self._config.reward_from)
        running.draw = await asyncio.to_thread(self._draw, rollout.id)
        failure = self.cancelled.get(rollout.id)
        if failure is None:
            self._watcher.running[attempt.session_id] = running  # `cancel` finds it here
            try:
                failure = await self._launch_and_wait(running)
            finally:
                self._watcher.running.pop(attempt.session_id, None)
        return await self._decide(running, failure)

    async def _launch_and_wait(self, running: RunningAttempt) -> Failure | None:
        """Launch and wait; returns None once the store has the outcome, else the failure."""
        try:
            failure = await self._launcher.launch(running)
            if failure is None:
                self._note_time(running, "launched")
                await asyncio.to_thread(self._run_state.mark_launched, running.pending.attempt)
                failure = await self._await_outcome(running)
        except Outage:
            raise
        except Exception as error:
            log.warning("attempt %s: abandoned: %s", running.session_id, describe_error(error))
            failure = failure_from_error(error, "waiting for its outcome failed")
        return failure

    def _begin_times(self, rollout_id: str, **times: float) -> None:
        """Start the times of an attempt, which replace those of the one before."""
        before = self.times.setdefault(rollout_id, {})
        kept = {name: before[name] for name in ("submitted", "started") if name in before}
        self.times[rollout_id] = {**kept, **times}

    def _note_time(self, running: RunningAttempt, name: str) -> None:
        self.times.setdefault(running.pending.rollout.id, {})[name] = time.time()

    def _draw(self, rollout_id: str) -> str:
        """Key of an attempt's random numbers.

        Infrastructure failures keep the key: they hit long attempts more often, and resampling would replace
        those by shorter ones.
        """
        records = self._run_state.attempts(rollout_id)
        failures = [record.failure for record in records if record.failure]
        redrawn = sum(failure.kind is not FailureKind.INFRASTRUCTURE for failure in failures)
        return f"{rollout_id}.{1 + redrawn}"

    async def resume(
        self, rollout: Rollout, record: AttemptRecord, rollout_started_at: float
    ) -> Outcome | None:
        """Take over an attempt of an earlier process; None if it was abandoned."""
        attempt = record.attempt
        running = RunningAttempt(rollout, attempt, rollout_started_at, reward_from=self._config.reward_from)
        running.draw = await asyncio.to_thread(self._draw, rollout.id)  # the key that opened its session
        running.launch_requested = True
        self._begin_times(rollout.id, attempted=record.started_at, launched=record.started_at)
        failure = infrastructure_failure("the collector was restarted", Reason.DIED)
        try:
            decided = await self._read_decision(running)
            if not isinstance(decided, Fence):  # a fence has no hint
                self._watcher.inherit()
            if decided is None and await self._still_runs(attempt):
                log.info("attempt %s: still runs, waiting for its outcome", attempt.session_id)
                running.progress.launched_at = loop_time() - record.age_s
                running.changed.set()  # its hint may have arrived before this process waited
                return await self._decide(running, await self._await_outcome(running))
        except Outage:
            raise
        except Exception as error:
            failure = failure_from_error(error, "the collector was restarted and cannot take it over")
            log.warning("%s: %s", attempt.session_id, failure.message)
        decision = running.decision
        if decision is None:
            with suppress(WireError):  # an unreadable outcome: the next attempt replaces it
                decision, _ = await self._fence(running, failure.message)
        if isinstance(decision, OutcomeRecord):
            return await self._decide(running, None)
        await self._release(running, failure, delivered=False)
        sampled = await self.sampled_tokens(attempt)
        await asyncio.to_thread(self._run_state.record_tokens, attempt, sampled)
        return None

    async def sampled_tokens(self, attempt: Attempt) -> int:
        """Number of tokens that an attempt sampled; 0 if the gateway does not answer."""
        session_id = attempt.session_id
        try:
            states = await self.gateway_calls.call("states", lambda: self._gateway.states([session_id]))
        except Outage:
            raise
        except Exception as error:
            log.warning("attempt %s: sampled tokens unknown: %s", session_id, describe_error(error))
            return 0
        state = states.get(session_id)
        return state.tokens.get("sampled", 0) if state else 0

    async def unsupported_reason(self, attempt: Attempt) -> str:
        """Return why the model cannot serve this agent at all, from the gateway; empty if it can."""
        session_id = attempt.session_id
        try:  # without retries: the failure itself is known already
            async with asyncio.timeout(STATES_TIMEOUT_INTERVALS * self._config.watch_interval_s):
                state = (await self._gateway.states([session_id])).get(session_id)
        except Exception as error:
            log.warning("attempt %s: reason of the refusal unknown: %s", session_id, describe_error(error))
            return ""
        return state.unsupported if state and not state.turns else ""

    # --- attempts of an earlier process ----------------------------------------------------------

    async def _still_runs(self, attempt: Attempt) -> bool:
        """Whether the agent that an earlier process launched still runs."""
        adopted = await self._adopted(attempt)
        if adopted or (adopted is False and not self._verifier):
            return adopted
        session_id = attempt.session_id
        states = await self.gateway_calls.call("states", lambda: self._gateway.states([session_id]))
        state = states.get(session_id)
        if state is None or state.phase != "open":
            return self._verifier is not None and state is not None and state.phase == "completed"
        if adopted is False:
            return False
        seen = state.unseen_s if state.unseen_s is not None else state.idle_s
        return bool(state.in_flight) or seen <= self._config.deadlines.heartbeat_timeout_s

    async def _adopted(self, attempt: Attempt) -> bool | None:
        """Whether the runtime still runs the attempt; None if it cannot tell, then heartbeats decide."""
        try:
            async with asyncio.timeout(self._config.deadlines.launch_timeout_s):
                return await self._runtime.adopt(attempt)
        except Exception as error:
            log.warning(
                "attempt %s: its runtime cannot adopt it: %s", attempt.session_id, describe_error(error)
            )
            return None

    # --- outcome ---------------------------------------------------------------------------------

    async def _await_outcome(self, running: RunningAttempt) -> Failure | None:
        """Wait for the outcome; returns None once the store has it, else the failure."""
        self._watcher.running[running.session_id] = running
        if failure := self.cancelled.get(running.pending.rollout.id):
            running.abandon(failure)
        exiting = asyncio.create_task(self._wait_exit(running))
        exiting.add_done_callback(lambda _: running.changed.set())
        grading: asyncio.Task[Failure | None] | None = None
        try:
            while True:
                await running.changed.wait()
                running.changed.clear()
                if running.exit is None and exiting.done():
                    running.exit = exiting.result()
                    # While a verifier grades, the end of the agent does not start the upload deadline.
                    running.progress.ended_at = None if running.exit.failure or grading else loop_time()
                if await self._read_decision(running) is not None:
                    return None
                grading = grading or await self._start_grading(running)
                if failure := _abandon_reason(running, grading):
                    return failure
        finally:
            self._watcher.running.pop(running.session_id, None)
            if grading:
                grading.cancel()
                await asyncio.gather(grading, return_exceptions=True)
            if exiting.done():
                running.exit = running.exit or exiting.result()
            else:
                exiting.cancel()
                await asyncio.gather(exiting, return_exceptions=True)

    async def _wait_exit(self, running: RunningAttempt) -> Exit:
        """Wait for the end of the agent; retries while the runtime raises other errors."""
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                return await self._runtime.wait(running.pending.attempt)
            except RolloutFailure as error:
                return Exit(error.failure)
            except Exception as error:
                if not running.wait_error:
                    log.warning(
                        "attempt %s: its runtime cannot report its end: %s",
                        running.session_id,
                        describe_error(error),
                    )
                running.wait_error = describe_error(error)
            await backoff.sleep()

    async def _start_grading(self, running: RunningAttempt) -> asyncio.Task[Failure | None] | None:
        """Start a verifier once the agent has submitted; None before that."""
        if not self._verifier:
            return None
        ended, running.progress.ended_at, asked_at = running.progress.ended_at, None, loop_time()
        submission = await self._verifier.submission(running)
        if submission is None:  # the time of this request does not count against the agent
            running.progress.ended_at = None if ended is None else ended + loop_time() - asked_at
            return None
        running.progress.grading, running.progress.ended_at = True, None
        self._note_time(running, "grading")
        running.progress.completed_at = running.progress.completed_at or loop_time()
        grading = asyncio.create_task(self._verifier.grade(running, submission))
        grading.add_done_callback(lambda _: running.changed.set())
        return grading

    async def _read_decision(self, running: RunningAttempt) -> object | None:
        """Read the committed outcome or fence into `running.decision`; None while there is none.

        A result without a commit is committed first.
        """
        pending, transport = running.pending, self._transport
        try:
            decision = await self._store_calls.call("decision", lambda: transport.decision(pending))
            if decision is None:
                decision = await self._store_calls.call(
                    "commit_result", lambda: transport.commit_result(pending)
                )
        except WireError as error:
            running.decision_error = str(error)
            return error
        running.decision = decision
        return decision

    async def _decide(self, running: RunningAttempt, failure: Failure | None) -> Outcome:
        """Return the committed outcome, or fence the attempt with this failure; then tear it down."""
        self._note_time(running, "outcome")
        if failure and running.wait_error:
            message = f"{failure.message}; its runtime cannot tell its end: {running.wait_error}"
            failure = structs.replace(failure, message=message)
        if failure is None and running.decision_error:
            failure = infrastructure_failure(
                f"its outcome cannot be read: {running.decision_error}", Reason.UPLOAD
            )
        reason = failure.message if failure else "the agent ended without an outcome"
        decision = running.decision
        if decision is None:
            try:
                decision, failure = await self._fence(running, reason, failure)
            except WireError as error:
                failure = infrastructure_failure(f"its outcome cannot be read: {error}", Reason.UPLOAD)
        else:
            self._watcher.used_hints.append(running.pending.attempt)
        if isinstance(decision, OutcomeRecord):
            outcome = _checked_outcome(decision.outcome, running.pending)
            self.returned[outcome.rollout_id] = decision.extra
        else:
            attempt = running.pending.attempt
            outcome = wire.failed(
                attempt.rollout_id, attempt.n, failure or infrastructure_failure(reason, Reason.DIED)
            )
        await self._release(running, outcome.failure, isinstance(decision, OutcomeRecord))
        return outcome

    async def _fence(
        self, running: RunningAttempt, reason: str, failure: Failure | None = None
    ) -> tuple[OutcomeRecord | Fence | None, Failure | None]:
        """Fence an attempt; returns the decision and, without an outcome, the failure.

        Raises WireError if the stored outcome cannot be read. If the store refuses the fence, the attempt is
        abandoned without one: the run state alone decides which attempt counts.
        """
        pending = running.pending
        decision = None
        try:
            decision = await self._store_calls.call("fence", lambda: self._transport.fence(pending, reason))
        except (Outage, WireError):
            raise
        except Exception as error:
            log.warning(
                "attempt %s: abandoned without a fence: %s", running.session_id, describe_error(error)
            )
            failure = failure or failure_from_error(error, "its outcome cannot be decided", Reason.UPLOAD)
        self._watcher.used_hints.append(pending.attempt)
        return decision, failure

    async def _release(self, running: RunningAttempt, failure: Failure | None, delivered: bool) -> None:
        """Abort the session of a failed attempt, and stop its agent in the background."""
        if failure:
            await self._abort(running.pending.attempt, failure.message)
        if not running.launch_requested:
            return
        teardown = self._tasks.create_task(self._tear_down(running, LINGER_S if delivered else 0.0))
        self._teardowns.add(teardown)
        teardown.add_done_callback(self._teardowns.discard)

    async def _tear_down(self, running: RunningAttempt, linger_s: float) -> None:
        """Stop the agent and its verifier; an agent that has just delivered may end by itself first."""
        attempt = running.pending.attempt
        if self._verifier and running.verifier_attempt:
            await self._verifier.stop(running.verifier_attempt)
        left = running.exit
        if left is None and linger_s and not self._runtime.capabilities.lingers:
            with suppress(Exception):  # stopped below
                left = await asyncio.wait_for(self._runtime.wait(attempt), linger_s)
        if left and not left.failure and not left.lingers:
            return
        await self._launcher.stop(attempt)

    async def _abort(self, attempt: Attempt, reason: str) -> None:
        """Abort the session, if it was opened."""
        try:
            await self.gateway_calls.call("abort", lambda: self._gateway.abort(attempt.session_id, reason))
        except Exception as error:
            log.info("attempt %s: session not aborted: %s", attempt.session_id, describe_error(error))


def _abandon_reason(running: RunningAttempt, grading: asyncio.Task[Failure | None] | None) -> Failure | None:
    """Return why the attempt is abandoned now; an agent's exit after its submission is ignored."""
    failure = running.exit.failure if running.exit and not grading else None
    if grading and grading.done():
        failure = grading.result()
        running.progress.ended_at = running.progress.ended_at or loop_time()
    return failure or running.abandon_failure


def _probe_attempt(exp_id: str) -> PendingAttempt:
    """An attempt that does not exist: reading its decision shows whether the store answers."""
    rollout = Rollout(id="probe", exp_id=exp_id, group_id="probe", task=Task("probe", {}))
    return PendingAttempt(rollout, Attempt(rollout.id, 1))


def _checked_outcome(outcome: Outcome, pending: PendingAttempt) -> Outcome:
    """Return the outcome, or a failure if it is of another attempt or lacks the agent's reward.

    Where the caller gives rewards, a reward of the agent becomes a metric.
    """
    attempt = pending.attempt
    if (outcome.rollout_id, outcome.attempt) != (attempt.rollout_id, attempt.n):
        message = f"the outcome stored for {attempt.session_id} says it is of {outcome.session_id}"
    elif outcome.reward_pending and pending.reward_from == "agent":
        message = f"the outcome of {attempt.session_id} has no reward, which the agent gives; return one"
    elif outcome.reward is not None and outcome.failure is None and pending.reward_from == "caller":
        metrics = {**outcome.metrics, AGENT_REWARD: outcome.reward}
        return structs.replace(outcome, reward=None, reward_pending=True, metrics=metrics)
    else:
        return outcome
    return wire.failed(attempt.rollout_id, attempt.n, Failure(FailureKind.VERIFIER, Reason.REWARD, message))
