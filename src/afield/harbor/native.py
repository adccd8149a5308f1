"""Keys of task.toml that runs in sandboxes of this machine cannot honour.

A key that asks for what sandboxes lack is refused: the task could not be solved or graded. Other keys have no
effect, which is told once for each of them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from afield.datasets.harbor import (
    CONFIG,
    HarborAgent,
    HarborConfig,
    HarborEnvironment,
    HarborSolution,
    HarborVerifier,
    read_config,
    read_text,
)
from afield.settings.runtimes import ResourceLimits
from afield.settings.values import line_of

REMEDY = (
    "remove the key if the task works without it, or have a Harbor server whose environments have it run the"
    " task: --agent harbor-server"
)
KNOWN: dict[str, frozenset[str]] = {
    "": frozenset({*HarborConfig.__struct_fields__, "version", "task", "source"}),
    "agent": frozenset(HarborAgent.__struct_fields__),
    "environment": frozenset({*HarborEnvironment.__struct_fields__, "memory", "storage", "allow_internet"}),
    "verifier": frozenset(HarborVerifier.__struct_fields__),
    "solution": frozenset(HarborSolution.__struct_fields__),
}
"""Keys by table that are read, have another name, or only describe the task."""
NETWORK = ("public", "allowlist")


class KeyProblem(Struct, frozen=True, kw_only=True):
    """Key of a task.toml that a run cannot honour."""

    place: str
    """File and line."""
    key: str
    """Name of the key with its tables."""
    message: str
    """Why, without place and key."""

    def __str__(self) -> str:
        return f"{self.place}: {self.key}: {self.message}"


def refused_keys(task: Path, *, agent: bool, verifier: bool) -> list[KeyProblem]:
    """Keys that ask for what the sandboxes of the agent, of the verifier, or of both do not have."""
    config = read_config(task / CONFIG)
    environment = config.environment
    found: list[tuple[str, str]] = []
    if environment.gpus:
        found.append(("environment.gpus", "the sandbox has no GPUs"))
    if environment.tpu:
        found.append(("environment.tpu", "the sandbox has no TPU"))
    for table, mode, concerned in (
        ("environment", environment.network_mode, agent or verifier),
        ("agent", config.agent.network_mode, agent),
        ("verifier", config.verifier.network_mode, verifier),
    ):
        if concerned and mode in NETWORK:
            problem = f"{mode!r} is a network, which the sandbox does not have"
            found.append((f"{table}.network_mode", problem))
    if agent and environment.mcp_servers:
        found.append(("environment.mcp_servers", "MCP servers are not started in the sandbox"))
    if verifier and config.verifier.separate:
        key = "environment" if config.verifier.environment is not None else "environment_mode"
        message = "the verifier runs in the task's environment, not in one of its own"
        found.append((f"verifier.{key}", message))
    text = read_text(task / CONFIG) if found else ""
    return [_problem(task, text, key, f"{message}; {REMEDY}") for key, message in found]


def ignored_keys(task: Path) -> list[KeyProblem]:
    """Keys without effect in sandboxes: unknown ones, users, and a network that no key names."""
    text = read_text(task / CONFIG)
    config = read_config(task / CONFIG)
    found = [(key, "has no effect: afield does not know it") for key in _unknown(text)]
    for table, user in (("agent", config.agent.user), ("verifier", config.verifier.user)):
        if user is not None:
            found.append((f"{table}.user", "has no effect: the sandbox has one user"))
    if config.environment.network_mode is None and config.agent.network_mode is None:
        message = (
            "is not set: Harbor gives such a task the internet, the sandbox does not; a task that"
            " downloads something fails; 'no-network' says that it needs none"
        )
        found.append(("environment.network_mode", message))
    return [_problem(task, text, key, message) for key, message in found]


def exceeded_limits(tasks: Sequence[Path], limits: ResourceLimits) -> Iterator[str]:
    """Lines for the resources of which a task names more than the sandbox of its agent has."""
    for name, limit, setting in (
        ("cpus", limits.cpus, "cpus"),
        ("memory_mb", limits.memory_mb, "memory_mb"),
        ("storage_mb", limits.disk_mb, "disk_mb"),
    ):
        named = ((getattr(read_config(task / CONFIG).environment, name), task) for task in tasks)
        more = [(value, task) for value, task in named if None not in (value, limit) and value > limit]
        if not more:
            continue
        value, task = max(more)
        key = f"environment.{name}"
        problem = _problem(task, read_text(task / CONFIG), key, "")
        others = f" (the largest of {len(more)} tasks)" if len(more) > 1 else ""
        yield (
            f"{problem.place}: {key} = {value:g}{others}, but the sandboxes of agents have {limit:g}:"
            f" set sandbox.limits.{setting}"
        )


def summary(problems: Iterable[KeyProblem]) -> Iterator[str]:
    """A line for each key and message, with the first place and the number of others."""
    groups: dict[tuple[str, str], list[KeyProblem]] = {}
    for problem in problems:
        groups.setdefault((problem.key, problem.message), []).append(problem)
    for (_, message), [first, *others] in groups.items():
        more = f" (and {len(others)} more)" if others else ""
        yield f"{first.place}: {first.key}{more} {message}"


def _problem(task: Path, text: str, key: str, message: str) -> KeyProblem:
    line = line_of(text, key.split("."))
    return KeyProblem(place=f"{task / CONFIG}:{line}", key=key, message=message)


def _unknown(text: str) -> Iterator[str]:
    values = tomllib.loads(text)
    for table, known in KNOWN.items():
        entries = values.get(table, {}) if table else values
        for key in entries if isinstance(entries, dict) else ():
            if key not in known:
                yield f"{table}.{key}" if table else key
