"""Training run components from settings: transport, limiter, trainer, rollout config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from afield.factory.registry import TRAINERS, TRANSPORTS, load, needs
from afield.interfaces import Trainer, Transport
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.groups import StalenessWindow
from afield.orchestrator.state import RunDirectory
from afield.ratelimit import LocalLimiter, RateLimits, SharedLimiter
from afield.settings.fields import values_of
from afield.settings.gateway import GatewaySettings, LimitSettings
from afield.settings.rollouts import deadlines_of, retries_of
from afield.settings.sessions import policies_of
from afield.settings.train import TrainConfig
from afield.types import Budget, Sampling, Task


def transport(config: TrainConfig, run: RunDirectory) -> Transport:
    """Transport of a run: `files`, `memory`, or a specification such as `s3://BUCKET?sqs=URL`."""
    if "://" in config.outcomes:
        with needs("gateway"):
            from afield.transports.spec import from_spec

            return from_spec(config.outcomes, run.outcomes)
    backend = load("transport", config.transport, TRANSPORTS)
    return backend() if config.transport == "memory" else backend(run.outcomes)


def limiter(
    config: TrainConfig, limits: RateLimits | None = None, file: str | Path | None = None
) -> LocalLimiter | SharedLimiter:
    """Launch limiter of a run, a client or a veRL job: `limits`, or the rates of `config`.

    With the AgentCore runtime, unset limits default to its quotas.
    """
    limits = limits or RateLimits(
        rate_per_s=config.launch_rate, cold_start_s=config.cold_start_s, starting=config.launching
    )
    if config.runtime_name == "agentcore":
        quotas = config.agentcore
        limits = structs.replace(
            limits,
            rate_per_s=limits.rate_per_s or quotas.rate,
            stop_per_s=limits.stop_per_s or quotas.stop_rate,
            cold_start_s=limits.cold_start_s or quotas.cold_start_s,
        )
    file = file or config.limiter_file
    return SharedLimiter(limits, Path(file)) if file else LocalLimiter(limits)


def trainer(config: TrainConfig) -> Trainer:
    """Trainer of a run; the frozen trainer if `freeze_weights` is set."""
    if config.freeze_weights:
        from afield.trainers.frozen import Frozen

        return Frozen(Path(config.model))
    backend = load("trainer", config.trainer, TRAINERS)
    options = structs.asdict(config.learn)
    if options["devices"] > 1:
        from afield.trainers.fsdp.trainer import FSDPTrainer

        backend = FSDPTrainer
    else:
        del options["devices"]
    options["device"] = options["device"] or None
    options["length"] = options["length"] or config.max_tokens * (config.max_calls or 1)
    return backend(
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
        **options,
    )


def rollout_config(config: TrainConfig, run: RunDirectory) -> RolloutConfig:
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
        deadlines=deadlines_of(config),
        retries=retries_of(config),
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


def gateway_settings(config: TrainConfig, run: RunDirectory) -> GatewaySettings:
    """Settings of the gateway that a training run starts."""
    outcomes = ""
    if config.delivery == "gateway":
        outcomes = config.outcomes if "://" in config.outcomes else f"files://{run.outcomes}"
    return GatewaySettings(
        model=config.model,
        engine=(config.engine,),
        slots=config.engine_slots,
        seed=config.seed,
        engine_dtype=config.engine_dtype,
        engine_start_timeout_s=config.engine_start_timeout_s,
        record_engine_calls=str(run.path / "engine-calls.jsonl") if config.record_engine_calls else "",
        host=config.gateway_host,
        port=config.gateway_port,
        public_url=config.gateway_url,
        store=str(run.gateway),
        keep_sessions_h=config.keep_sessions_h or 0.0,
        durable=config.durable,
        outcomes=outcomes,
        **values_of(config, LimitSettings),
    )


def staleness_window(config: TrainConfig, tasks: Sequence[Task]) -> StalenessWindow:
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
