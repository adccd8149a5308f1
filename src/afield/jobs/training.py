"""Training run: starts gateway, runtimes, collector and training loop.

Collector and training loop run in one process, or in two that share the run directory and a gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec import Struct, structs

from afield import factory
from afield.errors import AfieldError, Unavailable, UsageError, root_cause
from afield.interfaces import Gateway, Publisher, Runtime, Trainer, Transport
from afield.orchestrator.availability import describe_error
from afield.orchestrator.config import RolloutConfig, RolloutObserver
from afield.orchestrator.groups import GroupRunner, GroupScheduler, Schedule, Validation, wait_for_own_weights
from afield.orchestrator.reward_function import GroupRewards
from afield.orchestrator.rollout import RolloutRunner
from afield.orchestrator.state import RolloutStore, RunDirectory, RunInfo, RunState
from afield.orchestrator.step_totals import mean_metrics
from afield.orchestrator.tracing import StepTracer, TracingObserver
from afield.orchestrator.training_loop import (
    LoopConfig,
    StepMetrics,
    TrainingLoop,
    rewind_published_step,
)
from afield.ratelimit import LeasedLimiter
from afield.settings.train import TrainConfig
from afield.types import RolloutResult, Task
from afield.utils.gateway_process import GatewayProcess

log = logging.getLogger(__name__)
FIRST_ANSWER_S = 20.0
T = TypeVar("T")


class GatewayChild(Protocol):
    """Gateway, or pool of gateways, that a run starts and stops."""

    async def client(self) -> AbstractAsyncContextManager[Any]:
        """Wait until it serves; returns its client, to be entered."""
        ...

    async def died(self) -> Unavailable:
        """Wait until it can no longer serve; returns why."""
        ...


class SingleGateway:
    """Gateway and engine in one child process; the run ends when it does."""

    def __init__(self, process: GatewayProcess) -> None:
        self._process = process

    async def died(self) -> Unavailable:
        return Unavailable(f"{await self._process.ended()}, then resume the run with --resume")

    async def client(self) -> AbstractAsyncContextManager[Any]:
        address = await self._process.ready()
        return factory.gateway_client(address["local_url"], address["admin_key"])


@asynccontextmanager
async def gateway_child(config: TrainConfig, run: RunDirectory) -> AsyncIterator[GatewayChild]:
    """Start the gateways of a run, with their logs in the run directory; stop them on exit."""
    if config.pooled:
        async with factory.gateway_pool(config, run) as pool:
            yield pool
        return
    settings = factory.gateway_settings(config, run)
    process = factory.gateway_process(settings, run.logs / "gateway.log")
    await process.start(settings.to_json())
    try:
        yield SingleGateway(process)
    finally:
        await process.stop()


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
        self.spans = factory.span_exporter(config, "afield")
        if self.spans is not None:
            stack.push_async_callback(asyncio.to_thread, self.spans.close)
            seed = f"{run.id}:{run.info.created}"
            self.rollout_config = structs.replace(self.rollout_config, trace_seed=seed)
        self.window = factory.staleness_window(config, tasks)
        self.schedule = Schedule(tasks, self.rollout_config.exp_id, config.seed, config.shuffle)
        self.run_state = stack.enter_context(RunState(run.run_state, durable=run.durable))
        self.rollout_store = RolloutStore(run.rollout_store, durable=run.durable, index=run.index)
        stack.callback(run.index.close)

    async def rollout_runner(
        self, gateway: Gateway, runtimes: AgentRuntimes, observer: RolloutObserver
    ) -> RolloutRunner:
        limiter = factory.limiter(self.config)
        if isinstance(limiter, LeasedLimiter):
            self.stack.callback(limiter.close)
            limiter.check()
        if self.spans is not None:
            agent = self.config.agent or self.config.runtime
            observer = TracingObserver(observer, self.spans, self.rollout_config.trace_seed, agent)
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

    async def group_runner(self, rollout_runner: RolloutRunner) -> GroupRunner:
        """The group runner, with the reward function of the run."""
        config, rewards = self.rollout_config, None
        if function := await asyncio.to_thread(factory.reward_function, self.config):
            stores: Any = {"run_state": self.run_state, "rollout_store": self.rollout_store}
            rewards = await self.stack.enter_async_context(GroupRewards(function, config, **stores))
        return GroupRunner(config, rollout_runner, self.rollout_store, rewards)

    async def group_scheduler(
        self,
        gateway: Gateway,
        runtimes: AgentRuntimes,
        observer: RolloutObserver,
        validation: Validation | None,
    ) -> GroupScheduler:
        rollout_runner = await self.rollout_runner(gateway, runtimes, observer)
        return GroupScheduler(
            self.window,
            self.schedule,
            group_runner=await self.group_runner(rollout_runner),
            run_state=self.run_state,
            rollout_store=self.rollout_store,
            validation=validation,
            dynamic_sampling=factory.dynamic_sampling(self.config),
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
        tracing: dict[str, Any] = {"on_step": on_step}
        if self.spans is not None:
            tracer = StepTracer(self.spans, self.rollout_config.trace_seed, self.run.id)
            self.stack.callback(tracer.close)

            def traced(line: StepMetrics) -> None:
                tracer.step_done(line)
                on_step(line)

            tracing = {"on_step": traced, "on_publish": tracer.published}

        return TrainingLoop(
            self.window,
            structs.replace(loop_config(self.config), engine_dtype=engine_dtype),
            epoch_of=self.schedule.epoch,
            trainer=trainer,
            gateway=gateway,
            run_state=self.run_state,
            rollout_store=self.rollout_store,
            run=self.run,
            **tracing,
        )


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
    run: RunDirectory
    """Run directory."""
    rollout_store: RolloutStore
    """Store of finished rollouts."""
    run_state: RunState
    """Attempts, rollouts and groups of the run."""
    base: int
    """Version that the gateway served at the start."""
    served_dtype: str
    """Dtype of the engines, as the gateway reports it."""
    child: GatewayChild | None
    """Gateway process; None if the gateway was not started here."""


@asynccontextmanager
async def open_collector(
    config: TrainConfig,
    run: RunDirectory,
    tasks: Sequence[Task],
    info: RunInfo,
    observer: RolloutObserver,
    *,
    admin_key: str | None = None,
    endpoint: AbstractAsyncContextManager[Gateway] | None = None,
) -> AsyncIterator[Collector]:
    """Start everything that collects rollouts; on exit, stop it in reverse order.

    `endpoint` replaces the gateway, for agents that call a model which records nothing.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(run.locked("collect"))
        await asyncio.to_thread(run.write_info, info)
        await asyncio.to_thread(run.index.start)
        parts = RunBuilder(config, run, tasks, stack)
        if endpoint is not None:
            parts.rollout_config = structs.replace(
                parts.rollout_config, model_id=config.model, no_turns="accept"
            )
        child = None
        if not config.gateway and endpoint is None:
            child = await stack.enter_async_context(gateway_child(config, run))
        runtimes = await _start_runtimes(config, run, stack)
        checks = [runtime.check() for runtime in runtimes.all]
        connecting = _existing(endpoint) if endpoint else connect_gateway(config, child, admin_key)
        gateway = await stack.enter_async_context(await run_with_checks(connecting, *checks))
        if config.gateway and endpoint is None:
            await check_gateway(config, run, admin_key)
        rollout_runner = await parts.rollout_runner(gateway, runtimes, observer)
        yield Collector(
            gateway=gateway,
            groups=await parts.group_runner(rollout_runner),
            rollout_runner=rollout_runner,
            schedule=parts.schedule,
            rollout_config=parts.rollout_config,
            run=run,
            rollout_store=parts.rollout_store,
            run_state=parts.run_state,
            base=await gateway.version(),
            served_dtype=await gateway.engine_dtype(),
            child=child,
        )


