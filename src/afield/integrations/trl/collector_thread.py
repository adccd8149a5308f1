"""Rollout collection in its own thread: gateway, agent runtimes and group runner.

Collects rollouts as `afield train` does, with the same settings. The trainer's thread calls into it and
waits. An error that ends the collection, such as a dead gateway, is raised by the next call. Closing ends
everything that was started, agents first.
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
    """Components of a running collection."""

    gateway: Gateway
    """Client of the gateway."""
    groups: GroupRunner
    """Runner of groups."""
    rollout_runner: RolloutRunner
    """Runner of rollouts."""
    schedule: Schedule
    """Order of tasks."""
    rollout_config: RolloutConfig
    """Settings of rollouts."""
    rollout_store: RolloutStore
    """Store of finished rollouts."""
    base: int
    """Version that the gateway served at the start."""
    engine_dtype: str
    """Dtype in which weights are published."""
    child: GatewayChild | None
    """Gateway process; None if the gateway was not started here."""


class CollectorThread:
    """Starts and closes the collection once; thread-safe."""

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
        self._collector: Future[Collector] = Future()
        self._error: BaseException | None = None

    def start(self) -> Collector:
        """Start, and return once agents can be launched; raises the error that prevents it."""
        with self._lock:
            if self._thread is None:
                name = f"afield-{self.run.id}"
                # A daemon, so that a program that does not close it can exit.
                self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), name=name)
                self._thread.daemon = True
                self._thread.start()
        return self._collector.result()

    def close(self) -> None:
        """End the collection; idempotent."""
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
        """Run a coroutine in the collection's loop and wait; raises the error that ended the collection."""
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
        """Raise the error that ended the collection, if any."""
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        """Run the collection, and keep the error that ends it for `start` and `check`."""
        self._stopping = asyncio.Event()
        collecting = asyncio.create_task(self._collect())
        self._loop.set_result(asyncio.get_running_loop())
        await asyncio.wait([collecting])
        self._error = None if collecting.cancelled() else collecting.exception()
        if not self._collector.done():
            self._collector.set_exception(self._error or Unavailable("it was closed before it had started"))

    async def _collect(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        async with open_collector(self.config, self.run, self._tasks, self._admin_key) as collector:
            self._collector.set_result(collector)
            watching = [asyncio.create_task(collector.child.died())] if collector.child else []
            await asyncio.wait([stopping, *watching], return_when=asyncio.FIRST_COMPLETED)
            for death in watching:
                if death.done() and not stopping.done():
                    raise death.result()
                death.cancel()


@asynccontextmanager
async def open_collector(
    config: TrainConfig, run: RunDirectory, tasks: Sequence[Task], admin_key: str | None
) -> AsyncIterator[Collector]:
    async with AsyncExitStack() as stack:
        stack.enter_context(run.locked("collect"))
        parts = RunBuilder(config, run, tasks, stack)
        child = None
        if not config.gateway:
            child = await stack.enter_async_context(gateway_child(config, run))
        transport = await stack.enter_async_context(factory.transport(config, run))
        runtimes = AgentRuntimes(
            factory.runtime(config, run, transport),
            factory.verifier_runtime(config, run, transport),
            transport,
        )
        for runtime in runtimes.all:
            await stack.enter_async_context(runtime)
        checks = [runtime.check() for runtime in runtimes.all]
        gateway = await stack.enter_async_context(
            await run_with_checks(connect_gateway(config, child, admin_key), *checks)
        )
        if config.gateway:
            await check_gateway(config, run, admin_key)
        rollout_runner = await parts.rollout_runner(gateway, runtimes, NullObserver())
        yield Collector(
            gateway=gateway,
            groups=GroupRunner(parts.rollout_config, rollout_runner, parts.rollout_store),
            rollout_runner=rollout_runner,
            schedule=parts.schedule,
            rollout_config=parts.rollout_config,
            rollout_store=parts.rollout_store,
            base=await gateway.version(),
            engine_dtype=factory.published_dtype(
                config.engine_dtype, await gateway.engine_dtype(), Path(config.model)
            ),
            child=child,
        )
