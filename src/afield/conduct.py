"""One rollout, from its first attempt to the outcome that stands.

Open a session, launch an attempt, wait for its outcome, decide. Whatever happens to an attempt, it is
decided exactly once: by its commit, or by our fence. A failure of a task, a verifier or the
infrastructure is tried again within its budget, in a fresh session; a policy failure is an outcome like
any other. What is finished goes to the spool and leaves memory. After a crash the same call goes on:
finished rollouts are not run again, committed ones are adopted, and agents that still run are waited
for. A store or a gateway that does not answer is waited for, and nothing is held against a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

from afield import wire
from afield.batches.rewards import usable
from afield.errors import RETRIED, AfieldError, Missing, Unavailable, WireError, first_cause
from afield.judge import Judge
from afield.launch import Launcher, broken, now, patiently
from afield.ledger import Ledger, Note, Tried
from afield.limiter import Limiter, LocalLimiter, Pace, Unlimited
from afield.notice import Noticer, Running
from afield.plan import Plan, Watcher
from afield.seams import Fence, Gateway, Record, Runtime, Transport, Waiting
from afield.spool import Spool
from afield.types import Attempt, Failure, FailureKind, Finished, Outcome, Reason, Rollout, Split
from afield.wire import OutcomeRecord

log = logging.getLogger("afield.collect")

LINGER_S = 5.0  # an agent that has delivered is given this long to end by itself
T = TypeVar("T")


class Conductor:
    """`async with` listens to hints, sweeps the store and watches the sessions; used from one event loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        gateway: Gateway,
        runtime: Runtime,
        transport: Transport,
        ledger: Ledger,
        spool: Spool,
        watcher: Watcher,
        limiter: Limiter | None = None,
        verifiers: Runtime | None = None,
    ) -> None:
        self._plan = plan
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._ledger = ledger
        self._spool = spool
        self._watcher = watcher
        shared = {"gateway": gateway, "transport": transport}
        self._launcher = Launcher(plan, runtime=runtime, limiter=limiter or Unlimited(), **shared)
        self._judge: Judge | None = None
        if verifiers:
            # They run elsewhere: the rate of launches is that of the place of agents.
            own = LocalLimiter(Pace())
            self._judge = Judge(self._launcher, Launcher(plan, runtime=verifiers, limiter=own, **shared))
        if plan.judged != (verifiers is not None):
            raise ValueError("a plan is judged if there are verifiers, and only then")
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._notice = Noticer(plan, gateway, transport, ledger)
        self._runs: dict[str, asyncio.Task[Note]] = {}
        self._queued: dict[str, asyncio.Timeout] = {}
        self._cancelled: dict[str, Failure] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._chores = [self._tasks.create_task(chore) for chore in self._notice.chores()]
        self._endings: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        """What still runs is left undecided: another conductor of the same ledger goes on with it."""
        try:
            if exc[0] is None:
                if self._endings:
                    await asyncio.wait(self._endings)  # each has a deadline of its own
                await self._notice.flush()
        except BaseException as error:
            exc = (type(error), error, error.__traceback__)
            raise
        finally:
            for task in (*self._chores, *self._runs.values(), *self._endings):
                task.cancel()
            try:
                await self._tasks.__aexit__(*exc)
            except BaseExceptionGroup as errors:
                raise first_cause(errors) from errors

    @property
    def has_room(self) -> bool:
        """Whether another rollout would begin at once."""
        return len(self._runs) < self._plan.concurrency

    async def run(self, rollout: Rollout) -> Note:
        """How the rollout ended; it lies in the spool then. Running one again, or twice, gives the same."""
        return await asyncio.shield(self.start(rollout))

    def start(self, rollout: Rollout) -> asyncio.Task[Note]:
        """The same, under way. The task is the conductor's: `cancel` ends the rollout, not `Task.cancel`."""
        task = self._runs.get(rollout.id)
        if task is None:
            task = self._runs[rollout.id] = self._tasks.create_task(self._run(rollout))
            task.add_done_callback(lambda _: self._runs.pop(rollout.id, None))
        return task

    def cancel(self, rollout_id: str, why: str, reason: Reason = Reason.CANCELLED) -> None:
        """End a rollout that runs or waits; `run` ends with this failure, and nothing is tried again.

        One that has ended, or whose outcome is in the store already, keeps its outcome.
        """
        if rollout_id not in self._runs:
            return
        failure = self._cancelled[rollout_id] = broken(why, reason)
        queueing = self._queued.pop(rollout_id, None)
        if queueing and not queueing.expired():
            queueing.reschedule(now())
        for running in self._notice.running.values():
            if running.waiting.rollout.id == rollout_id:
                running.give_up(failure)

    # --- rollouts --------------------------------------------------------------------------------

    async def _run(self, rollout: Rollout) -> Note:
        born = now()
        try:
            if note := await self._known(rollout):
                return note
            entered = await self._enters(rollout.id)
            try:
                return await self._until_it_counts(rollout, born)
            finally:
                if entered:
                    self._slots.release()
        finally:
            self._cancelled.pop(rollout.id, None)

    async def _known(self, rollout: Rollout) -> Note | None:
        """How it ended, if it has; what is not in the spool any more the gateway gives again."""
        note = self._ledger.finished(rollout.id)
        if note is None or self._spool.holds(rollout.id):
            return note
        outcome, record = await self._recorded(rollout, note.outcome)
        if outcome is not note.outcome:
            self._ledger.forget(rollout.id)  # nothing is left of what it sampled
            return None
        return await self._patiently(lambda: self._keep(rollout, outcome, record, note.attempts))

    async def _enters(self, rollout_id: str) -> bool:
        """Whether there was a place; without one it is cancelled."""
        queue_s, others = self._plan.deadlines.queue_s, self._plan.concurrency
        try:
            async with asyncio.timeout(queue_s) as queueing:
                if rollout_id not in self._cancelled:
                    self._queued[rollout_id] = queueing
                    return await self._slots.acquire()
        except TimeoutError:
            told = f"no place in {queue_s} s beside {others} others; raise concurrency or queue_s"
            self._cancelled.setdefault(rollout_id, broken(told, Reason.LAUNCH))
        finally:
            self._queued.pop(rollout_id, None)
        return False

    async def _until_it_counts(self, rollout: Rollout, born: float) -> Note:
        """Attempts until one has an outcome that stands, or a budget of retries is used up."""
        tried = self._ledger.attempts(rollout.id)
        spent = Counter(t.failure.kind for t in tried if t.failure)
        n = len(tried)
        undecided = tried[-1] if tried and tried[-1].failure is None else None
        outcome = await self._resume(rollout, undecided, born) if undecided else None
        while True:
            if outcome is None:
                n += 1
                outcome = await self._attempt(rollout, Attempt(rollout.id, n), born)
            if not self._will_retry(rollout, outcome, spent, born):
                kept, record = await self._recorded(rollout, outcome)
                again = kept is not outcome and self._will_retry(rollout, kept, spent, born, graded=False)
                if not again:
                    return await self._end(rollout, kept, record, n)
                outcome = kept
            assert outcome.failure is not None
            self._watcher.attempt_ended(rollout, outcome, True)
            attempt = Attempt(rollout.id, outcome.attempt)
            self._ledger.fail(attempt, outcome.failure, await self._sampled(attempt))
            outcome = None

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
        if outcome.failure is None or outcome.failure.kind not in RETRIED or rollout.id in self._cancelled:
            return False
        if graded and self._judge and outcome.failure.kind is FailureKind.VERIFIER:
            return False
        life_s = self._plan.deadlines.life_s
        if life_s is not None and now() - born > life_s:
            return False
        kind = outcome.failure.kind
        spent[kind] += 1
        return spent[kind] <= self._plan.retries.get(kind, 0)

    async def _end(self, rollout: Rollout, outcome: Outcome, record: Record, n: int) -> Note:
        note = await self._patiently(lambda: self._keep(rollout, outcome, record, n))
        self._ledger.finish(rollout.id, note)
        self._watcher.attempt_ended(rollout, note.outcome, False)
        return note

    async def _recorded(self, rollout: Rollout, outcome: Outcome) -> tuple[Outcome, Record]:
        """What its session sampled. A reward for a session that is gone, or cannot be read, is none; nor is
        one that nothing can be trained with."""
        try:
            record = await self._patiently(lambda: self._gateway.finalize(outcome.session_id))
        except (Missing, Unavailable) as error:
            await self._gateway.version()  # raises where it is not this session alone
            if outcome.failure is None:
                lost = broken(str(error), Reason.ENGINE)
                outcome = wire.failed(outcome.rollout_id, outcome.attempt, lost)
            return outcome, Record(trajectories=(), excluded=())
        names = self._plan.rewards if rollout.split is Split.TRAIN else ()
        return usable(finished_of(rollout, outcome, record, 1), names), record

    async def _keep(self, rollout: Rollout, outcome: Outcome, record: Record, n: int) -> Note:
        """Everything there is of a rollout, to the spool."""
        finished = finished_of(rollout, outcome, record, n)
        self._spool.put(finished)
        self._watcher.rollout_finished(finished)
        spans = [span for trajectory in finished.trajectories for span in trajectory.versions]
        return Note(
            outcome,
            n,
            sum(t.owned for t in finished.trajectories),
            min((s.low for s in spans), default=None),
            max((s.high for s in spans), default=None),
        )

    # --- attempts --------------------------------------------------------------------------------

    async def _resume(self, rollout: Rollout, tried: Tried, born: float) -> Outcome | None:
        """An attempt somebody before us began: its outcome if it has one or gets one, else it is given up."""
        attempt = tried.attempt
        running = Running(rollout, attempt, born)
        running.asked = True
        decided = await self._decision(running.waiting)
        if not isinstance(decided, Fence):  # nobody tells of a fence
            self._notice.inherit()
        if decided is None and await self._lives(attempt):
            log.info("%s still runs and is waited for", attempt.session_id)
            running.progress.launched = now() - tried.age_s
            running.news.set()  # a hint that came in between is nobody's any more
            return await self._decide(running, await self._await_outcome(running))
        given_up = broken("the collector was restarted", Reason.DIED)
        try:
            stands = await self._fence(running.waiting, given_up.message)
        except WireError:  # what it left behind cannot be read; the next attempt takes its place
            stands = None
        if isinstance(stands, OutcomeRecord):
            return await self._decide(running, None)
        await self._conclude(running, given_up, delivered=False)
        self._ledger.spent(attempt, await self._sampled(attempt))
        return None

    async def _lives(self, attempt: Attempt) -> bool:
        """Whether an agent that an earlier process launched still works on it."""
        found = await self._adopted(attempt)
        if found or (found is False and not self._judge):
            return found
        state = (await self._patiently(lambda: self._gateway.states([attempt.session_id]))).get(
            attempt.session_id
        )
        if state is None or state.phase != "open":
            return self._judge is not None and state is not None and state.phase == "completed"
        if found is False:
            return False
        seen = state.unseen_s if state.unseen_s is not None else state.idle_s
        return bool(state.in_flight) or seen <= self._plan.deadlines.dead_s

    async def _adopted(self, attempt: Attempt) -> bool | None:
        """None where its place does not know, or cannot be asked: then signs of life tell."""
        try:
            return await self._runtime.adopt(attempt)
        except AfieldError as error:
            log.warning("%s cannot be looked for where it ran: %s", attempt.session_id, error)
            return None

    def _draw(self, rollout_id: str) -> str:
        """The name of an attempt's random numbers. What broke around an attempt does not redraw it: long
        ones break more often, and would be replaced by shorter ones.
        """
        failures = [tried.failure for tried in self._ledger.attempts(rollout_id) if tried.failure]
        redrawn = sum(failure.kind is not FailureKind.INFRASTRUCTURE for failure in failures)
        return f"{rollout_id}.{1 + redrawn}"

    async def _attempt(self, rollout: Rollout, attempt: Attempt, born: float) -> Outcome:
        self._ledger.begin(attempt)
        running = Running(rollout, attempt, born)
        running.draw = self._draw(rollout.id)
        failure = self._cancelled.get(rollout.id)
        if failure is None:
            self._notice.running[attempt.session_id] = running  # a cancel reaches it from here on
            failure = await self._launcher.launch(running)
        if failure is None:
            self._ledger.launched(attempt)
            failure = await self._await_outcome(running)
        self._notice.running.pop(attempt.session_id, None)
        return await self._decide(running, failure)

    async def _await_outcome(self, running: Running) -> Failure | None:
        """None once the attempt is decided; else why it is given up."""
        self._notice.running[running.session_id] = running
        if failure := self._cancelled.get(running.waiting.rollout.id):
            running.give_up(failure)
        exiting = asyncio.create_task(self._runtime.wait(running.waiting.attempt))
        exiting.add_done_callback(lambda _: running.news.set())
        grading: asyncio.Task[Failure | None] | None = None
        try:
            while True:
                await running.news.wait()
                running.news.clear()
                if running.exit is None and exiting.done():
                    running.exit = exiting.result()
                    running.progress.ended = None if running.exit.failure else now()
                if await self._decision(running.waiting) is not None:
                    return None
                grading = grading or await self._grading(running)
                if failure := _given_up(running, grading):
                    return failure
        finally:
            del self._notice.running[running.session_id]
            if grading:
                grading.cancel()
                await asyncio.gather(grading, return_exceptions=True)
            if exiting.done():
                running.exit = running.exit or exiting.result()
            else:
                exiting.cancel()
                await asyncio.gather(exiting, return_exceptions=True)

    async def _grading(self, running: Running) -> asyncio.Task[Failure | None] | None:
        """A verifier at work on what the agent has handed in, if it has."""
        submission = await self._judge.submission(running) if self._judge else None
        if not self._judge or submission is None:
            return None
        running.progress.grading, running.progress.ended = True, None
        running.progress.completed = running.progress.completed or now()
        grading = asyncio.create_task(self._judge.grade(running, submission))
        grading.add_done_callback(lambda _: running.news.set())
        return grading

    async def _decision(self, waiting: Waiting) -> object | None:
        try:
            return await self._patiently(lambda: self._transport.decision(waiting))
        except WireError as error:
            return error

    async def _decide(self, running: Running, failure: Failure | None) -> Outcome:
        """What stands in the store, or our fence with the failure we saw. Ends what is left of it."""
        reason = failure.message if failure else "the agent ended without an outcome"
        try:
            stands = await self._fence(running.waiting, reason)
        except WireError as error:
            stands, failure = None, broken(f"its outcome cannot be read: {error}", Reason.UPLOAD)
        if isinstance(stands, OutcomeRecord):
            outcome = _checked(stands.outcome, running.waiting.attempt)
        else:
            attempt = running.waiting.attempt
            outcome = wire.failed(attempt.rollout_id, attempt.n, failure or broken(reason, Reason.DIED))
        await self._conclude(running, outcome.failure, isinstance(stands, OutcomeRecord))
        return outcome

    async def _fence(self, waiting: Waiting, reason: str) -> OutcomeRecord | Fence:
        stands = await self._patiently(lambda: self._transport.fence(waiting, reason))
        self._notice.used.append(waiting.attempt)
        return stands

    async def _conclude(self, running: Running, failure: Failure | None, delivered: bool) -> None:
        """End what is left of an attempt that is decided; its agent in the background."""
        if failure:
            await self._abort(running.waiting.attempt, failure.message)
        if not running.asked:
            return
        ending = self._tasks.create_task(self._tear_down(running, LINGER_S if delivered else 0.0))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _tear_down(self, running: Running, linger_s: float) -> None:
        """End the agent's session wherever it runs; one that has just delivered may end by itself first."""
        attempt = running.waiting.attempt
        if self._judge and running.judge:
            await self._judge.stop(running.judge)
        left = running.exit
        if left is None and linger_s and not self._runtime.capabilities.lingers:
            with suppress(TimeoutError):
                left = await asyncio.wait_for(self._runtime.wait(attempt), linger_s)
        if left and not left.failure and not left.lingers:
            return
        await self._launcher.stop(attempt)

    async def _abort(self, attempt: Attempt, reason: str) -> None:
        """A session that was never opened has nothing to abort."""
        try:
            await self._patiently(lambda: self._gateway.abort(attempt.session_id, reason))
        except AfieldError as error:
            log.info("%s was not aborted: %s", attempt.session_id, error)

    async def _sampled(self, attempt: Attempt) -> int:
        """What an attempt that came to nothing has cost."""
        found = await self._patiently(lambda: self._gateway.states([attempt.session_id]))
        state = found.get(attempt.session_id)
        return state.tokens.get("sampled", 0) if state else 0

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await patiently(ask, self._plan.patience_s)


def _given_up(running: Running, grading: asyncio.Task[Failure | None] | None) -> Failure | None:
    """Why nothing more is expected. Once an agent has handed in, its place may break."""
    failure = running.exit.failure if running.exit and not grading else None
    if grading and grading.done():
        failure = grading.result()
        running.progress.ended = running.progress.ended or now()
    return failure or running.verdict


def _checked(outcome: Outcome, attempt: Attempt) -> Outcome:
    if (outcome.rollout_id, outcome.attempt) == (attempt.rollout_id, attempt.n):
        return outcome
    told = f"the outcome stored for {attempt.session_id} says it is of {outcome.session_id}"
    return wire.failed(attempt.rollout_id, attempt.n, Failure(FailureKind.VERIFIER, Reason.REWARD, told))


def finished_of(rollout: Rollout, outcome: Outcome, record: Record, attempts: int) -> Finished:
    return Finished(
        rollout=rollout,
        outcome=outcome,
        trajectories=record.trajectories,
        excluded=record.excluded,
        turns=record.turns,
        attempts=attempts,
    )
