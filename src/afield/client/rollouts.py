"""Rollouts for scripts, notebooks and async code: submit rows, get futures, batches or groups.

One thread with one event loop owns the connections, the limiter and everything that listens, for all
rollouts of a client; every method may be called from any thread. Rollouts have ids of the caller's, or
ids that follow from experiment, input and a counter, so that the same program, started again on the same
directory, takes up what it had finished instead of running it again. What a caller no longer waits for
(a timeout, a cancel, a loop that was left, a client that was closed) is ended wherever it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Self, TypedDict, TypeVar, Unpack

from afield.client.batch import BatchItem, EndedRequest, GroupAssembler, Put, RolloutBatch, as_item
from afield.client.futures import RolloutFuture
from afield.client.ids import IdAllocator, Row, digest
from afield.errors import Conflict, NotFound, UsageError
from afield.interfaces import Gateway, Runtime, Transport
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RolloutSummary, RunDirectory, RunState
from afield.ratelimit import Limiter, SharedLimiter
from afield.token_account import ExclusionWatch, TokenAccount, count_tokens
from afield.types import FailureKind, Group, Outcome, Reason, Rollout, RolloutResult, Sampling, Split

T = TypeVar("T")
log = logging.getLogger("afield.client")
CLOSED = "the client is closed; open another one, on the same directory it goes on where this one was"


class NullObserver:
    """A observer that looks away."""

    def attempt_ended(self, rollout: Rollout, outcome: Outcome, will_retry: bool) -> None: ...

    def rollout_finished(self, result: RolloutResult) -> None: ...


class TokenCounter:
    """Tells a observer on, and keeps the account of the sampled tokens."""

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


class Options(TypedDict, total=False):
    """Of a batch. Not given, `rollouts` of each row are as many as the plan says.

    After `timeout` seconds what has not ended is ended, and comes out as a failure like any other.
    """

    rollouts: int
    timeout: float | None
    sampling: Sampling | None
    split: Split


class RolloutClient:
    """`with`, or `start` and `close`. The parts come as they are made: they are entered in its own thread.

    The run directory has run state and finished rollouts. `RolloutClient.open` takes names instead of parts.
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
    ) -> None:
        self.config = config
        self.rundir = run
        self._parts = gateway, runtime, transport
        self._observer = TokenCounter(observer or NullObserver())
        self.limiter = limiter
        self._run_state = RunState(run.run_state)
        self._rollout_store = RolloutStore(run.rollout_store)
        self._names = IdAllocator(config.exp_id)
        self._lock = threading.Lock()
        self._live: dict[str, RolloutFuture] = {}
        self._tasks: dict[RolloutFuture, asyncio.Task[RolloutSummary]] = {}
        self._thread: threading.Thread | None = None
        self._conducted: set[str] = set()
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._up: Future[None] = Future()
        self._closed = False
        self._broken: BaseException | None = None

    @classmethod
    def open(cls, **names: Any) -> RolloutClient:
        """A client that is started, of parts that are named: see `afield.connect.client`."""
        # Names are the business of a layer above this one; people look for the door here.
        return import_module("afield.connect").client(**names).start()

    def start(self) -> Self:
        """Returns once agents can be launched; raises what stands in the way of that."""
        with self._lock:
            if self._closed:
                raise UsageError(CLOSED)
            if self._thread is None:
                name = f"afield-client-{self.config.exp_id}"
                self._thread = threading.Thread(target=asyncio.run, args=(self._live_on(),), name=name)
                self._thread.daemon = True  # a program that forgets to close must still be able to end
                self._thread.start()
        try:
            self._up.result()
        except BaseException:
            self._close()  # also when somebody lost patience: what was started so far is ended
            raise
        return self

    def close(self) -> None:
        """End all that still runs, and everything that was started. Repeating is harmless.

        Raises what broke the client, if something did.
        """
        if broken := self._close():
            raise broken

    def _close(self) -> BaseException | None:
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            self._loop.result()
            self._tell(self._stop)
            if thread is threading.current_thread():  # in a callback: it ends when that returns
                return None
            thread.join()
        broken, self._broken = self._broken, None
        return broken

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, *rest: object) -> None:
        broken = self._close()
        if broken and kind is None:
            raise broken

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.__exit__, *exc)

    @property
    def tokens(self) -> TokenAccount:
        """What became of the tokens of the rollouts that this client has run to their end, by reason."""
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
        """Returns at once. The same rollout id again is the same rollout; with another row, a Conflict."""
        wish = self._names.request(row, input_id, rollout_id, sampling=sampling, split=split)
        return self._submit(wish.rollout)

    def begin(self, rollout: Rollout) -> RolloutFuture:
        """`submit` for those who name rollouts and groups themselves."""
        return self._submit(rollout)

    def _submit(self, rollout: Rollout) -> RolloutFuture:
        with self._lock:
            if self._closed or not self._up.done():
                told = "the client was not started: use it in a 'with' block, or call start()"
                raise UsageError(CLOSED if self._closed else told)
            before = self._live.get(rollout.id)
            if before is not None:
                _check_same(before.rollout, rollout)
                if not before.done():
                    return before
            future = RolloutFuture(rollout, end=self._end, read=self._rollout_store.get)
            self._live[rollout.id] = future
            self._tell(partial(self._begin, future, before))
        return future

    # --- many ------------------------------------------------------------------------------------

    def run_batch(self, rows: Iterable[Row], **options: Unpack[Options]) -> Iterator[BatchItem]:
        """Every row, so many times, in the order they end; begins with the first `next`.

        Leaving the loop early ends the rest.
        """
        return self._each(self._batch(rows, **options), as_item)

    def run_groups(self, rows: Iterable[Row], **options: Unpack[Options]) -> Iterator[Group]:
        """As `run_batch`, and the rollouts of an input come together, once all of them have ended."""
        batch = self._batch(rows, **options)
        return self._each(batch, GroupAssembler(batch.wishes).add)

    def run_batch_async(self, rows: Iterable[Row], **options: Unpack[Options]) -> AsyncIterator[BatchItem]:
        """`run_batch` for `async for`."""
        return self._each_async(self._batch(rows, **options), as_item)

    def run_groups_async(self, rows: Iterable[Row], **options: Unpack[Options]) -> AsyncIterator[Group]:
        """`run_groups` for `async for`."""
        batch = self._batch(rows, **options)
        return self._each_async(batch, GroupAssembler(batch.wishes).add)

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
        wishes = self._names.requests(rows, count, sampling=sampling, split=split)
        # So many in line that no place is ever empty, and not all of a long batch in memory.
        return RolloutBatch(wishes, self._submit, ahead=2 * self.config.concurrency, timeout=timeout)

    def _each(self, batch: RolloutBatch, make: Callable[[EndedRequest], T | None]) -> Iterator[T]:
        queue: SimpleQueue[EndedRequest | BaseException] = SimpleQueue()
        with batch:
            self._start(batch, queue.put)
            for _ in batch.wishes:
                if (made := make(_or_raise(queue.get()))) is not None:
                    yield made

    async def _each_async(
        self, batch: RolloutBatch, make: Callable[[EndedRequest], T | None]
    ) -> AsyncIterator[T]:
        queue: asyncio.Queue[EndedRequest | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(ended: EndedRequest | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                loop.call_soon_threadsafe(queue.put_nowait, ended)

        with batch:
            self._start(batch, put)
            for _ in batch.wishes:
                if (made := await asyncio.to_thread(make, _or_raise(await queue.get()))) is not None:
                    yield made

    def _start(self, batch: RolloutBatch, put: Put) -> None:
        batch.start(put)
        if (timeout := batch.timeout) is not None:
            loop = self._loop.result()
            self._tell(lambda: loop.call_later(timeout, batch.expire, self._attempts))

    # --- in the client's own thread --------------------------------------------------------------

    async def _live_on(self) -> None:
        """Its whole life. However it ends, every future has an end too."""
        self._stopping = asyncio.Event()
        self._places = asyncio.Semaphore(self.config.concurrency)
        self._living = asyncio.create_task(self._main())
        self._loop.set_result(asyncio.get_running_loop())
        await asyncio.wait([self._living])
        error = None if self._living.cancelled() else self._living.exception()
        with self._lock:
            self._closed = True
            left = list(self._live.values())
        for future in left:
            future.fail(error) if error else future.cancel()
        if self._up.done():
            self._broken = error
        else:
            self._up.set_exception(error or CancelledError())

    async def _main(self) -> None:
        gateway, runtime, transport = self._parts
        async with AsyncExitStack() as stack:
            stack.enter_context(self.rundir.locked("collect"))
            run_state = stack.enter_context(self._run_state)
            if isinstance(self.limiter, SharedLimiter):
                stack.callback(self.limiter.close)
                self.limiter.check()
            carrier = await stack.enter_async_context(transport)
            agents = await stack.enter_async_context(runtime)
            model = await stack.enter_async_context(gateway)
            await model.version()
            await agents.check()
            self._conductor = RolloutRunner(
                self.config,
                gateway=model,
                runtime=agents,
                transport=carrier,
                run_state=run_state,
                rollout_store=self._rollout_store,
                observer=self._observer,
                limiter=self.limiter,
            )
            await stack.enter_async_context(self._conductor)
            self._up.set_result(None)
            await self._stopping.wait()
            await self._end_all()

    def _stop(self) -> None:
        if self._up.done():
            self._stopping.set()
        else:
            self._living.cancel()

    async def _end_all(self) -> None:
        with self._lock:
            left = list(self._live.values())
        for future in left:
            future.cancel()
        await asyncio.sleep(0)  # what `cancel` asked of this loop comes first
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self.config.deadlines.teardown_timeout_s)
        for task in self._tasks.values():
            task.cancel()

    def _begin(self, future: RolloutFuture, before: RolloutFuture | None) -> None:
        earlier = self._tasks.get(before) if before else None
        task = asyncio.create_task(self._run(future, earlier))
        self._tasks[future] = task
        task.add_done_callback(partial(self._over, future))

    async def _run(
        self, future: RolloutFuture, earlier: asyncio.Task[RolloutSummary] | None
    ) -> RolloutSummary:
        if earlier is not None:
            await asyncio.wait([earlier])
        async with self._places:
            if future.done():
                raise asyncio.CancelledError
            await asyncio.to_thread(self._recall, future.rollout)
            self._conducted.add(future.rollout.id)
            try:
                return await self._conductor.run(future.rollout)
            finally:
                self._conducted.discard(future.rollout.id)

    def _recall(self, rollout: Rollout) -> None:
        """What is known of this id must be of this row; one that was cancelled is wanted after all."""
        note = self._run_state.rollout_summary(rollout.id)
        if note is None:
            return
        try:
            _check_same(self._rollout_store.get(rollout.id).rollout, rollout)
        except NotFound:
            return
        if note.outcome.failure and note.outcome.failure.reason is Reason.CANCELLED:
            self._run_state.forget_rollout(rollout.id)

    def _over(self, future: RolloutFuture, task: asyncio.Task[RolloutSummary]) -> None:
        del self._tasks[future]
        if task.cancelled() and not future.done():
            return  # the client itself is ending, and says why to all that are left
        with self._lock:
            if self._live.get(future.rollout.id) is future:
                del self._live[future.rollout.id]
        if task.cancelled():
            return
        if error := task.exception():
            future.fail(error)
            return
        note = task.result()
        failure = note.outcome.failure
        if not future.settle(note) and failure and failure.kind is not FailureKind.POLICY:
            self._run_state.forget_rollout(
                future.rollout.id
            )  # nobody waited: it ended because of that, or might have

    def _end(self, future: RolloutFuture, why: str) -> None:
        """From any thread: give up what nobody waits for."""
        self._tell(partial(self._end_here, future, why))

    def _end_here(self, future: RolloutFuture, why: str) -> None:
        if future.rollout.id in self._conducted and future in self._tasks:
            self._conductor.cancel(future.rollout.id, why)
        elif task := self._tasks.get(future):
            task.cancel()  # it was still in line

    def _attempts(self, rollout_id: str) -> int:
        return max(1, len(self._run_state.attempts(rollout_id)))

    def _tell(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: everything has ended
            self._loop.result().call_soon_threadsafe(call)


def _check_same(known: Rollout, rollout: Rollout) -> None:
    if digest(known.task) != digest(rollout.task):
        told = f"rollout {rollout.id} is known with another row, of input {known.task.id!r}"
        raise Conflict(f"{told}; give this one another rollout_id")
    if (known.split, known.sampling) != (rollout.split, rollout.sampling):
        told = (
            f"rollout {rollout.id} is known with another split or sampling ({known.split}, {known.sampling})"
        )
        raise Conflict(f"{told}; give this one another rollout_id")


def _or_raise(ended: EndedRequest | BaseException) -> EndedRequest:
    if isinstance(ended, BaseException):
        raise ended
    return ended