async def _start_runtimes(config: TrainConfig, run: RunDirectory, stack: AsyncExitStack) -> AgentRuntimes:
    transport = await stack.enter_async_context(factory.transport(config, run))
    runtimes = AgentRuntimes(
        factory.runtime(config, run, transport),
        factory.verifier_runtime(config, run, transport),
        transport,
    )
    for runtime in runtimes.all:
        await stack.enter_async_context(runtime)
    return runtimes


async def _existing(gateway: Any) -> Any:
    return gateway


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
    on_validation: Callable[[dict[str, Any]], None] = lambda _: None,
) -> AsyncIterator[TrainingRun]:
    """Start all components of a training run; on exit, stop them in reverse order."""
    async with AsyncExitStack() as stack:
        parts = RunBuilder(config, run, tasks, stack)
        # Slow components start concurrently; agents end before the gateway does.
        runtimes = child = None
        if not config.gateway:
            child = await stack.enter_async_context(gateway_child(config, run))
        if role is not RunRole.LEARN:
            runtimes = await _start_runtimes(config, run, stack)
        # Checks of the runtimes fail early, before the gateway is ready. The trainer loads after them,
        # because a thread that loads a model cannot be stopped.
        checks = [asyncio.create_task(runtime.check()) for runtime in runtimes.all] if runtimes else []
        learning = asyncio.create_task(_trainer(config, checks)) if role is not RunRole.COLLECT else None
        stack.push_async_callback(_cancel_and_wait, *checks, *([learning] if learning else []))
        gateway = await stack.enter_async_context(
            await run_with_checks(connect_gateway(config, child, admin_key), *map(_done, checks))
        )
        if config.gateway:
            await check_gateway(config, run, admin_key)
        if role is RunRole.ALL:
            await asyncio.to_thread(rewind_published_step, run, parts.run_state)
        loops: list[Callable[[], Coroutine[None, None, None]]] = []
        if runtimes:
            validating = validation(config, run, val_tasks, on_validation)
            scheduler = await parts.group_scheduler(gateway, runtimes, observer, validating)
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


