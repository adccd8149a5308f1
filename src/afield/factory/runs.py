"""Training run components from settings: transport, limiter, trainer, rollout config."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from afield.errors import UsageError
from afield.factory.registry import TRACKERS, TRAINERS, check_installed, check_name, load, needs
from afield.factory.weight_transfer import engine_devices, trainer_gpus, weight_transfer
from afield.interfaces import Trainer, Transport
from afield.orchestrator.config import RolloutConfig
from afield.orchestrator.groups import DynamicSampling, StalenessWindow
from afield.orchestrator.reward_function import RewardFunction
from afield.orchestrator.state import RunDirectory
from afield.ratelimit import LeasedLimiter, LocalLimiter, RateLimits, RedisLimiter, SharedLimiter
from afield.sdk.serve import load_object
from afield.settings.fields import values_of
from afield.settings.gateway import (
    GatewaySettings,
    LimitSettings,
    ManagedEngineSettings,
    TelemetrySettings,
)
from afield.settings.rollouts import deadlines_of, retries_of
from afield.settings.sessions import policies_of
from afield.settings.train import TrainConfig
from afield.trackers.base import Tracker
from afield.types import Budget, Task


def transport(config: TrainConfig, run: RunDirectory) -> Transport:
    """Transport of a run: `files`, `memory`, or a specification such as `s3://BUCKET?sqs=URL`."""
    with needs("gateway"):
        from afield.transports.spec import from_spec

        return from_spec(config.outcomes, run.outcomes)


def limiter(
    config: TrainConfig,
    limits: RateLimits | None = None,
    file: str | Path | None = None,
    url: str | None = None,
) -> LocalLimiter | LeasedLimiter:
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
    file, url = file or config.limiter_file, url or config.limiter_url
    if file and url:
        raise UsageError(f"limiter_file {file} and limiter_url both name a shared budget; leave one out")
    if url:
        return RedisLimiter(limits, url, unavailable_timeout_s=config.unavailable_timeout_s)
    return SharedLimiter(limits, Path(file)) if file else LocalLimiter(limits)


def trainer(config: TrainConfig) -> Trainer:
    """Trainer of a run; the frozen trainer if `freeze_weights` is set."""
    if config.freeze_weights:
        from afield.trainers.frozen import Frozen

        return Frozen(Path(config.model), truncated=config.sampling.truncated)
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
        lr_schedule=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        min_lr_ratio=config.min_lr_ratio,
        total_steps=config.steps,
        reply_limit=config.max_tokens,
        minibatches=config.minibatches,
        kl=config.kl,
        grad_clip=config.grad_clip,
        eps=config.adam_eps,
        scale=config.scale_advantages,
        advantage=config.advantage,
        seed=config.seed,
        thinking=config.thinking,
        record_training=config.record_training,
        weight_transfer=config.weight_transfer if weight_transfer(config).way == "memory" else "disk",
        **options,
    )


def tracker(name: str) -> Callable[[], Tracker]:
    """Constructor of a tracker; its library is imported when it is called."""
    check_name("tracker", name, TRACKERS)
    check_installed(dict.fromkeys(TRACKERS[name].libraries, TRACKERS[name].extra))
    return lambda: load("tracker", name, TRACKERS)()


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
        sampling=config.sampling,
        budget=Budget(calls=config.max_calls, context=config.max_context),
        **policies_of(config),
        agent_args=config.agent_args,
        deliver=config.delivery,
        separate_verifier=bool(config.verifier),
        reward_from="caller" if config.reward_function else "agent",
        no_turns="flag" if config.freeze_weights else "refuse",
        rewards=() if config.freeze_weights else tuple(config.learn.rewards),
        max_reward=config.max_reward,
        poll_interval_s=config.poll_interval_s,
        unavailable_timeout_s=config.unavailable_timeout_s,
    )


def reward_function(config: TrainConfig) -> RewardFunction | None:
    """The imported reward function of a run; None without one."""
    if not config.reward_function:
        return None
    function = load_object(config.reward_function)
    if not callable(function):
        raise UsageError(f"{config.reward_function} is no function; it must take a list of rollouts")
    return function


def dynamic_sampling(config: TrainConfig) -> DynamicSampling | None:
    """Rule by which groups with equal rewards are replaced; None keeps them."""
    if not config.dynamic_sampling or config.freeze_weights:
        return None
    turns = config.learn.credit == "turns"
    return DynamicSampling(max_refills=config.max_refills, weights=config.learn.rewards, turns=turns)


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
        **values_of(config, TelemetrySettings),
        **engine_placement(config, run),
        relay=config.relay,
        relay_cluster=config.relay_cluster,
        relay_name=relay_name(config, run),
        relay_secret_file=config.relay_secret_file,
    )


def engine_placement(config: TrainConfig, run: RunDirectory) -> dict[str, Any]:
    """Devices and managed vLLM of the gateway that a run starts.

    Engines get the GPUs that the trainer leaves. If it leaves none, both share theirs.
    """
    values, trained = values_of(config, ManagedEngineSettings), trainer_gpus(config)
    values["engine_devices"] = engine_devices(config)
    shares = config.engine.startswith("vllm") and weight_transfer(config).way == "memory"
    values["vllm_shared_weights"] = values["vllm_shared_weights"] or shares
    if values["vllm_memory"] is None:
        apart = not trained or min(values["engine_devices"], default=0) >= trained
        values["vllm_memory"] = 0.9 if apart else 0.45
    if config.learn.lora.rank and config.learn.lora.publish == "adapter" and not config.freeze_weights:
        values["vllm_adapters"] = values["vllm_adapters"] or config.staleness + 2
        values["vllm_adapter_rank"] = max(values["vllm_adapter_rank"], config.learn.lora.rank)
    values["vllm_logs"] = values["vllm_logs"] or str(run.logs)
    return values


def relay_name(config: TrainConfig, run: RunDirectory) -> str:
    """Name of the gateway at the relay; by default the run's, so that runs on one host do not collide."""
    return config.relay_name or re.sub(r"[^A-Za-z0-9_-]", "-", run.id)[:64] if config.relay else ""


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
