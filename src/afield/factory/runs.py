"""What else a run is made of: its store of outcomes, its trainer, and how it goes about collecting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from afield.factory.registry import TRAINERS, TRANSPORTS, choose, load
from afield.interfaces import Trainer, Transport
from afield.options import policies_of
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.deadlines import Deadlines
from afield.orchestrator.groups import StalenessWindow
from afield.orchestrator.state import RunDirectory
from afield.ratelimit import LocalLimiter, RateLimits, SharedLimiter
from afield.settings import TrainConfig
from afield.types import Budget, FailureKind, Sampling, Task


def transport(config: TrainConfig, run: RunDirectory) -> Transport:
    """`files`, `memory`, or a specification such as `s3://BUCKET?sqs=URL`."""
    if "://" in config.outcomes:
        return load("transports.spec:from_spec")(config.outcomes, run.outcomes)
    made = choose("transport", config.transport, TRANSPORTS)
    return made() if config.transport == "memory" else made(run.outcomes)


def limiter(
    config: TrainConfig, pace: RateLimits | None = None, file: str | Path | None = None
) -> LocalLimiter | SharedLimiter:
    """The one limiter of a run, a client or a veRL job: `pace`, or the rates that `config` has.

    Where a place has quotas of its own, they hold for whatever is left open.
    """
    pace = pace or RateLimits(
        rate_per_s=config.launch_rate, cold_start_s=config.cold_start_s, starting=config.launching
    )
    if config.place == "agentcore":
        quotas = config.agentcore
        pace = structs.replace(
            pace,
            rate_per_s=pace.rate_per_s or quotas.rate,
            stop_per_s=pace.stop_per_s or quotas.stop_rate,
            cold_start_s=pace.cold_start_s or quotas.cold_start_s,
        )
    file = file or config.limiter_file
    return SharedLimiter(pace, Path(file)) if file else LocalLimiter(pace)


def trainer(config: TrainConfig) -> Trainer:
    if config.freeze_weights:
        return load("trainers.frozen:Frozen")(Path(config.model))
    made = choose("trainer", config.trainer, TRAINERS)
    told = structs.asdict(config.learn)
    if told["devices"] > 1:
        made = load("trainers.fsdp.trainer:FSDPTrainer")
    else:
        del told["devices"]
    told["device"] = told["device"] or None
    told["length"] = told["length"] or config.max_tokens * (config.max_calls or 1)
    return made(
        Path(config.model),
        lr=config.learning_rate,
        minibatches=config.minibatches,
        kl=config.kl,
        grad_clip=config.grad_clip,
        eps=config.adam_eps,
        scale=config.scale_advantages,
        advantage=config.advantage,
        seed=config.seed,
        thinking=config.thinking,
        **told,
    )


def plan(config: TrainConfig, run: RunDirectory) -> RolloutConfig:
    return RolloutConfig(
        exp_id=config.exp_id or run.id,
        model_id=Path(config.model).name,
        rollouts=config.rollouts,
        val_rollouts=config.val_rollouts,
        quorum=config.quorum,
        extra=config.extra,
        straggler_s=config.straggler_s,
        straggler_after=config.straggler_after,
        baseline=config.advantage == "remax",
        concurrency=config.concurrency,
        deadlines=deadlines(config),
        retries={
            FailureKind.TASK: config.retries_task,
            FailureKind.VERIFIER: config.retries_verifier,
            FailureKind.INFRASTRUCTURE: config.retries_infrastructure,
        },
        sampling=Sampling(temperature=config.temperature, max_tokens=config.max_tokens),
        budget=Budget(calls=config.max_calls, context=config.max_context),
        **policies_of(config),
        deliver=config.delivery,
        separate_verifier=bool(config.verifier),
        no_turns="flag" if config.freeze_weights else "refuse",
        rewards=() if config.freeze_weights else tuple(config.learn.rewards),
        max_reward=config.max_reward,
        poll_interval_s=config.poll_interval_s,
        unavailable_timeout_s=config.unavailable_timeout_s,
    )


def deadlines(config: TrainConfig) -> Deadlines:
    same = (
        "queue_timeout_s",
        "launch_timeout_s",
        "first_call_timeout_s",
        "idle_timeout_s",
        "verifier_timeout_s",
        "upload_timeout_s",
        "teardown_timeout_s",
        "rollout_timeout_s",
    )
    return Deadlines(
        attempt_timeout_s=config.attempt_timeout_s,
        active_s=min(60.0, config.attempt_timeout_s / 2),
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        **{name: getattr(config, name) for name in same},
    )


def window(config: TrainConfig, tasks: Sequence[Task]) -> StalenessWindow:
    groups = config.steps * config.tasks_per_step
    if config.epochs is not None:
        groups = config.epochs * len(tasks)
    return StalenessWindow(
        mode=config.mode,
        groups=groups,
        batch=config.tasks_per_step,
        staleness=config.staleness,
        strict=config.on_stale == "drop",
    )
