"""Factory: settings to objects; the only package that names backends."""

from __future__ import annotations

from afield.factory.checks import (
    check_choices,
    check_engine_model,
    check_model,
    check_reachable,
    check_runtime,
    check_trust,
)
from afield.factory.engines import engine, engine_pool, published_dtype, scripted_reply, vocabulary_of
from afield.factory.gateway import (
    COMMAND,
    chat_tokenizer,
    gateway_client,
    gateway_for,
    read_shard,
    remove_ended_sessions,
    serve,
    serve_front,
    serve_shard,
    start_timeout,
)
from afield.factory.registry import ENGINES, RUNTIMES, SANDBOXES, Backend, load, needs
from afield.factory.relay import RelayRoute, clusters_of, relay_client, relay_route, serve_relay
from afield.factory.runs import (
    gateway_settings,
    limiter,
    rollout_config,
    staleness_window,
    trainer,
    transport,
)
from afield.factory.runtimes import runtime, untracked, verifier_runtime
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
    "chat_tokenizer",
    "check_choices",
    "check_engine_model",
    "check_model",
    "check_reachable",
    "check_runtime",
    "check_trust",
    "clusters_of",
    "engine",
    "engine_pool",
    "gateway_client",
    "gateway_for",
    "gateway_settings",
    "limiter",
    "load",
    "needs",
    "published_dtype",
    "read_shard",
    "relay_client",
    "relay_route",
    "remove_ended_sessions",
    "rollout_config",
    "runtime",
    "scripted_reply",
    "serve",
    "serve_front",
    "serve_relay",
    "serve_shard",
    "staleness_window",
    "start_timeout",
    "trainer",
    "transport",
    "untracked",
    "verifier_runtime",
    "vocabulary_of",
]