async def connect_gateway(
    config: TrainConfig, child: GatewayChild | None, admin_key: str | None
) -> AbstractAsyncContextManager[Any]:
    """Create a client of the child gateway, or of an external one, whose outages are retried."""
    if child is not None:
        return await child.client()
    if not admin_key:
        raise UsageError(f"the gateway at {config.gateway} needs an admin key: set AFIELD_ADMIN_KEY")
    return factory.gateway_client(
        config.gateway, admin_key, unavailable_timeout_s=config.unavailable_timeout_s
    )


async def check_gateway(config: TrainConfig, run: RunDirectory, admin_key: str | None) -> None:
    """Check that the external gateway answers, accepts the key and serves the run's model.

    A new run waits `FIRST_ANSWER_S` for the answer.
    """
    unavailable_timeout_s = (
        config.unavailable_timeout_s if run.has_begun else min(config.unavailable_timeout_s, FIRST_ANSWER_S)
    )
    delivers = config.delivery == "gateway"
    async with factory.gateway_client(
        config.gateway, admin_key or "", unavailable_timeout_s=unavailable_timeout_s, delivers=delivers
    ) as gateway:
        served = await gateway.served_policy()
    model = Path(config.model)
    await asyncio.to_thread(factory.check_served_model, model, served.model, served.version, config.gateway)


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


def validation(
    config: TrainConfig,
    run: RunDirectory,
    tasks: Sequence[Task],
    on_validation: Callable[[dict[str, Any]], None] = lambda _: None,
) -> Validation | None:
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
        on_validation(line)

    return Validation(
        tasks=tasks,
        every=config.val_every,
        once=config.freeze_weights,
        sampling=config.val_sampling,
        report=report,
        reported=lambda step: any(line["step"] == step for line in run.read_validation()),
    )


async def _trainer(config: TrainConfig, checks: Sequence[asyncio.Task[None]]) -> Trainer:
    for check in checks:
        await asyncio.shield(check)
    return await asyncio.to_thread(factory.trainer, config)


async def _done(task: asyncio.Task[T]) -> T:
    return await task


async def _cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for them, ignoring their results; a task in a thread runs to its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TrainingRun:
    """Started training run. Ends when collector and training loop are done, or when its gateway has died."""

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
        keep_checkpoints=config.keep_checkpoints,
        checkpoint_every=config.checkpoint_every,
        async_checkpoints=config.async_checkpoints,
        keep_weights=config.keep_weights,
        keep_rollouts_gb=config.keep_rollouts_gb,
        frozen=config.freeze_weights,
    )
