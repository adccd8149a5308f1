"""Factory: settings to objects; the only package that names backends."""

from __future__ import annotations

from afield.factory.checks import (
    check_choices,
    check_collection,
    check_engine_model,
    check_model,
    check_reachable,
    check_runtime,
    check_served_model,
    check_trust,
)
from afield.factory.engines import (
    engine,
    engine_pool,
    probe_server,
    published_dtype,
    scripted_reply,
    vocabulary_of,
)
from afield.factory.gateway import (
    COMMAND,
    chat_tokenizer,
    endpoint_gateway,
    gateway_client,
    gateway_for,
    gateway_process,
    open_run,
    read_shard,
    remove_ended_sessions,
    serve,
    serve_front,
    serve_shard,
    start_timeout,
)
from afield.factory.gateway_pool import gateway_directory, gateway_pool
from afield.factory.harnesses import agent_defaults, attempt_timeout, check_harbor_tasks
from afield.factory.model_download import download_model
from afield.factory.registry import ENGINES, RUNTIMES, SANDBOXES, Backend, load, needs
from afield.factory.relay import RelayRoute, clusters_of, relay_client, relay_route, serve_relay
from afield.factory.runs import (
    dynamic_sampling,
    gateway_settings,
    limiter,
    reward_function,
    rollout_config,
    staleness_window,
    tracker,
    trainer,
    transport,
)
from afield.factory.runtimes import runtime, untracked, verifier_runtime
from afield.factory.telemetry import span_exporter, traces_wanted
from afield.factory.weight_transfer import weight_transfer
from afield.runtimes.registry import SessionEntry, SessionRegistry

__all__ = [
    "COMMAND",
    "ENGINES",
    "RUNTIMES",
    "SANDBOXES",
    "Backend",
    "RelayRoute",
    "SessionEntry",
    "SessionRegistry",
    "agent_defaults",
    "attempt_timeout",
    "chat_tokenizer",
    "check_choices",
    "check_collection",
    "check_engine_model",
    "check_harbor_tasks",
    "check_model",
    "check_reachable",
    "check_runtime",
    "check_served_model",
    "check_trust",
    "clusters_of",
    "download_model",
    "dynamic_sampling",
    "endpoint_gateway",
    "engine",
    "engine_pool",
    "gateway_client",
    "gateway_directory",
    "gateway_for",
    "gateway_pool",
    "gateway_process",
    "gateway_settings",
    "limiter",
    "load",
    "needs",
    "open_run",
    "probe_server",
    "published_dtype",
    "read_shard",
    "relay_client",
    "relay_route",
    "remove_ended_sessions",
    "reward_function",
    "rollout_config",
    "runtime",
    "scripted_reply",
    "serve",
    "serve_front",
    "serve_relay",
    "serve_shard",
    "span_exporter",
    "staleness_window",
    "start_timeout",
    "traces_wanted",
    "tracker",
    "trainer",
    "transport",
    "untracked",
    "verifier_runtime",
    "vocabulary_of",
    "weight_transfer",
]
