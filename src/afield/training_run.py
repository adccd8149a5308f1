"""Training run: starts gateway, runtimes, collector and training loop.

Collector and training loop run in one process, or in two that share the run directory and a gateway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs

from afield import factory
from afield.errors import AfieldError, Unavailable, UsageError, root_cause
from afield.interfaces import Gateway, Publisher, Runtime, Trainer, Transport
from afield.orchestrator.availability import describe_error
from afield.orchestrator.config import RolloutObserver
from afield.orchestrator.groups import GroupRunner, GroupScheduler, Schedule, Validation, wait_for_own_weights
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunDirectory, RunState
from afield.orchestrator.training_loop import LoopConfig, StepMetrics, TrainingLoop, mean_metrics
from afield.ratelimit import SharedLimiter
from afield.settings.environment import agent_environment
from afield.settings.train import TrainConfig
from afield.types import RolloutResult, Sampling, Task

log = logging.getLogger(__name__)
FIRST_ANSWER_S = 20.0
T = TypeVar("T")


class GatewayChild:
    """Gateway and engine in a child process, which exits when its standard input closes, also after SIGKILL
    of the parent.
    """

    def __init__(self, process: asyncio.subprocess.Process, log: Path, start_timeout_s: float) -> None:
        self._process = process
        self._log = log
        self._start_timeout_s = start_timeout_s

    async def died(self) -> Unavailable:
        code = await self._process.wait()
        return Unavailable(
            f"the gateway ended with code {code}; see {self._log}, then resume the run with --resume"
        )

    async def ready(self) -> dict[str, str]:
        """Wait until the gateway serves; returns its address and admin key."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), self._start_timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                f"the gateway did not start within {self._start_timeout_s:g} s; see {self._log}, or raise"
                " engine_start_timeout_s"
            ) from error
        if not line:
            text = (await asyncio.to_thread(self._log.read_text, errors="replace")).strip()
            empty = f"{self._log} is empty; is there room on the disk?"
            raise UsageError("the gateway did not start:\n" + "\n".join((text or empty).splitlines()[-5:]))
        return json.loads(line)


@asynccontextmanager
async def gateway_child(config: TrainConfig, run: RunDirectory) -> AsyncIterator[GatewayChild]:
    """Start a gateway process with its log in the run directory; stop it on exit."""
    run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = run.logs / "gateway.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *factory.COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=agent_environment(),
            start_new_session=True,
        )
    assert process.stdin is not None
    settings = factory.gateway_settings(config, run)
    process.stdin.write(settings.to_json() + b"\n")
    try:
        yield GatewayChild(process, log_path, factory.start_timeout(settings))
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.stdin:
        process.stdin.close()


class RunRole(StrEnum):
    """Parts of a run that this process executes."""

    ALL = "all"
    COLLECT = "collect"
    LEARN = "learn"


class AgentRuntimes(Struct, frozen=True):
    """Runtimes of agents and verifiers, and the transport of their outcomes."""

    agents: Runtime
    """Runtime of the agents."""
    verifiers: Runtime | None
    """Separate runtime of the verifiers; None if agents grade themselves."""
    transport: Transport
    """Transport of outcomes."""

    @property
    def all(self) -> list[Runtime]:
        return [self.agents, *([self.verifiers] if self.verifiers else [])]


