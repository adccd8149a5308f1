"""RolloutClient: submit rows, get futures, batches or groups of rollouts.

1. One background thread with one event loop runs all rollouts of a client. Every method is thread-safe.
2. Rollout ids are given by the caller, or derived from experiment, input and a counter. A program that is
   started again on the same run directory reuses finished rollouts.
3. A rollout is ended, wherever it runs, when its caller stops waiting: after a timeout or `cancel`, when a
   batch loop is left early, or when the client is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from queue import SimpleQueue
from typing import Self, TypedDict, TypeVar, Unpack

from msgspec import structs

from afield.client.arguments import OpenArguments, with_signature
from afield.client.batch import BatchItem, EndedRequest, GroupAssembler, Put, RolloutBatch, as_item
from afield.client.futures import RolloutFuture
from afield.client.ids import IdAllocator, Row, digest
from afield.errors import Conflict, NotFound, UsageError, VerifierFailure
from afield.interfaces import Gateway, Runtime, Transport
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.reward_function import (
    RewardFunction,
    give_rewards,
    rewarded_outcomes,
    write_rewards,
)
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RolloutSummary, RunDirectory, RunInfo, RunState
from afield.ratelimit import LeasedLimiter, Limiter
from afield.runs.token_account import ExclusionWatch, TokenAccount, count_tokens
from afield.types import FailureKind, Group, Outcome, Reason, Rollout, RolloutResult, Sampling, Split
from afield.utils.loop_thread import LoopThread

T = TypeVar("T")
log = logging.getLogger(__name__)
CLOSED = "the client is closed; open another one: on the same directory it reuses the finished rollouts"
NOT_STARTED = "the client was not started: use it in a 'with' block, or call start()"


class NullObserver:
    """Observer that ignores all events."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None: ...

    def rollout_finished(self, result: RolloutResult) -> None: ...


class TokenCounter:
    """Observer that counts sampled tokens, warns about excluded ones and forwards all events."""

    def __init__(self, observer: RolloutObserver) -> None:
        self._observer = observer
        self._watch = ExclusionWatch()

    @property
    def account(self) -> TokenAccount:
        return self._watch.account

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None:
        self._observer.attempt_ended(rollout, outcome, will_retry)

    def rollout_finished(self, result: RolloutResult) -> None:
        if warning := self._watch.add(count_tokens([result])):
            log.warning("%s", warning)
        self._observer.rollout_finished(result)

    def rewarded(self, result: RolloutResult) -> None:
        """Count the tokens of a rollout as trained once the caller has given its reward."""
        self._watch.account = self._watch.account.rewarded(sum(row.owned for row in result.trajectories))


class BatchOptions(TypedDict, total=False):
    """Options of `run_batch`, `run_groups` and their async forms."""

    rollouts: int
    """Rollouts per row; by default `RolloutConfig.rollouts`."""
    timeout: float | None
    """Seconds until unfinished rollouts are ended and returned as failures; None is no limit."""
    sampling: Sampling | None
    """Sampling parameters; None uses those of the run."""
    split: Split
    """Training or validation; by default training."""


