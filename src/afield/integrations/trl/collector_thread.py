"""The collection in a thread of its own: gateway, agents in their processes, and what brings them together.

It is the collecting half of `afield train`, made of the same values. The trainer's thread calls into it
and waits; nothing of it runs there. What breaks it, a gateway that died for one, is kept and told to
whoever asks next. Closing ends everything that was started, agents first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from afield import factory
from afield.client.rollouts import NullObserver
from afield.errors import Unavailable
from afield.interfaces import Gateway
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.groups import GroupRunner, Schedule
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunDirectory
from afield.settings.train import TrainConfig
from afield.training_run import (
    AgentRuntimes,
    GatewayChild,
    RunBuilder,
    check_gateway,
    connect_gateway,
    gateway_child,
    run_with_checks,
)
from afield.types import Task

T = TypeVar("T")


class Collector(NamedTuple):
    """What collects, ready to be asked. `base` is the version that the gateway served before us."""

    gateway: Gateway
    collector: GroupRunner
    conductor: RolloutRunner
    schedule: Schedule
    plan: RolloutConfig
    spool: RolloutStore
    base: int
    engine_dtype: str
    child: GatewayChild | None


class CollectorThread:
    """Started once, closed once; every method may be called from any thread."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, tasks: Sequence[Task], admin_key: str | None = None
    ) -> None:
        self.config = config
        self.run = run
        self._tasks = tasks
        self._admin_key = admin_key
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._up: Future[Collector] = Future()
        self._error: BaseException | None = None

    def start(self) -> Collector:
        """Returns once agents can be launched; raises what stands in the way of that."""
        with self._lock:
            if self._thread is None:
                name = f"afield-{self.run.id}"
                # A program that forgets to close must still be able to end.
                self._thread = threading.Thread(target=asyncio.run, args=(self._outlive(),), name=name)
                self._thread.daemon = True
                self._thread.start()
        return self._up.result()

    def close(self) -> None:
        """Repeating is harmless."""
        with self._lock:
            thread = self._thread
        if thread is not None and thread.is_alive():
            loop = self._loop.result()
            loop.call_soon_threadsafe(self._stopping.set)
            thread.join()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop.result())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it. A collection that is gone says why."""
        if not self.alive:
            work.close()
            self.check()
            raise Unavailable("the collection is not running; it was closed, or never started")
        try:
            return self.spawn(work).result()
        except CancelledError:
            self.check()
            raise

    def check(self) -> None:
        """Raises what broke it, if something did."""
        if self._error is not None:
            raise self._error

    async def _outlive(self) -> None:
        """Its whole life; however it ends, whoever waits for its start gets an answer."""
        self._stopping = asyncio.Event()
        living = asyncio.create_task(self._live())
        self._loop.set_result(asyncio.get_running_loop())
        await asyncio.wait([living])
        self._error = None if living.cancelled() else living.exception()
        if not self._up.done():
            self._up.set_exception(self._error or Unavailable("it was closed before it had started"))

    async def _live(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        async with opened(self.config, self.run, self._tasks, self._admin_key) as made:
            self._up.set_result(made)
            watching = [asyncio.create_task(made.child.died())] if made.child else []
            await asyncio.wait([stopping, *watching], return_when=asyncio.FIRST_COMPLETED)
            for death in watching:
                if death.done() and not stopping.done():
                    raise death.result()
                death.cancel()


@asynccontextmanager
async def opened(
    config: TrainConfig, run: RunDirectory, tasks: Sequence[Task], admin_key: str | None
) -> AsyncIterator[Collector]:
    async with AsyncExitStack() as stack:
        stack.enter_context(run.locked("collect"))
        parts = RunBuilder(config, run, tasks, stack)
        child = None
        if not config.gateway:
            child = await stack.enter_async_context(gateway_child(config, run))
        carrier = await stack.enter_async_context(factory.transport(config, run))
        places = AgentRuntimes(
            factory.runtime(config, run, carrier), factory.verifier_runtime(config, run, carrier), carrier
        )
        for place in places.all:
            await stack.enter_async_context(place)
        checks = [place.check() for place in places.all]
        gateway = await stack.enter_async_context(
            await run_with_checks(connect_gateway(config, child, admin_key), *checks)
        )
        if config.gateway:
            await check_gateway(config, run, admin_key)
        conductor = await parts.conductor(gateway, places, NullObserver())
        yield Collector(
            gateway=gateway,
            collector=GroupRunner(parts.rollout_config, conductor, parts.rollout_store),
            conductor=conductor,
            schedule=parts.schedule,
            plan=parts.rollout_config,
            spool=parts.rollout_store,
            base=await gateway.version(),
            engine_dtype=factory.published_dtype(
                config.engine_dtype, await gateway.engine_dtype(), Path(config.model)
            ),
            child=child,
        )
