"""One attempt, from its launch to the outcome that stands.

Launch it, wait for its outcome, decide. Whatever happens to an attempt, it is decided exactly once: by
its commit, or by our fence. What is left of it then ends in the background. One that somebody before us
began is adopted if it is committed, waited for if its agent still runs, and given up otherwise. A store
or a gateway that does not answer is waited for, and nothing is held against the attempt. Whatever a part
raises about one attempt is that attempt's failure; only an Outage ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

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
from afield.orchestrator.watcher import LOOKS, AttemptWatcher, RunningAttempt
from afield.ratelimit import Limiter, LocalLimiter, RateLimits, Unlimited
from afield.types import Attempt, Failure, FailureKind, Outcome, Reason, Rollout, Task
from afield.wire import OutcomeRecord

log = logging.getLogger("afield.orchestrator.groups")

LINGER_S = 5.0  # an agent that has delivered is given this long to end by itself


class AttemptRunner:
    """Between `begin` and `leave` it hears hints, sweeps the store and watches the sessions.

    `cancelled` has the rollouts of which no attempt is to go on, and why.
    """

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
        nobody = _nobody(config.exp_id)
        self.gateway_calls = Availability("the gateway", config, gateway.version)
        self._storing = Availability("the store of outcomes", config, lambda: transport.decision(nobody))
        shared = {"gateway": gateway, "transport": transport, "asking": self.gateway_calls}
        self._launcher = Launcher(config, runtime=runtime, limiter=limiter or Unlimited(), **shared)
        self._judge: VerifierRunner | None = None
        if verifiers:
            # They run elsewhere: the rate of launches is that of the place of agents.
            own = LocalLimiter(RateLimits())
            self._judge = VerifierRunner(
                self._launcher, Launcher(config, runtime=verifiers, limiter=own, **shared)
            )
        if config.separate_verifier != (verifiers is not None):
            raise ValueError("a plan is judged if there are verifiers, and only then")
        self._notice = AttemptWatcher(
            config, runtime=runtime, run_state=run_state, storing=self._storing, **shared
        )
        self.cancelled: dict[str, Failure] = {}

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._chores = [tasks.create_task(chore) for chore in self._notice.chores()]
        self._endings: set[asyncio.Task[None]] = set()

    async def wait_for_teardown(self) -> None:
        """Until the agents of all that is decided have ended, and the store knows what was used."""
        if self._endings:
            await asyncio.wait(self._endings)  # each has a deadline of its own
        await self._notice.flush()

    def close(self) -> None:
        for task in (*self._chores, *self._endings):
            task.cancel()

    def cancel(self, rollout_id: str, failure: Failure) -> None:
        self.cancelled[rollout_id] = failure
        for running in self._notice.running.values():
            if running.waiting.rollout.id == rollout_id:
                running.give_up(failure)

    async def run(self, rollout: Rollout, attempt: Attempt, born: float) -> Outcome:
        """From its launch to what stands in the store."""
        await asyncio.to_thread(self._run_state.begin_attempt, attempt)
        running = RunningAttempt(rollout, attempt, born)
        running.draw = await asyncio.to_thread(self._draw, rollout.id)
        failure = self.cancelled.get(rollout.id)
        if failure is None:
            self._notice.running[attempt.session_id] = running  # a cancel reaches it from here on
            try:
                failure = await self._attempt(running)
            finally:
                self._notice.running.pop(attempt.session_id, None)
        return await self._decide(running, failure)

    async def _attempt(self, running: RunningAttempt) -> Failure | None:
        """None once it is decided; else why it is given up."""
        try:
            failure = await self._launcher.launch(running)
            if failure is None:
                await asyncio.to_thread(self._run_state.mark_launched, running.waiting.attempt)
                failure = await self._await_outcome(running)
        except Outage:
            raise
        except Exception as error:
            log.warning("%s is given up: %s", running.session_id, describe_error(error))
            failure = failure_from_error(error, "its outcome cannot be waited for")
        return failure

    def _draw(self, rollout_id: str) -> str:
        """The name of an attempt's random numbers. What broke around an attempt does not redraw it: long
        ones break more often, and would be replaced by shorter ones.
        """
        failures = [tried.failure for tried in self._run_state.attempts(rollout_id) if tried.failure]
        redrawn = sum(failure.kind is not FailureKind.INFRASTRUCTURE for failure in failures)
        return f"{rollout_id}.{1 + redrawn}"

    async def resume(self, rollout: Rollout, tried: AttemptRecord, born: float) -> Outcome | None:
        """An attempt somebody before us began: its outcome if it has one or gets one, else it is given up."""
        attempt = tried.attempt
        running = RunningAttempt(rollout, attempt, born)
        running.draw = await asyncio.to_thread(self._draw, rollout.id)  # as its session was opened with
        running.asked = True
        given_up = infrastructure_failure("the collector was restarted", Reason.DIED)
        try:
            decided = await self._decision(running)
            if not isinstance(decided, Fence):  # nobody tells of a fence
                self._notice.inherit()
            if decided is None and await self._lives(attempt):
                log.info("%s still runs and is waited for", attempt.session_id)
                running.progress.launched_at = loop_time() - tried.age_s
                running.news.set()  # a hint that came in between is nobody's any more
                return await self._decide(running, await self._await_outcome(running))
        except Outage:
            raise
        except Exception as error:
            given_up = failure_from_error(error, "the collector was restarted, and cannot take it over")
            log.warning("%s: %s", attempt.session_id, given_up.message)
        stands = running.stands
        if stands is None:
            with suppress(WireError):  # what it left behind cannot be read; the next attempt takes its place
                stands, _ = await self._fence(running, given_up.message)
        if isinstance(stands, OutcomeRecord):
            return await self._decide(running, None)
        await self._conclude(running, given_up, delivered=False)
        sampled = await self.sampled_tokens(attempt)
        await asyncio.to_thread(self._run_state.record_tokens, attempt, sampled)
        return None

    async def sampled_tokens(self, attempt: Attempt) -> int:
        """What an attempt that came to nothing has cost; 0 where the gateway does not say."""
        session_id = attempt.session_id
        try:
            found = await self.gateway_calls.call("states", lambda: self._gateway.states([session_id]))
        except Outage:
            raise
        except Exception as error:
            log.warning("%s: what it sampled is not known: %s", session_id, describe_error(error))
            return 0
        state = found.get(session_id)
        return state.tokens.get("sampled", 0) if state else 0

    async def unsupported_reason(self, attempt: Attempt) -> str:
        """Why the model serves no session of this agent, where the gateway says so; else empty."""
        session_id = attempt.session_id
        try:  # once: a failure that is known does not wait for a gateway that says nothing of it
            async with asyncio.timeout(LOOKS * self._config.watch_interval_s):
                state = (await self._gateway.states([session_id])).get(session_id)
        except Exception as error:
            log.warning("%s: why it was refused is not known: %s", session_id, describe_error(error))
            return ""
        return state.unsupported if state and not state.turns else ""

    # --- what runs already -----------------------------------------------------------------------

    async def _lives(self, attempt: Attempt) -> bool:
        """Whether an agent that an earlier process launched still works on it."""
        found = await self._adopted(attempt)
        if found or (found is False and not self._judge):
            return found
        session_id = attempt.session_id
        states = await self.gateway_calls.call("states", lambda: self._gateway.states([session_id]))
        state = states.get(session_id)
        if state is None or state.phase != "open":
            return self._judge is not None and state is not None and state.phase == "completed"
        if found is False:
            return False
        seen = state.unseen_s if state.unseen_s is not None else state.idle_s
        return bool(state.in_flight) or seen <= self._config.deadlines.heartbeat_timeout_s

    async def _adopted(self, attempt: Attempt) -> bool | None:
        """None where its place does not know, or cannot be asked: then signs of life tell."""
        try:
            async with asyncio.timeout(self._config.deadlines.launch_timeout_s):
                return await self._runtime.adopt(attempt)
        except Exception as error:
            log.warning("%s cannot be looked for where it ran: %s", attempt.session_id, describe_error(error))
            return None

    # --- its outcome -----------------------------------------------------------------------------

    async def _await_outcome(self, running: RunningAttempt) -> Failure | None:
        """None once the attempt is decided; else why it is given up."""
        self._notice.running[running.session_id] = running
        if failure := self.cancelled.get(running.waiting.rollout.id):
            running.give_up(failure)
        exiting = asyncio.create_task(self._exited(running))
        exiting.add_done_callback(lambda _: running.news.set())
        grading: asyncio.Task[Failure | None] | None = None
        try:
            while True:
                await running.news.wait()
                running.news.clear()
                if running.exit is None and exiting.done():
                    running.exit = exiting.result()
                    # While its verifier is at work, the end of the agent says nothing about the outcome.
                    running.progress.ended_at = None if running.exit.failure or grading else loop_time()
                if await self._decision(running) is not None:
                    return None
                grading = grading or await self._grading(running)
                if failure := _given_up(running, grading):
                    return failure
        finally:
            self._notice.running.pop(running.session_id, None)
            if grading:
                grading.cancel()
                await asyncio.gather(grading, return_exceptions=True)
            if exiting.done():
                running.exit = running.exit or exiting.result()
            else:
                exiting.cancel()
                await asyncio.gather(exiting, return_exceptions=True)

    async def _exited(self, running: RunningAttempt) -> Exit:
        """Until its agent has ended. A runtime that cannot say is asked again; meanwhile its outcome, its
        session and its deadlines tell.
        """
        pause_s, longest_s = BACKOFF_S
        while True:
            try:
                return await self._runtime.wait(running.waiting.attempt)
            except RolloutFailure as error:
                return Exit(error.failure)
            except Exception as error:
                if not running.unknown:
                    log.warning("%s: its end is not told: %s", running.session_id, describe_error(error))
                running.unknown = describe_error(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _grading(self, running: RunningAttempt) -> asyncio.Task[Failure | None] | None:
        """A verifier at work on what the agent has handed in, if it has."""
        if not self._judge:
            return None
        ended, running.progress.ended_at, asked_at = running.progress.ended_at, None, loop_time()
        submission = await self._judge.submission(running)
        if submission is None:  # the time the gateway took to say so is not the agent's
            running.progress.ended_at = None if ended is None else ended + loop_time() - asked_at
            return None
        running.progress.grading, running.progress.ended_at = True, None
        running.progress.completed_at = running.progress.completed_at or loop_time()
        grading = asyncio.create_task(self._judge.grade(running, submission))
        grading.add_done_callback(lambda _: running.news.set())
        return grading

    async def _decision(self, running: RunningAttempt) -> object | None:
        """What the store says of it, kept in `stands`; None while it is open."""
        try:
            waiting = running.waiting
            stands = await self._storing.call("decision", lambda: self._transport.decision(waiting))
        except WireError as error:
            running.unreadable = str(error)
            return error
        running.stands = stands
        return stands

    async def _decide(self, running: RunningAttempt, failure: Failure | None) -> Outcome:
        """What stands in the store, or our fence with the failure we saw. Ends what is left of it."""
        if failure and running.unknown:
            told = f"{failure.message}; its runtime cannot tell its end: {running.unknown}"
            failure = structs.replace(failure, message=told)
        if failure is None and running.unreadable:
            failure = infrastructure_failure(
                f"its outcome cannot be read: {running.unreadable}", Reason.UPLOAD
            )
        reason = failure.message if failure else "the agent ended without an outcome"
        stands = running.stands
        if stands is None:
            try:
                stands, failure = await self._fence(running, reason, failure)
            except WireError as error:
                failure = infrastructure_failure(f"its outcome cannot be read: {error}", Reason.UPLOAD)
        else:
            self._notice.used.append(running.waiting.attempt)
        if isinstance(stands, OutcomeRecord):
            outcome = _checked(stands.outcome, running.waiting.attempt)
        else:
            attempt = running.waiting.attempt
            outcome = wire.failed(
                attempt.rollout_id, attempt.n, failure or infrastructure_failure(reason, Reason.DIED)
            )
        await self._conclude(running, outcome.failure, isinstance(stands, OutcomeRecord))
        return outcome

    async def _fence(
        self, running: RunningAttempt, reason: str, failure: Failure | None = None
    ) -> tuple[OutcomeRecord | Fence | None, Failure | None]:
        """What stands, and the failure there is if that is no outcome. Raises WireError where what stands
        cannot be read. An attempt that the store does not let us fence is given up without: the run_state
        alone says which attempt of a rollout counts.
        """
        waiting = running.waiting
        stands = None
        try:
            stands = await self._storing.call("fence", lambda: self._transport.fence(waiting, reason))
        except (Outage, WireError):
            raise
        except Exception as error:
            log.warning("%s is given up without a fence: %s", running.session_id, describe_error(error))
            failure = failure or failure_from_error(error, "its outcome cannot be decided", Reason.UPLOAD)
        self._notice.used.append(waiting.attempt)
        return stands, failure

    async def _conclude(self, running: RunningAttempt, failure: Failure | None, delivered: bool) -> None:
        """End what is left of an attempt that is decided; its agent in the background."""
        if failure:
            await self._abort(running.waiting.attempt, failure.message)
        if not running.asked:
            return
        ending = self._tasks.create_task(self._tear_down(running, LINGER_S if delivered else 0.0))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _tear_down(self, running: RunningAttempt, linger_s: float) -> None:
        """End the agent's session wherever it runs; one that has just delivered may end by itself first."""
        attempt = running.waiting.attempt
        if self._judge and running.judge:
            await self._judge.stop(running.judge)
        left = running.exit
        if left is None and linger_s and not self._runtime.capabilities.lingers:
            with suppress(Exception):  # then it is stopped
                left = await asyncio.wait_for(self._runtime.wait(attempt), linger_s)
        if left and not left.failure and not left.lingers:
            return
        await self._launcher.stop(attempt)

    async def _abort(self, attempt: Attempt, reason: str) -> None:
        """A session that was never opened has nothing to abort."""
        try:
            await self.gateway_calls.call("abort", lambda: self._gateway.abort(attempt.session_id, reason))
        except Exception as error:
            log.info("%s was not aborted: %s", attempt.session_id, describe_error(error))


def _given_up(running: RunningAttempt, grading: asyncio.Task[Failure | None] | None) -> Failure | None:
    """Why nothing more is expected. Once an agent has handed in, its place may break."""
    failure = running.exit.failure if running.exit and not grading else None
    if grading and grading.done():
        failure = grading.result()
        running.progress.ended_at = running.progress.ended_at or loop_time()
    return failure or running.verdict


def _nobody(exp_id: str) -> PendingAttempt:
    """An attempt that never was: what the store says of it says whether the store answers."""
    rollout = Rollout(id="nobody", exp_id=exp_id, group_id="nobody", task=Task("nobody", {}))
    return PendingAttempt(rollout, Attempt(rollout.id, 1))


def _checked(outcome: Outcome, attempt: Attempt) -> Outcome:
    if (outcome.rollout_id, outcome.attempt) == (attempt.rollout_id, attempt.n):
        return outcome
    told = f"the outcome stored for {attempt.session_id} says it is of {outcome.session_id}"
    return wire.failed(attempt.rollout_id, attempt.n, Failure(FailureKind.VERIFIER, Reason.REWARD, told))
