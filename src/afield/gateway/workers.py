"""Workers of an engine pool: health, membership, weights.

A worker is entered, checked and loaded with the current weights before it is ready. After a failure it is
unhealthy and checked again with back-off. Waiters are notified through `changed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum

from msgspec import Struct, structs

from afield.errors import AfieldError, Conflict, NotFound, Unavailable, UsageError
from afield.gateway.failover import ResumableCall
from afield.gateway.weight_check import check_weights_match, read_probe
from afield.interfaces import Engine, EngineInfo, Image, Pausable
from afield.interfaces.weight_probe import WeightProbe
from afield.utils.backoff import Backoff


class WorkerHealth(StrEnum):
    """Health of a worker."""

    READY = "ready"
    """Takes calls."""
    UNHEALTHY = "unhealthy"
    """Failed, or lacks the weights; checked again with back-off."""
    LEAVING = "leaving"
    """Being removed; takes no calls."""


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """State of a worker for the admin API and metrics."""

    id: str
    """Worker id."""
    kind: str
    """Engine kind."""
    url: str
    """Engine URL; empty for one in process."""
    health: WorkerHealth
    """Health."""
    reason: str
    """Reason why it is not ready; empty if it is."""
    version: int | None
    """Policy version that it serves; None before it is known."""
    in_flight: int
    """Running calls."""
    calls: int
    """Calls so far."""
    failures: int
    """Failures so far."""
    notes: tuple[str, ...] = ()
    """Notes of the engine for operators."""


class EngineWorker:
    """An engine of the pool, with its health and running calls."""

    def __init__(self, id: str, engine: Engine, *, kind: str = "", url: str = "") -> None:
        self.id, self.engine, self.kind, self.url = id, engine, kind, url
        self.health = WorkerHealth.UNHEALTHY
        self.reason = "not looked at yet"
        self.entered = False
        self.frozen = False
        self.resuming = False  # resume was requested and may have failed
        self.recovering = False
        self.unchecked = False  # weights were loaded while paused
        self.facts: EngineInfo | None = None
        self.running_calls: set[ResumableCall] = set()
        self.sessions = 0
        self.calls = 0
        self.failures = 0

    @property
    def ready(self) -> bool:
        return self.health is WorkerHealth.READY

    @property
    def load(self) -> tuple[int, int]:
        return len(self.running_calls), self.sessions

    def takes(self, images: tuple[Image, ...]) -> bool:
        return self.ready and (not images or (self.facts is not None and self.facts.images))

    async def resume(self) -> None:
        if self.resuming and isinstance(self.engine, Pausable):
            await self.engine.resume()
        self.resuming = False

    async def leave(self) -> None:
        if self.entered:
            self.entered = False
            await self.engine.__aexit__(None, None, None)

    @property
    def info(self) -> WorkerInfo:
        facts = self.facts
        return WorkerInfo(
            id=self.id,
            kind=facts.kind if facts else self.kind,
            url=self.url,
            health=self.health,
            reason="" if self.ready else self.reason,
            version=facts.version if facts else None,
            in_flight=len(self.running_calls),
            calls=self.calls,
            failures=self.failures,
            notes=facts.notes if facts else (),
        )


log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
"""Back-off between checks of an unhealthy worker, in seconds."""
START_PAUSE_S = 1.0
"""Pause between checks at start, in seconds."""
TELL_EVERY_S = 10.0
"""Interval between log lines while waiting for the first worker, in seconds."""
CHECK_S = 120.0
"""Timeout of a check, in seconds."""
REFUSALS = (Unavailable, UsageError, Conflict)


class WorkerRegistry:
    """Workers of a pool: starts, checks, adds and removes them, and loads weights."""

    def __init__(
        self, workers: Mapping[str, Engine], check: Callable[[Engine], Awaitable[EngineInfo]]
    ) -> None:
        self.workers = {name: EngineWorker(name, e, url=getattr(e, "url", "")) for name, e in workers.items()}
        self.version = 0
        self.running = False
        self.changed = asyncio.Condition()
        self._check = check
        self._weights: tuple[int, str] | None = None
        self._probe: WeightProbe | None = None  # probe of the current weights
        self._earlier_probe: WeightProbe | None = None
        self._changing = asyncio.Lock()  # one change of weights or members at a time
        self._tending: set[asyncio.Task[None]] = set()
        self._named = 0

    async def start(self, timeout_s: float = 0.0) -> None:
        """Starts all workers. Raises if one is unusable or none is ready.

        While none answers, it retries for `timeout_s`: a server may still load its model.
        """
        self.running = True
        loop = asyncio.get_running_loop()
        begin = loop.time()
        last_report = -TELL_EVERY_S
        while True:
            errors = await asyncio.gather(*map(self._try_first, self.workers.values()))
            failed = {
                worker: error
                for worker, error in zip(self.workers.values(), errors, strict=True)
                if error is not None
            }
            waited = loop.time() - begin
            unfit = next((error for error in failed.values() if isinstance(error, UsageError)), None)
            none_up = bool(failed) and len(failed) == len(self.workers)
            if unfit or not none_up or waited >= timeout_s:
                break
            if waited - last_report >= TELL_EVERY_S:
                last_report = waited
                message = "workers: none ready waited_s=%.0f timeout_s=%g reasons=%s"
                log.warning(message, waited, timeout_s, _reasons(failed))
            await asyncio.sleep(min(START_PAUSE_S, max(0.0, timeout_s - waited)))
        if unfit or none_up:
            await self.stop()
            raise unfit or Unavailable(
                f"no engine answered within {timeout_s:g} s: {_reasons(failed)};"
                " start the engine, check its address, or raise --engine-start-timeout"
            )
        for worker, error in failed.items():
            self.mark_unhealthy(worker, str(error))

    async def stop(self) -> None:
        self.running = False
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        for worker in self.workers.values():
            await worker.leave()
            self.mark_unhealthy(worker, "the pool was closed")
        await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # --- membership ---

    def at(self, url: str) -> EngineWorker | None:
        return next((worker for worker in self.workers.values() if worker.url and worker.url == url), None)

    def named(self, name: str) -> EngineWorker:
        worker = self.workers.get(name)
        if worker is None:
            raise NotFound(f"there is no worker {name!r}; there are: {', '.join(self.workers) or 'none'}")
        return worker

    async def add(self, kind: str, url: str, engine: Engine) -> EngineWorker:
        worker = EngineWorker(self._new_name(kind), engine, kind=kind, url=url)
        self.workers[worker.id] = worker
        try:
            await self._admit(worker)
        except BaseException:
            self.workers.pop(worker.id, None)
            await worker.leave()
            raise
        await self.tell()
        return worker

    async def drop(self, worker: EngineWorker) -> None:
        self.workers.pop(worker.id, None)
        await worker.leave()

    def _new_name(self, kind: str) -> str:
        while not self._named or f"{kind}-{self._named}" in self.workers:
            self._named += 1
        return f"{kind}-{self._named}"

    # --- health ---

    async def _try_first(self, worker: EngineWorker) -> AfieldError | None:
        try:
            await self._admit(worker)
        except REFUSALS as error:
            return error
        return None

    async def _admit(self, worker: EngineWorker) -> None:
        """Enters, checks and loads a worker; then it is ready."""
        try:
            if not worker.entered:
                await worker.engine.__aenter__()
                worker.entered = True
            await worker.resume()
            async with asyncio.timeout(CHECK_S):
                facts = await self._check(worker.engine)
        except (ValueError, OSError, RuntimeError) as error:  # servers that reject the check
            message = f"check failed: {type(error).__name__}: {error}"
            raise Unavailable(message) from error
        async with self._changing:
            facts = await self._with_weights(worker, facts)
            if worker.health is not WorkerHealth.LEAVING:
                worker.facts, worker.health, worker.reason = facts, WorkerHealth.READY, ""

    async def _with_weights(self, worker: EngineWorker, facts: EngineInfo) -> EngineInfo:
        if self._weights is None:
            self.version = max(self.version, facts.version)
        if facts.version > self.version:
            raise UsageError(
                f"{worker.id} serves version {facts.version}, the pool version {self.version}; restart it"
            )
        if facts.version < self.version:
            if self._weights is None:
                raise UsageError(
                    f"{worker.id} serves version {facts.version}, another worker {self.version};"
                    " load the same weights there first"
                )
            await worker.engine.load(*self._weights)
        await check_weights_match(worker.engine, self.version, self._probe, self._earlier_probe)
        return structs.replace(facts, version=self.version)

    def mark_unhealthy(self, worker: EngineWorker, reason: str) -> None:
        worker.reason = reason
        if worker.health is not WorkerHealth.LEAVING:
            worker.health = WorkerHealth.UNHEALTHY
        if self.running and not worker.recovering:
            log.error("worker %s: unhealthy reason=%s", worker.id, reason)
            worker.recovering = True
            task = asyncio.create_task(self._tend(worker))
            self._tending.add(task)
            task.add_done_callback(self._tending.discard)

    async def _tend(self, worker: EngineWorker) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        try:
            while worker.health is WorkerHealth.UNHEALTHY:
                try:
                    await self._admit(worker)
                    log.warning("worker %s: ready again", worker.id)
                    continue
                except REFUSALS:
                    pass
                except Exception as error:  # retried in any case
                    log.warning(
                        "worker %s: check failed error=%s: %s", worker.id, type(error).__name__, error
                    )
                await backoff.sleep()
        finally:
            worker.recovering = False
        await self.tell()

    # --- weights ---

    async def load(self, version: int, path: str) -> None:
        """Loads weights on all ready workers; a failed one is unhealthy until it has them.

        A worker that does not answer with the weights has failed (see `weight_check`). If every worker
        rejects them (for example a missing path), nothing changes.
        """
        async with self._changing:
            if version < self.version:
                raise Conflict(
                    f"version {version} is older than version {self.version}, which is being served"
                )
            if version == self.version:
                self._check_served()
                return
            before = self.version, self._weights, self._probe, self._earlier_probe
            self.version, self._weights = version, (version, path)
            self._probe, self._earlier_probe = await read_probe(path), self._probe
            ready = [worker for worker in self.workers.values() if worker.ready]
            errors = await asyncio.gather(*(self._load(worker, version, path) for worker in ready))
            failed = [(worker, error) for worker, error in zip(ready, errors, strict=True) if error]
            reasons = "; ".join(f"{worker.id}: {error}" for worker, error in failed)
            if failed and len(failed) == len(ready) and all(isinstance(e, UsageError) for _, e in failed):
                self.version, self._weights, self._probe, self._earlier_probe = before
                raise UsageError(f"version {version} cannot be loaded: {reasons}")
            for worker, error in failed:
                worker.failures += 1
                self.mark_unhealthy(worker, f"version {version} was not loaded: {error}")
            if len(failed) == len(ready):
                raise Unavailable(f"no worker has loaded version {version} yet: {reasons or 'none is up'}")

    def _check_served(self) -> None:
        """Raises Unavailable if no worker serves the current version."""
        if self.workers and not any(worker.ready for worker in self.workers.values()):
            reasons = "; ".join(f"{worker.id}: {worker.reason}" for worker in self.workers.values())
            raise Unavailable(f"no worker has loaded version {self.version} yet: {reasons}")

    async def _load(self, worker: EngineWorker, version: int, path: str) -> AfieldError | None:
        try:
            await worker.engine.load(version, path)
            await self.check_weights(worker)
        except REFUSALS as error:
            return error
        except Exception as error:  # servers that reject the check, or break
            return Unavailable(f"version {version} cannot be checked: {type(error).__name__}: {error}")
        if worker.facts is not None:
            worker.facts = structs.replace(worker.facts, version=version)
        return None

    async def check_weights(self, worker: EngineWorker) -> None:
        """Checks a worker's weights; a paused one is checked after resume."""
        worker.unchecked = worker.frozen
        if not worker.frozen:
            await check_weights_match(worker.engine, self.version, self._probe, self._earlier_probe)


def _reasons(failed: Mapping[EngineWorker, AfieldError]) -> str:
    return "; ".join(f"{worker.id}: {error}" for worker, error in failed.items())
