"""Sessions of runs, shared by `ps`, `logs`, `kill` and `cleanup`.

1. Each run has a session registry for its agents, one for its verifiers, and one for the gateways of a pool.
2. A session whose controller process is dead is an orphan.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from afield import factory
from afield.cli.train import saved_config
from afield.errors import UsageError
from afield.interfaces import Runtime
from afield.orchestrator.state import RunDirectory, find_run, list_runs
from afield.settings.environment import Environment
from afield.types import Attempt

ROLES: tuple[Literal["agent", "verifier", "gateway"], ...] = ("agent", "verifier", "gateway")


class SessionGroup(Struct, frozen=True):
    """The agents, verifiers or gateways of a run, which share a session registry and, except for gateways, a
    runtime."""

    run: RunDirectory
    """Directory of the run."""
    role: Literal["agent", "verifier", "gateway"]
    """Role of these sessions; a gateway is listed like a session."""

    @property
    def directory(self) -> RunDirectory:
        """Directory with the session registry and the logs."""
        if self.role == "gateway":
            return factory.gateway_directory(self.run)
        return RunDirectory(self.run.path / "verifiers") if self.role == "verifier" else self.run

    @property
    def logs(self) -> Path:
        """Directory with the logs."""
        return self.run.logs if self.role == "gateway" else self.directory.logs

    @property
    def runtime_name(self) -> str:
        config = saved_config(self.run)
        return config.verifier_runtime if self.role == "verifier" else config.runtime_name

    def registry(self) -> factory.SessionRegistry:
        return factory.SessionRegistry(self.directory.sessions)

    def runtime(self) -> Runtime | None:
        """Build the runtime from the run's saved settings, without writing to its session registry.

        None for gateways, which are plain processes.
        """
        if self.role == "gateway":
            return None
        config = saved_config(self.run)
        build = factory.verifier_runtime if self.role == "verifier" else factory.runtime
        runtime = build(config, self.run, factory.transport(config, self.run))
        assert runtime is not None  # only a run with verifiers has their registry
        return factory.untracked(runtime)

    def remove(self, session_id: str) -> None:
        """Remove a session from the registry."""
        with closing(self.registry()) as registry:
            registry.remove(session_id)

    def sessions(self) -> list[RunSession]:
        """Sessions in the registry that may still run."""
        with closing(self.registry()) as registry:
            sessions = [RunSession(self, entry) for entry in registry.entries()]
        return [session for session in sessions if not session.stale]


class RunSession(Struct, frozen=True):
    """An entry of a session registry, with the run and role that it belongs to."""

    group: SessionGroup
    """Agents, verifiers or gateways that the session belongs to."""
    entry: factory.SessionEntry
    """Entry of the session registry."""

    @property
    def id(self) -> str:
        return self.entry.session_id

    @property
    def attempt(self) -> Attempt:
        return Attempt.from_session_id(self.id)

    @property
    def stale(self) -> bool:
        """Whether the session ended with its dead controller, although its entry remains."""
        gone = self.entry.process is None or not self.entry.process.alive
        return self.entry.orphan and not self.entry.outlives and gone

    def row(self) -> dict[str, Any]:
        """The session as a row of `afield ps`."""
        entry, owner = self.entry, self.entry.owner
        return {
            "run": self.group.run.id,
            "session": entry.session_id,
            "role": self.group.role,
            "runtime": entry.runtime,
            "phase": str(entry.phase),
            "where": entry.where,
            "age_s": round(max(0.0, time.time() - entry.since), 1),
            "owner": {"host": owner.host, "pid": owner.pid, "alive": owner.alive},
            "orphan": entry.orphan,
        }


def runs_named(name: str | None) -> list[RunDirectory]:
    """The run of this name, or all runs."""
    root = Environment.read().runs
    if name:
        return [find_run(root, name)]
    return sorted((run for run in list_runs(root) if run.config.exists()), key=lambda run: run.id)


def session_groups(name: str | None) -> list[SessionGroup]:
    """Agents, verifiers and gateways of one run, or of all runs, that have a session registry."""
    groups = [SessionGroup(run, role) for run in runs_named(name) for role in ROLES]
    return [group for group in groups if group.directory.sessions.exists()]


def running_sessions(name: str | None) -> list[RunSession]:
    """Sessions of one run, or of all runs, that may still run."""
    return [session for group in session_groups(name) for session in group.sessions()]


def unknown_session(session_id: str, candidates: Iterable[str]) -> UsageError:
    near = difflib.get_close_matches(session_id, sorted(set(candidates)), n=5)
    hint = f"; did you mean {', '.join(near)}?" if near else "; `afield ps` lists the running sessions"
    return UsageError(f"unknown session {session_id!r}{hint}")
