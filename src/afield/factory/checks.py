"""Everything that can be known to be wrong with a run before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from afield.errors import UsageError
from afield.factory.agents import check_target
from afield.factory.registry import (
    ENGINES,
    IN_SHORT,
    RUNTIMES,
    TAKES_TARGET,
    TRAINERS,
    check_heavy,
    choose,
    load,
)
from afield.factory.runs import plan, transport
from afield.factory.runtimes import addresses
from afield.orchestrator.state import RunDirectory
from afield.settings import TrainConfig
from afield.types import HIDDEN_FIELD, Task

log = logging.getLogger("afield.factory")
# Runtimes in which nothing keeps an agent from what its user may read.
SAME_USER = {"process": "as your own user", "inline": "in this process", "ray": "as the user of its node"}


def check_choices(config: TrainConfig) -> None:
    """Everything that can be known to be wrong before anything is started."""
    check_place(config)
    check_reach(config)
    transport(config, RunDirectory(Path("check")))
    check_heavy("trainer", config.trainer, TRAINERS, used=not config.freeze_weights)
    check_heavy("engine", config.engine.partition("=")[0], ENGINES, used=not config.gateway)
    load("chat:ChatTokenizer").load(Path(config.model))
    plan(config, RunDirectory(Path("check")))
    if config.transport == "memory" and (config.runtime != "inline" or config.verifier):
        raise UsageError("--transport memory works with --runtime inline only; use --transport files")


def check_place(config: TrainConfig) -> None:
    """Where agents and verifiers run, and whether that place was told what it needs."""
    name, _, argument = config.runtime.partition("=")
    choose("runtime", name, RUNTIMES)
    if name == "served":
        addresses(argument)
    elif argument and name not in IN_SHORT:
        raise UsageError(f"runtime {name} takes nothing after '=', not {argument!r}")
    if name in TAKES_TARGET:
        check_target("agent", config.agent)
    elif name != "served":
        _check_image(name, config, argument)
    if config.verifier:
        check_target("verifier", config.verifier)
        where = config.verifier_runtime
        if where not in ("process", "sandbox", "ray"):
            raise UsageError(f"verifier_runtime {where!r} must be one of: process, sandbox, ray")


def check_trust(config: TrainConfig, tasks: Sequence[Task]) -> None:
    """Refuse what nobody would get to see, and say where a verifier's reward is not safe from the agent."""
    hidden = [task.id for task in tasks if HIDDEN_FIELD in task.input]
    if hidden and not config.verifier:
        raise UsageError(
            f"task {hidden[0]!r} has a '{HIDDEN_FIELD}' object, which only a verifier gets, but no verifier:"
            " name one with --verifier, or give the agent what is in it under another name"
        )
    if config.verifier and (where := SAME_USER.get(config.place)):
        log.warning(
            "--verifier with --runtime %s: the agent runs %s, and can read the verifier, the tasks and the"
            " gateway's secret; use --runtime sandbox or container where the reward must be safe from it",
            config.place,
            where,
        )


def check_reach(config: TrainConfig) -> None:
    """Agents on other machines need a gateway of ours that can be reached from there."""
    away = config.place == "kubernetes" or (
        config.place == "agentcore" and not _is_loopback(urlsplit(config.agentcore.endpoint_url).hostname)
    )
    if away and not (config.gateway or config.gateway_url) and _is_loopback(config.gateway_host):
        raise UsageError(
            f"agents on {config.place} cannot reach a gateway that listens at {config.gateway_host}: set"
            " gateway_host = '0.0.0.0', and gateway_port and gateway_url if they know this machine by"
            " another address; or name a gateway that runs elsewhere with --gateway"
        )


def _is_loopback(host: str | None) -> bool:
    return host in ("127.0.0.1", "::1", "localhost")


def _check_image(name: str, config: TrainConfig, argument: str) -> None:
    options = getattr(config, name)
    if name == "agentcore":
        made = options.agent_name and options.container_uri and options.role_arn
        if not (argument or options.arn or made):
            raise UsageError(
                "runtime agentcore needs a runtime that exists (--runtime agentcore=ARN), or in"
                " [train.agentcore] agent_name, container_uri and role_arn to make one of"
            )
    elif not (argument or options.image):
        raise UsageError(
            f"runtime {name} needs an image: --runtime {name}=IMAGE, or --set {name}.image=IMAGE"
        )