class RolloutClient:
    """Client that runs rollouts through a gateway, a runtime and a transport.

    Use it in a `with` block, or call `start` and `close`. The client enters gateway, runtime and transport in
    its own thread, so pass them unopened. `RolloutClient.open` creates the components from names.

    - `gateway`: records the model calls of agents; entered with the client.
    - `runtime`: launches agents; entered with the client.
    - `transport`: brings outcomes from agents; entered with the client.
    - `run`: directory with run state and finished rollouts; locked while the client is open.
    - `observer`: called after each attempt and rollout; by default none.
    - `limiter`: limits the rate of launches and of other calls of the runtime; by default no limit.
    - `verifiers`: runtime of verifiers, for `separate_verifier`; by default none.
    - `info`: description of the run, written to its directory; by default kind "client" and the model.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gateway: AbstractAsyncContextManager[Gateway],
        runtime: Runtime,
        transport: Transport,
        run: RunDirectory,
        observer: RolloutObserver | None = None,
        limiter: Limiter | None = None,
        verifiers: Runtime | None = None,
        info: RunInfo | None = None,
    ) -> None:
        self.config = config
        self.info = info or RunInfo(kind="client", model=config.model_id)
        self.rundir = run
        self.limiter = limiter
        self._gateway = gateway
        self._runtime = runtime
        self._transport = transport
        self._verifiers = verifiers
        self._observer = TokenCounter(observer or NullObserver())
        self._run_state = RunState(run.run_state)
        self._rollout_store = RolloutStore(run.rollout_store, index=run.index)
        self._ids = IdAllocator(config.exp_id)
        self._lock = threading.Lock()
        """Guards `_closed` and `_live`, which callers and the client's thread share."""
        self._closed = False
        self._live: dict[str, RolloutFuture] = {}
        """Futures whose tasks have not ended, by rollout id; a cancelled one stays until then."""
        self._reward_lock = threading.Lock()
        """Held while rewards are recorded and written."""
        self._ready: Future[None] = Future()
        """Completed once agents can be launched, or with the error because of which they cannot."""
        self._error: BaseException | None = None
        """Error that stopped the client, raised by `close`."""
        self._thread = LoopThread(f"afield-client-{config.exp_id}", self._run_until_closed)

        # Used in the client's thread only.
        self._stopping = asyncio.Event()
        self._tasks: dict[RolloutFuture, asyncio.Task[RolloutSummary]] = {}
        self._running_ids: set[str] = set()
        """Rollouts that have a concurrency slot."""

    @classmethod
    @with_signature
    def open(cls, **names: Unpack[OpenArguments]) -> RolloutClient:
        """Create a client from names and start it.

        Give `gateway`, or `endpoint` to evaluate agents without capture, and `agent` unless the runtime
        runs an image or calls served agents. The other arguments are settings of the run, fields of
        `RolloutConfig` (concurrency, retries, sampling, ...) and of `Deadlines` (attempt_timeout_s, ...);
        `afield.client.OpenArguments` describes each. A client with the `exp_id` and directory of an
        earlier one reuses its finished rollouts.
        """
        from afield.client import connect  # it imports this module

        return connect.client(**names).start()

    def start(self) -> Self:
        """Start the client; returns once agents can be launched, and raises if they cannot."""
        with self._lock:
            if self._closed:
                raise UsageError(CLOSED)
            self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._close()  # after KeyboardInterrupt too
            raise
        return self

    def close(self) -> None:
        """Cancel running rollouts and close all components. Repeating is harmless.

        Raises the error that stopped the client, if there was one.
        """
        if error := self._close():
            raise error

    def _close(self) -> BaseException | None:
        """Close the client and return the error that stopped it, if there was one."""
        with self._lock:
            self._closed = True
        self._thread.call(self._stop)
        if not self._thread.join():  # called in a callback, which the thread cannot join
            return None
        error, self._error = self._error, None
        return error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, exc_type: object, *exc: object) -> None:
        error = self._close()
        if error and exc_type is None:
            raise error

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.__exit__, *exc)

    @property
    def tokens(self) -> TokenAccount:
        """Token account of the rollouts that this client has finished."""
        return self._observer.account

    # --- one rollout -----------------------------------------------------------------------------

    def submit(
        self,
        row: Row,
        *,
        input_id: str | None = None,
        rollout_id: str | None = None,
        sampling: Sampling | None = None,
        split: Split = Split.TRAIN,
    ) -> RolloutFuture:
        """Start a rollout and return its future at once.

        Repeating a rollout id returns the same rollout; with another row it raises Conflict.
        """
        request = self._ids.request(row, input_id, rollout_id, sampling=sampling, split=split)
        return self._submit(request.rollout)

    def begin(self, rollout: Rollout) -> RolloutFuture:
        """Start a rollout whose ids the caller has set."""
        return self._submit(rollout)

    def _submit(self, rollout: Rollout) -> RolloutFuture:
        with self._lock:
            self._check_open()
            earlier = self._live.get(rollout.id)
            if earlier is not None:
                _check_same(earlier.rollout, rollout)
                if not earlier.done():
                    return earlier
            future = RolloutFuture(rollout, end=self._cancel, read=self._rollout_store.get)
            self._live[rollout.id] = future
            self._thread.call(partial(self._start_task, future, earlier))
        return future

    def _check_open(self) -> None:
        """Raise UsageError before `start` and after `close`. The caller holds `_lock`."""
        if self._closed or not self._ready.done():
            raise UsageError(CLOSED if self._closed else NOT_STARTED)

    # --- batches and groups ----------------------------------------------------------------------

    def run_batch(self, rows: Iterable[Row], **options: Unpack[BatchOptions]) -> Iterator[BatchItem]:
        """Run each row `rollouts` times and yield items in the order they finish.

        Starts with the first `next`. Leaving the loop early cancels the rest.
        """
        return self._iterate(self._batch(rows, **options), as_item)

    def run_groups(self, rows: Iterable[Row], **options: Unpack[BatchOptions]) -> Iterator[Group]:
        """Run each row `rollouts` times and yield a group once all rollouts of its input have finished."""
        batch = self._batch(rows, **options)
        return self._iterate(batch, GroupAssembler(batch.requests).add)

    def run_batch_async(
        self, rows: Iterable[Row], **options: Unpack[BatchOptions]
    ) -> AsyncIterator[BatchItem]:
        """`run_batch` for `async for`."""
        return self._iterate_async(self._batch(rows, **options), as_item)

    def run_groups_async(self, rows: Iterable[Row], **options: Unpack[BatchOptions]) -> AsyncIterator[Group]:
        """`run_groups` for `async for`."""
        batch = self._batch(rows, **options)
        return self._iterate_async(batch, GroupAssembler(batch.requests).add)

    def _batch(
        self,
        rows: Iterable[Row],
        rollouts: int | None = None,
        timeout: float | None = None,
        sampling: Sampling | None = None,
        split: Split = Split.TRAIN,
    ) -> RolloutBatch:
        count = self.config.rollouts if rollouts is None else rollouts
        if count < 1:
            raise UsageError(f"rollouts = {count} must be at least 1")
        requests = self._ids.requests(rows, count, sampling=sampling, split=split)
        # Twice the concurrency keeps every slot busy without holding a long batch in memory.
        return RolloutBatch(requests, self._submit, ahead=2 * self.config.concurrency, timeout=timeout)

    def _iterate(self, batch: RolloutBatch, make: Callable[[EndedRequest], T | None]) -> Iterator[T]:
        queue: SimpleQueue[EndedRequest | BaseException] = SimpleQueue()
        with batch:
            self._start_batch(batch, queue.put)
            for _ in batch.requests:
                if (result := make(_or_raise(queue.get()))) is not None:
                    yield result

    async def _iterate_async(
        self, batch: RolloutBatch, make: Callable[[EndedRequest], T | None]
    ) -> AsyncIterator[T]:
        queue: asyncio.Queue[EndedRequest | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(ended: EndedRequest | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the consumer's loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, ended)

        with batch:
            self._start_batch(batch, put)
            for _ in batch.requests:
                if (result := await asyncio.to_thread(make, _or_raise(await queue.get()))) is not None:
                    yield result

    def _start_batch(self, batch: RolloutBatch, put: Put) -> None:
        batch.start(put)
        if (timeout := batch.timeout) is not None:
            self._thread.call(
                lambda: asyncio.get_running_loop().call_later(timeout, batch.expire, self._attempt_count)
            )

    # --- rewards of the caller -------------------------------------------------------------------

    def reward(
        self, rollout: RolloutResult | RolloutFuture | BatchItem | str, value: float, /, **named: float
    ) -> RolloutResult:
        """Give the reward of a finished rollout, with named rewards; returns the rollout with them.

        The rollout's id is enough, also of a rollout of an earlier program on the same directory. The reward
        is kept on disk before this returns. Repeating it is harmless; another reward raises Conflict. Needs
        `reward_from="caller"`.
        """
        self._check_gives_rewards()
        result = self._rewardable(_id_of(rollout))
        reward = {"reward": value, "rewards": named} if named else value
        return self._record_rewards(self._outcomes_with([result], [reward]))[0]

    def reward_group(self, group: Group, function: RewardFunction) -> Group:
        """Give the rewards of a group by a function of its rollouts; returns the group with them.

        `function` gets the rollouts whose reward is pending and returns one reward per rollout. It is not
        called if there are none. All rewards of the group are recorded together, or none.
        """
        self._check_gives_rewards()
        if inspect.iscoroutinefunction(function):
            raise UsageError(
                "the reward function is async, and reward_group() cannot await it; compute the rewards"
                " yourself, and record each with reward()"
            )
        ids = [result.rollout.id for result in group.finished if _pending(result)]
        stored = {rollout_id: self._rewardable(rollout_id) for rollout_id in ids}
        if pending := [result for result in stored.values() if _pending(result)]:
            outcomes = self._outcomes_with(pending, function(list(pending)))
            stored |= {result.rollout.id: result for result in self._record_rewards(outcomes)}
        finished = tuple(stored.get(result.rollout.id, result) for result in group.finished)
        return structs.replace(group, finished=finished)

    def _check_gives_rewards(self) -> None:
        with self._lock:
            self._check_open()
        if self.config.reward_from != "caller":
            raise UsageError(
                "agents give the rewards of this client; open it with reward_from='caller' to record rewards"
                " yourself"
            )

    def _rewardable(self, rollout_id: str) -> RolloutResult:
        """Return a rollout that can take a reward: it has ended, without a failure."""
        if self._run_state.rollout_summary(rollout_id) is None:
            raise NotFound(
                f"rollout {rollout_id} has not ended in {self.rundir.path}; wait for its result first"
            )
        result = self._rollout_store.get(rollout_id)
        if failure := result.outcome.failure:
            message = f"rollout {rollout_id} has a {failure.kind} failure ({failure.message[:200]})"
            raise UsageError(f"{message}; only a rollout without a failure can get a reward")
        return result

    def _outcomes_with(self, results: list[RolloutResult], values: object) -> list[Outcome]:
        """Return the outcomes of these rollouts with the caller's rewards, one value per rollout."""
        try:
            return rewarded_outcomes(results, values, self.config)
        except VerifierFailure as error:
            raise UsageError(str(error)) from error

    def _record_rewards(self, outcomes: list[Outcome]) -> list[RolloutResult]:
        """Record and write the rewards of these outcomes; raises Conflict if a rollout has another one."""
        with self._reward_lock:
            results = [self._rewardable(outcome.rollout_id) for outcome in outcomes]
            for result, outcome in zip(results, outcomes, strict=True):
                if not _pending(result) and result.outcome != outcome:
                    has, wanted = _reward_text(result.outcome), _reward_text(outcome)
                    message = (
                        f"rollout {outcome.rollout_id} has the reward {has}, and a reward cannot be changed"
                    )
                    raise Conflict(f"{message} to {wanted}")
            give_rewards(self._run_state, self._rollout_store, outcomes)
            rewarded = [
                structs.replace(result, outcome=outcome)
                for result, outcome in zip(results, outcomes, strict=True)
            ]
            for result in filter(_pending, results):
                self._observer.rewarded(result)
        return rewarded

    # --- in the client's own thread --------------------------------------------------------------

    async def _run_until_closed(self) -> None:
        """Run the client until it is closed or fails; then complete every future that is left."""
        self._slots = asyncio.Semaphore(self.config.concurrency)
        self._main_task = asyncio.create_task(self._main())
        await asyncio.wait([self._main_task])
        error = None if self._main_task.cancelled() else self._main_task.exception()
        with self._lock:
            self._closed = True
            left = list(self._live.values())
        for future in left:
            future.fail(error) if error else future.cancel()
        if self._ready.done():
            self._error = error
        else:
            self._ready.set_exception(error or CancelledError())

    async def _main(self) -> None:
        """Open the components, serve until `_stop` is called, and close them."""
        async with AsyncExitStack() as stack:
            stack.enter_context(self.rundir.locked("collect"))
            run_state = stack.enter_context(self._run_state)
            stack.callback(self.rundir.index.close)
            await asyncio.to_thread(self.rundir.write_info, self.info)
            await asyncio.to_thread(self.rundir.index.start)
            await asyncio.to_thread(write_rewards, run_state, self._rollout_store)
            if isinstance(self.limiter, LeasedLimiter):
                stack.callback(self.limiter.close)
                self.limiter.check()
            transport = await stack.enter_async_context(self._transport)
            runtime = await stack.enter_async_context(self._runtime)
            gateway = await stack.enter_async_context(self._gateway)
            await gateway.version()
            await runtime.check()
            verifiers = self._verifiers
            if verifiers is not None:
                verifiers = await stack.enter_async_context(verifiers)
                await verifiers.check()
            self._runner = RolloutRunner(
                self.config,
                gateway=gateway,
                runtime=runtime,
                transport=transport,
                run_state=run_state,
                rollout_store=self._rollout_store,
                observer=self._observer,
                limiter=self.limiter,
                verifiers=verifiers,
            )
            await stack.enter_async_context(self._runner)
            self._ready.set_result(None)
            await self._stopping.wait()
            await self._cancel_all()

    def _stop(self) -> None:
        if self._ready.done():
            self._stopping.set()
        else:
            self._main_task.cancel()

    async def _cancel_all(self) -> None:
        with self._lock:
            left = list(self._live.values())
        for future in left:
            future.cancel()
        await asyncio.sleep(0)  # runs the callbacks that `cancel` scheduled
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self.config.deadlines.teardown_timeout_s)
        for task in self._tasks.values():
            task.cancel()

    def _start_task(self, future: RolloutFuture, earlier: RolloutFuture | None) -> None:
        """Start the task of a future; it waits for the task of an earlier future of the same rollout."""
        earlier_task = self._tasks.get(earlier) if earlier else None
        task = asyncio.create_task(self._run(future, earlier_task))
        self._tasks[future] = task
        task.add_done_callback(partial(self._complete_future, future))

    async def _run(
        self, future: RolloutFuture, earlier_task: asyncio.Task[RolloutSummary] | None
    ) -> RolloutSummary:
        if earlier_task is not None:
            await asyncio.wait([earlier_task])
        async with self._slots:
            if future.done():
                raise asyncio.CancelledError
            await asyncio.to_thread(self._check_stored, future.rollout)
            self._running_ids.add(future.rollout.id)
            try:
                return await self._runner.run(future.rollout)
            finally:
                self._running_ids.discard(future.rollout.id)

    def _check_stored(self, rollout: Rollout) -> None:
        """Check that a stored rollout with this id has the same row; forget it if it was cancelled."""
        summary = self._run_state.rollout_summary(rollout.id)
        if summary is None:
            return
        try:
            _check_same(self._rollout_store.get(rollout.id).rollout, rollout)
        except NotFound:
            return
        if summary.outcome.failure and summary.outcome.failure.reason is Reason.CANCELLED:
            self._run_state.forget_rollout(rollout.id)

    def _complete_future(self, future: RolloutFuture, task: asyncio.Task[RolloutSummary]) -> None:
        """Give the future of an ended task its summary or error."""
        del self._tasks[future]
        if task.cancelled() and not future.done():
            return  # the client is closing, and `_run_until_closed` completes the futures that are left
        with self._lock:
            if self._live.get(future.rollout.id) is future:
                del self._live[future.rollout.id]
        if task.cancelled():
            return
        if error := task.exception():
            future.fail(error)
            return
        summary = task.result()
        failure = summary.outcome.failure
        if not future.set_summary(summary) and failure and failure.kind is not FailureKind.POLICY:
            # The failure may come from the cancellation, so a later run tries again.
            self._run_state.forget_rollout(future.rollout.id)

    def _cancel(self, future: RolloutFuture, reason: str) -> None:
        """End a rollout that no caller waits for. Thread-safe."""
        self._thread.call(partial(self._cancel_in_loop, future, reason))

    def _cancel_in_loop(self, future: RolloutFuture, reason: str) -> None:
        if future.rollout.id in self._running_ids and future in self._tasks:
            self._runner.cancel(future.rollout.id, reason)
        elif task := self._tasks.get(future):
            task.cancel()  # it still waits for a concurrency slot

    def _attempt_count(self, rollout_id: str) -> int:
        return max(1, len(self._run_state.attempts(rollout_id)))


def _pending(result: RolloutResult) -> bool:
    return result.outcome.reward_pending


def _reward_text(outcome: Outcome) -> str:
    return f"{outcome.reward} {outcome.rewards or ''}".rstrip()


def _id_of(rollout: RolloutResult | RolloutFuture | BatchItem | str) -> str:
    if isinstance(rollout, str):
        return rollout
    return (rollout.finished if isinstance(rollout, BatchItem) else rollout).rollout.id


def _check_same(earlier: Rollout, rollout: Rollout) -> None:
    """Raise Conflict unless both rollouts of one id have the same row, split and sampling."""
    if digest(earlier.task) != digest(rollout.task):
        message = f"rollout {rollout.id} exists with another row, of input {earlier.task.id!r}"
        raise Conflict(f"{message}; give this one another rollout_id")
    if (earlier.split, earlier.sampling) != (rollout.split, rollout.sampling):
        original = f"{earlier.split}, {earlier.sampling}"
        message = f"rollout {rollout.id} exists with another split or sampling ({original})"
        raise Conflict(f"{message}; give this one another rollout_id")


def _or_raise(ended: EndedRequest | BaseException) -> EndedRequest:
    if isinstance(ended, BaseException):
        raise ended
    return ended
