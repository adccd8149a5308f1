"""Rollout collection in its own thread: gateway, agent runtimes and group runner.

Collects rollouts as `afield train` does, with the same settings. The trainer's thread calls into it and
waits. An error that ends the collection, such as a dead gateway, is raised by the next call. Closing ends
everything that was started, agents first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from afield.client.rollouts import NullObserver
from afield.errors import Unavailable
from afield.integrations.step_recorder import StepRecorder
from afield.jobs.training import Collector, open_collector
from afield.orchestrator.state import RunDirectory, RunInfo
from afield.orchestrator.training_loop import all_results
from afield.runs.token_account import TokenAccount
from afield.settings.train import TrainConfig
from afield.types import Group, Task
from afield.utils.loop_thread import LoopThread

T = TypeVar("T")


class CollectorThread:
    """Starts and closes the collection once; thread-safe."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, tasks: Sequence[Task], admin_key: str | None = None
    ) -> None:
        self.config = config
        self.run = run
        self.steps = StepRecorder(run)
        """Steps of the run; TRL's step n trains between the publications n and n + 1."""
        self._tasks = tasks
        self._admin_key = admin_key
        self._thread = LoopThread(f"afield-{run.id}", self._run)
        self._stopping = asyncio.Event()
        self._collector: Future[Collector] = Future()
        self._error: BaseException | None = None

    def start(self) -> Collector:
        """Start, and return once agents can be launched; raises the error that prevents it."""
        self._thread.start()
        return self._collector.result()

    def close(self) -> None:
        """End the collection; idempotent."""
        self._thread.call(self._stopping.set)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.alive

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._thread.submit(work)

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

    def record(self, step: int, group: Group, account: TokenAccount, dropped: str | None = None) -> None:
        """Add a group to the metrics of its step."""
        collector = self._collector.result()
        rewarded = [f for f in group.finished if f.outcome.reward_or_floor(0.0) is not None]
        self.steps.add(
            step,
            group,
            version=collector.base + step,
            account=account,
            trained=0 if dropped else len(rewarded),
            dropped=dropped,
            wasted=collector.run_state.wasted_tokens([f.rollout.id for f in all_results(group)]),
        )

    async def _run(self) -> None:
        """Run the collection, and keep the error that ends it for `start` and `check`."""
        collecting = asyncio.create_task(self._collect())
        await asyncio.wait([collecting])
        self._error = None if collecting.cancelled() else collecting.exception()
        if not self._collector.done():
            self._collector.set_exception(self._error or Unavailable("it was closed before it had started"))

    async def _collect(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        config, run = self.config, self.run
        agent = config.agent or config.runtime
        info = RunInfo(kind="trl", agent=agent, model=config.model, attempts=config.rollouts)
        async with open_collector(
            *(config, run, self._tasks, info), NullObserver(), admin_key=self._admin_key
        ) as collector:
            self._collector.set_result(collector)
            watching = [asyncio.create_task(collector.child.died())] if collector.child else []
            await asyncio.wait([stopping, *watching], return_when=asyncio.FIRST_COMPLETED)
            for death in watching:
                if death.done() and not stopping.done():
                    raise death.result()
                death.cancel()