class RunBuilder:
    """Builds collector and training loop on a shared run state and rollout store."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, tasks: Sequence[Task], stack: AsyncExitStack
    ) -> None:
        factory.check_trust(config, tasks)
        self.config = config
        self.run = run
        self.stack = stack
        self.rollout_config = factory.rollout_config(config, run)
        self.window = factory.staleness_window(config, tasks)
        self.schedule = Schedule(tasks, self.rollout_config.exp_id, config.seed, config.shuffle)
        self.run_state = stack.enter_context(RunState(run.run_state, durable=run.durable))
        self.rollout_store = RolloutStore(run.rollout_store, durable=run.durable)

    async def rollout_runner(
        self, gateway: Gateway, runtimes: AgentRuntimes, observer: RolloutObserver
    ) -> RolloutRunner:
        limiter = factory.limiter(self.config)
        if isinstance(limiter, SharedLimiter):
            self.stack.callback(limiter.close)
            limiter.check()
        rollout_runner = RolloutRunner(
            self.rollout_config,
            gateway=gateway,
            runtime=runtimes.agents,
            transport=runtimes.transport,
            run_state=self.run_state,
            rollout_store=self.rollout_store,
            observer=observer,
            limiter=limiter,
            verifiers=runtimes.verifiers,
        )
        return await self.stack.enter_async_context(rollout_runner)

    async def group_scheduler(
        self, gateway: Gateway, runtimes: AgentRuntimes, observer: RolloutObserver, val: Sequence[Task]
    ) -> GroupScheduler:
        rollout_runner = await self.rollout_runner(gateway, runtimes, observer)
        return GroupScheduler(
            self.window,
            self.schedule,
            group_runner=GroupRunner(self.rollout_config, rollout_runner, self.rollout_store),
            run_state=self.run_state,
            rollout_store=self.rollout_store,
            validation=validation(self.config, self.run, val),
        )

    async def collect(self, scheduler: GroupScheduler, gateway: Gateway, transport: Transport) -> None:
        await wait_for_own_weights(self.run_state, gateway, frozen=self.config.freeze_weights)
        await scheduler.run()
        try:
            async with asyncio.timeout(self.rollout_config.call_timeout_s):
                self.run_state.late_outcomes = len(await transport.late(self.rollout_config.exp_id))
        except (AfieldError, OSError, RuntimeError) as error:
            # Collection is complete, so the training loop can continue.
            log.warning("late outcomes not counted: %s", describe_error(error))

    def training_loop(
        self, gateway: Gateway, trainer: Trainer, on_step: Callable[[StepMetrics], None], engine_dtype: str
    ) -> TrainingLoop:
        return TrainingLoop(
            self.window,
            structs.replace(loop_config(self.config), engine_dtype=engine_dtype),
            epoch_of=self.schedule.epoch,
            trainer=trainer,
            gateway=gateway,
            run_state=self.run_state,
            rollout_store=self.rollout_store,
            run=self.run,
            on_step=on_step,
        )


@asynccontextmanager
async def training(
    config: TrainConfig,
    run: RunDirectory,
    tasks: Sequence[Task],
    observer: RolloutObserver,
    on_step: Callable[[StepMetrics], None],
    *,
    role: RunRole = RunRole.ALL,
    admin_key: str | None = None,
    val_tasks: Sequence[Task] = (),
) -> AsyncIterator[TrainingRun]:
    """Start all components of a training run; on exit, stop them in reverse order."""
    async with AsyncExitStack() as stack:
        parts = RunBuilder(config, run, tasks, stack)
        # Slow components start concurrently; agents end before the gateway does.
        runtimes = child = None
        if not config.gateway:
            child = await stack.enter_async_context(gateway_child(config, run))
        if role is not RunRole.LEARN:
            transport = await stack.enter_async_context(factory.transport(config, run))
            runtimes = AgentRuntimes(
                factory.runtime(config, run, transport),
                factory.verifier_runtime(config, run, transport),
                transport,
            )
            for runtime in runtimes.all:
                await stack.enter_async_context(runtime)
        # Checks of the runtimes fail early, before the gateway is ready. The trainer loads after them,
        # because a thread that loads a model cannot be stopped.
        checks = [asyncio.create_task(runtime.check()) for runtime in runtimes.all] if runtimes else []
        learning = asyncio.create_task(_trainer(config, checks)) if role is not RunRole.COLLECT else None
        stack.push_async_callback(_settle, *checks, *([learning] if learning else []))
        gateway = await stack.enter_async_context(
            await run_with_checks(connect_gateway(config, child, admin_key), *map(_done, checks))
        )
        if config.gateway:
            await check_gateway(config, run, admin_key)
        loops: list[Callable[[], Coroutine[None, None, None]]] = []
        if runtimes:
            scheduler = await parts.group_scheduler(gateway, runtimes, observer, val_tasks)
            loops.append(lambda: parts.collect(scheduler, gateway, runtimes.transport))
        if learning:
            trainer = await learning
            warn_context_mismatch(config, await gateway.context(), trainer.context)
            dtype = "float32"
            if isinstance(trainer, Publisher):
                served_dtype = await gateway.engine_dtype()
                dtype = factory.published_dtype(config.engine_dtype, served_dtype, Path(config.model))
            loops.append(parts.training_loop(gateway, trainer, on_step, dtype).run)
        yield TrainingRun(loops, child)


async def run_with_checks(wanted: Coroutine[None, None, T], *checks: Coroutine[None, None, None]) -> T:
    """Return the result of `wanted`; raises the first error of it or of a check."""
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(wanted)
            for check in checks:
                group.create_task(check)
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from errors
    return task.result()


async def connect_gateway(config: TrainConfig, child: GatewayChild | None, admin_key: str | None) -> Any:
    """Create a client of the child gateway, or of an external one, whose outages are retried."""
    if child is not None:
        address = await child.ready()
        return factory.gateway_client(address["local_url"], address["admin_key"])
    if not admin_key:
        raise UsageError(f"the gateway at {config.gateway} needs an admin key: set AFIELD_ADMIN_KEY")
    return factory.gateway_client(
        config.gateway, admin_key, unavailable_timeout_s=config.unavailable_timeout_s
    )


async def check_gateway(config: TrainConfig, run: RunDirectory, admin_key: str | None) -> None:
    """Check that the external gateway answers and accepts the key; a new run waits `FIRST_ANSWER_S`."""
    unavailable_timeout_s = (
        config.unavailable_timeout_s if run.has_begun else min(config.unavailable_timeout_s, FIRST_ANSWER_S)
    )
    delivers = config.delivery == "gateway"
    async with factory.gateway_client(
        config.gateway, admin_key or "", unavailable_timeout_s=unavailable_timeout_s, delivers=delivers
    ) as gateway:
        await gateway.version()


def warn_context_mismatch(config: TrainConfig, sampled: int | None, trained: int | None) -> None:
    """Warn before the first rollout if engines sample longer sequences than the trainer can train."""
    longest = min((limit for limit in (sampled, config.max_context) if limit is not None), default=None)
    if config.freeze_weights or trained is None or longest is None:
        return
    if longest > trained:
        log.warning(
            "the engine takes rows of %d tokens, the trainer %d: longer ones will be sampled and not trained;"
            " set max_context = %d",
            longest,
            trained,
            trained,
        )


def validation(config: TrainConfig, run: RunDirectory, tasks: Sequence[Task]) -> Validation | None:
    """Build the validation of a run, which writes its results to the run directory; None without tasks."""
    if not tasks:
        return None

    def report(step: int, finished: list[RolloutResult]) -> None:
        rewards = [r for f in finished if (r := f.outcome.reward_or_floor(0.0)) is not None]
        spans = [s for f in finished for t in f.trajectories for s in t.versions]
        line = {
            "step": step,
            "versions": [min(s.low for s in spans), max(s.high for s in spans)] if spans else None,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "rollouts": len(finished),
            "failed": len(finished) - len(rewards),
            "agent": mean_metrics(finished),
        }
        run.write_validation(line, finished)

    return Validation(
        tasks=tasks,
        every=config.val_every,
        sampling=Sampling(temperature=config.val_temperature, max_tokens=config.max_tokens),
        report=report,
        reported=lambda step: any(line["step"] == step for line in run.read_validation()),
    )


async def _trainer(config: TrainConfig, checks: Sequence[asyncio.Task[None]]) -> Trainer:
    for check in checks:
        await asyncio.shield(check)
    return await asyncio.to_thread(factory.trainer, config)


async def _done(task: asyncio.Task[T]) -> T:
    return await task


async def _settle(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them, ignoring their results; a task in a thread runs to its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TrainingRun:
    """Started training run. Ends when collector and training loop are done, or when its gateway dies."""

    def __init__(
        self, loops: Sequence[Callable[[], Coroutine[None, None, None]]], child: GatewayChild | None
    ) -> None:
        self._loops = loops
        self._child = child

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch())
                async with asyncio.TaskGroup() as working:
                    for loop in self._loops:
                        working.create_task(loop())
                watching.cancel()
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors

    async def _watch(self) -> None:
        if self._child is not None:
            raise await self._child.died()


def loop_config(config: TrainConfig) -> LoopConfig:
    return LoopConfig(
        policy=Path(config.model).name,
        stale=config.on_stale,
        keep_weights=config.keep_weights,
        keep_rollouts_gb=config.keep_rollouts_gb,
        frozen=config.freeze_weights,
    )
