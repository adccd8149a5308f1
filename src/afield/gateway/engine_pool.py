"""Engine pool: sticky sessions, load balancing, failover, pause and resume.

A session stays on its worker while that is ready; a new one goes to the worker with the fewest calls.
When a worker fails, its calls continue on another one. A call raises Unavailable after `tries` failures,
or when no worker is ready for `unavailable_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from afield.errors import Unavailable, UsageError
from afield.gateway.failover import ResumableCall
from afield.gateway.queue_time import QueueTime, QueueWatch
from afield.gateway.workers import EngineWorker, WorkerHealth, WorkerInfo, WorkerRegistry
from afield.interfaces import Chunk, Engine, EngineInfo, GenerateRequest, Pausable
from afield.interfaces.engine import LogprobMode

log = logging.getLogger(__name__)
InFlight = Literal["keep", "drain", "resume"]
WORSE: tuple[LogprobMode, ...] = ("processed", "tempered", "raw")
SESSIONS_REMEMBERED = 100_000
"""Sessions whose worker is remembered."""
CLOSED = "the pool is not running; enter it with `async with`"


async def ask_info(engine: Engine) -> EngineInfo:
    return await engine.info()


class EnginePool:
    """Several engines as one `interfaces.Engine`."""

    def __init__(
        self,
        workers: Mapping[str, Engine],
        *,
        connect: Callable[[str, str], Engine] | None = None,
        check: Callable[[Engine], Awaitable[EngineInfo]] = ask_info,
        tries: int = 5,
        unavailable_timeout_s: float = 20.0,
        drain_s: float = 600.0,
        start_timeout_s: float = 0.0,
    ) -> None:
        """`connect` creates an engine from kind and URL; `check` returns its facts or raises.

        `start_timeout_s` is the time to wait for the first worker at start.
        """
        self._registry = WorkerRegistry(workers, check)
        self._connect = connect
        self._tries, self._unavailable_timeout_s, self._drain_s = tries, unavailable_timeout_s, drain_s
        self._start_timeout_s = start_timeout_s
        self._session_workers: OrderedDict[str, EngineWorker] = OrderedDict()
        self._open = asyncio.Event()
        self._watched = 0  # callers that wait for calls to end
        self.waiting = 0
        self.failovers = 0
        self.queue_time = QueueTime()

    async def __aenter__(self) -> Self:
        await self._registry.start(self._start_timeout_s)
        self._open.set()
        self._looking = asyncio.create_task(QueueWatch(self.queue_time, lambda: self._workers).run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await self._registry.stop()
        self._open.set()

    # --- state ---

    async def info(self) -> EngineInfo:
        """Returns the facts that hold for all workers."""
        self._check_running()
        entries = [(worker.id, worker.facts) for worker in self._workers if worker.facts is not None]
        if not entries:
            raise Unavailable("the pool has no worker yet; add one")
        facts = [fact for _, fact in entries]
        kinds = {fact.kind for fact in facts}
        return EngineInfo(
            kind=kinds.pop() if len(kinds) == 1 else "pool",
            version=self._registry.version,
            max_context=min(fact.max_context for fact in facts),
            vocab_size=min(fact.vocab_size for fact in facts),
            images=any(fact.images for fact in facts),
            logprobs=WORSE[max(WORSE.index(fact.logprobs) for fact in facts)],
            exact_versions=all(fact.exact_versions for fact in facts),
            dtype=common_dtype([fact.dtype for fact in facts]),
            max_top_logprobs=min(fact.max_top_logprobs for fact in facts),
            prompt_logprobs=all(fact.prompt_logprobs for fact in facts),
            constraints=all(fact.constraints for fact in facts),
            notes=tuple(f"{name}: {note}" for name, fact in entries for note in fact.notes),
        )

    def list(self) -> list[WorkerInfo]:
        return [worker.info for worker in self._workers]

    def stats(self) -> dict[str, Any]:
        workers = {
            worker.id: {
                "ready": worker.ready,
                "in_flight": len(worker.running_calls),
                "calls": worker.calls,
                "failures": worker.failures,
            }
            for worker in self._workers
        }
        return {
            "in_flight": sum(len(worker.running_calls) for worker in self._workers),
            "waiting": self.waiting,
            "failovers": self.failovers,
            "paused": not self._open.is_set(),
            "version": self._registry.version,
            "workers": workers,
        }

    @property
    def _workers(self) -> tuple[EngineWorker, ...]:
        return tuple(self._registry.workers.values())

    def _check_running(self) -> None:
        if not self._registry.running:
            raise Unavailable(CLOSED)

    # --- calls ---

    async def generate(self, call: GenerateRequest) -> AsyncGenerator[Chunk]:
        running = ResumableCall(call)
        while True:
            worker = await self._place(call, running)
            try:
                if (last_chunk := running.complete(self._room)) is not None:
                    yield last_chunk
                    return
                running.start_on(worker.engine)
                if call.stream:  # queued until its first token
                    self.queue_time.enter(call.session_id, running)
                first = True
                while (chunk := await self._step(worker, running)) is not None:
                    if first:
                        first = False
                        self.queue_time.leave(call.session_id, running)
                        if chunk.queued_s and call.session_id in self._session_workers:
                            began = running.started_at
                            self.queue_time.add(call.session_id, began, began + chunk.queued_s)
                    yield chunk
                    if chunk.finish is not None:
                        return
            finally:
                worker.running_calls.discard(running)
                self.queue_time.leave(call.session_id, running)
                await running.leave()
                if self._watched:
                    await self._registry.tell()

    @property
    def _room(self) -> int:
        return min(worker.facts.max_context for worker in self._workers if worker.facts is not None)

    async def _step(self, worker: EngineWorker, running: ResumableCall) -> Chunk | None:
        """Returns the next chunk; None when this worker stopped before the call was complete."""
        while True:
            try:
                chunk = await running.next()
            except Unavailable as error:
                worker.failures += 1
                self._registry.mark_unhealthy(worker, str(error))
                self._count(running, f"{worker.id}: {error}")
                return None
            except ValueError as error:
                if not running.sampled:
                    raise
                self._count(running, f"{worker.id} cannot continue it: {error}")
                return None
            if chunk is None:
                if running.aborted:  # counted after its last tokens are yielded
                    self._count(running, f"{worker.id} aborted it")
                return None
            if (folded := running.fold(chunk)) is not None:
                return folded

    def _count(self, running: ResumableCall, reason: str) -> None:
        running.failures.append(reason)
        if len(running.failures) >= self._tries:
            raise Unavailable(f"given up after {self._tries} tries: {'; '.join(running.failures)}")
        self.failovers += 1
        log.warning("pool: call continues on another worker tokens=%d reason=%s", running.sampled, reason)

    async def _place(self, call: GenerateRequest, running: ResumableCall) -> EngineWorker:
        """Selects a ready worker and reserves it in one step."""
        self._check_running()
        if not self._open.is_set() or self._choice(call) is None:
            self.waiting += 1
            self.queue_time.enter(call.session_id, running)
            try:
                await self._wait_for_worker(call, running)
            finally:
                self.waiting -= 1
                self.queue_time.leave(call.session_id, running)
        worker = self._choice(call)
        assert worker is not None
        self._assign(call.session_id, worker)
        worker.running_calls.add(running)
        worker.calls += 1
        return worker

    async def _wait_for_worker(self, call: GenerateRequest, running: ResumableCall) -> None:
        while True:
            await self._open.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._unavailable_timeout_s), self._registry.changed:
                    await self._registry.changed.wait_for(lambda: self._can_proceed(call))
            self._check_running()
            if not self._open.is_set():
                continue
            if self._choice(call) is not None:
                return
            aside = "; ".join(f"{worker.id}: {worker.reason}" for worker in self._workers if not worker.ready)
            tried = f" (tried: {'; '.join(running.failures)})" if running.failures else ""
            wants = " that takes images" if call.images else ""
            raise Unavailable(
                f"no worker{wants} for {self._unavailable_timeout_s:g} s: {aside or 'there is none'}{tried}"
            )

    def _can_proceed(self, call: GenerateRequest) -> bool:
        return self._choice(call) is not None or not self._open.is_set() or not self._registry.running

    def _choice(self, call: GenerateRequest) -> EngineWorker | None:
        home = self._session_workers.get(call.session_id)
        if home is not None and home.takes(call.images):
            return home
        fit = [worker for worker in self._workers if worker.takes(call.images)]
        return min(fit, key=lambda worker: worker.load) if fit else None

    def _assign(self, session_id: str, worker: EngineWorker) -> None:
        home = self._session_workers.pop(session_id, None)
        if home is not None:
            home.sessions -= 1
        self._session_workers[session_id] = worker
        worker.sessions += 1
        if len(self._session_workers) > SESSIONS_REMEMBERED:
            _, evicted = self._session_workers.popitem(last=False)
            evicted.sessions -= 1

    def forget(self, session_id: str) -> None:
        """Forgets the worker of a closed session."""
        self.queue_time.forget(session_id)
        home = self._session_workers.pop(session_id, None)
        if home is not None:
            home.sessions -= 1

    # --- membership and weights ---

    async def add(self, kind: str, url: str) -> WorkerInfo:
        """Adds a worker after checking it and loading the weights. Idempotent per URL."""
        self._check_running()
        if self._connect is None:
            raise UsageError("this gateway takes no workers at run time")
        url = url.rstrip("/")
        existing = self._registry.at(url)
        return (existing or await self._registry.add(kind, url, self._connect(kind, url))).info

    async def remove(self, id: str) -> None:
        """Removes a worker. Its calls continue on others."""
        worker = self._registry.named(id)
        worker.health = WorkerHealth.LEAVING
        await self._interrupt(worker)
        await self._until(lambda: not worker.running_calls, f"the calls on {id} to leave it")
        await self._registry.drop(worker)

    async def load(self, version: int, path: str) -> None:
        """See `WorkerRegistry.load`. Running calls continue with the new weights or their own adapter."""
        self._check_running()
        await self._registry.load(version, path)

    # --- pause and resume ---

    async def pause(self, in_flight: InFlight = "keep") -> None:
        """Starts no calls until `resume`. Idempotent.

        keep: running calls freeze on engines that can pause, and continue on others. drain: waits until
        they end. resume: interrupts them, and continues them after `resume`.
        """
        self._check_running()
        self._open.clear()
        if in_flight == "keep":
            await asyncio.gather(*(self._freeze(worker) for worker in self._workers if worker.ready))
            return
        if in_flight == "resume":
            await asyncio.gather(*map(self._interrupt, self._workers))
        await self._until(
            lambda: not any(w.running_calls for w in self._workers), "the calls in flight to end"
        )

    async def resume(self) -> None:
        for worker in self._workers:
            if worker.frozen and isinstance(worker.engine, Pausable):
                worker.frozen, worker.resuming = False, True
                for running in worker.running_calls:
                    self.queue_time.leave(running.session_id, running)
                try:
                    await worker.resume()
                    if worker.unchecked:
                        await self._registry.check_weights(worker)
                except (Unavailable, ValueError) as error:
                    self._registry.mark_unhealthy(worker, f"it did not resume: {error}")
        self._open.set()
        await self._registry.tell()

    async def _freeze(self, worker: EngineWorker) -> None:
        if not isinstance(worker.engine, Pausable):
            return
        try:
            await worker.engine.pause()
            worker.frozen = True
            for running in worker.running_calls:
                self.queue_time.enter(running.session_id, running)
        except UsageError as error:
            log.warning("worker %s: cannot pause error=%s", worker.id, error)
        except Unavailable as error:
            self._registry.mark_unhealthy(worker, f"it did not pause: {error}")

    async def _interrupt(self, worker: EngineWorker) -> None:
        for running in tuple(worker.running_calls):
            if await running.interrupt():
                worker.running_calls.discard(running)

    async def _until(self, predicate: Callable[[], bool], condition: str) -> None:
        self._watched += 1
        try:
            async with asyncio.timeout(self._drain_s), self._registry.changed:
                await self._registry.changed.wait_for(predicate)
        except TimeoutError as error:
            raise Unavailable(
                f"waited {self._drain_s:g} s for {condition}; some are still running"
            ) from error
        finally:
            self._watched -= 1


def common_dtype(names: Sequence[str]) -> str:
    """Returns the dtype that all workers represent exactly; empty if one is unknown."""
    if "" in names:
        return ""
    return names[0] if len(set(names)) == 1 else "bfloat16" if "bfloat16" in names else "float16"
