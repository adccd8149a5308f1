"""What a container is asked to be: names, labels and limits; and what its state says. Pure.

A name follows from the session's id alone, so that any process finds it again. Containers have no more
rights than they need: no capabilities but those kept on purpose, no new privileges, bounded everything.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from afield.interfaces.runtime import Limit, Phase, SessionStatus
from afield.options import ContainerOptions, Limits

RUN, SESSION = "afield.run", "afield.session"
PREFIX = "afield-"
# Docker takes longer names, but some tools around it do not.
LONGEST = 128
LOG_MB = 16
MB = 2**20
ENDED = frozenset({"exited", "stopped", "dead", "removing"})
STARTING = frozenset({"created", "configured", "initialized", "restarting"})


def name_of(session_id: str) -> str:
    name = f"{PREFIX}{session_id}"
    if len(name) <= LONGEST:
        return name
    # What is cut off goes in as a digest; a name that was not cut is shorter.
    digest = hashlib.sha256(session_id.encode()).hexdigest()[:32]
    return f"{name[: LONGEST - 33]}-{digest}"


def labels_of(run: str, session_id: str) -> dict[str, str]:
    return {RUN: run, SESSION: session_id}


def enforced(limits: Limits) -> frozenset[Limit]:
    named: dict[Limit, float | None] = {
        "cpu": limits.cpus,
        "memory": limits.memory_mb,
        "pids": limits.pids,
        "disk": limits.disk_mb,
    }
    return frozenset(name for name, value in named.items() if value is not None)


def host_config(options: ContainerOptions) -> dict[str, Any]:
    """The arguments of the SDK's `create_host_config`, but for ports, which a sandbox has none of."""
    limits = options.limits
    config: dict[str, Any] = {
        "network_mode": options.network,
        "binds": list(options.mounts),
        "cap_drop": ["ALL"],
        "cap_add": list(options.keep),
        "security_opt": ["no-new-privileges"],
        "init": options.init,
        "log_config": {"type": "json-file", "config": {"max-size": f"{LOG_MB}m"}},
    }
    if options.runtime:
        config["runtime"] = options.runtime
    if limits.cpus is not None:
        config["nano_cpus"] = int(limits.cpus * 1e9)
    if limits.memory_mb is not None:
        # Both: what may be swapped out is memory too.
        config["mem_limit"] = config["memswap_limit"] = limits.memory_mb * MB
    if limits.pids is not None:
        config["pids_limit"] = limits.pids
    if limits.files is not None:
        config["ulimits"] = [{"Name": "nofile", "Soft": limits.files, "Hard": limits.files}]
    if limits.disk_mb is not None:
        config["read_only"] = True
        config["tmpfs"] = {"/tmp": f"size={limits.disk_mb}m", "/run": "size=16m", "/var/tmp": "size=16m"}
    return config


def phase_of(state: str) -> Phase:
    state = state.lower()
    if state in ENDED:
        return Phase.ENDED
    return Phase.STARTING if state in STARTING else Phase.RUNNING


def live_of(row: Mapping[str, Any]) -> SessionStatus:
    """From one row of the engine's list."""
    names: Iterable[str] = row.get("Names") or ()
    where = next((name.lstrip("/") for name in names), str(row["Id"])[:12])
    return SessionStatus(
        session_id=row["Labels"][SESSION],
        phase=phase_of(row["State"]),
        where=f"container {where}",
        since=float(row["Created"]),
    )


def live_of_one(session_id: str, found: Mapping[str, Any]) -> SessionStatus:
    """From what the engine tells of one container."""
    return SessionStatus(
        session_id=session_id,
        phase=phase_of(found["State"]["Status"]),
        where=f"container {found['Name'].lstrip('/')}",
        since=_seconds(found.get("Created")),
    )


def networks_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Newest engines tell addresses only for each network, old ones also for the container."""
    settings = found.get("NetworkSettings") or {}
    return [*(settings.get("Networks") or {}).values(), settings]


def gateway_of(found: Mapping[str, Any]) -> tuple[str, str]:
    """The engine's side of a container's network, and the network; empty where it does not tell."""
    for network in networks_of(found):
        if network.get("Gateway"):
            return network["Gateway"], f"{network['Gateway']}/{network.get('IPPrefixLen') or 32}"
    return "", ""


def death_of(state: Mapping[str, Any], limits: Limits) -> str:
    """Why a container ended, in words."""
    code = int(state.get("ExitCode") or 0)
    if state.get("OOMKilled"):
        bound = f" ({limits.memory_mb} MB)" if limits.memory_mb is not None else ""
        return f"ran out of memory{bound}, exit code {code}"
    error = f": {state['Error']}" if state.get("Error") else ""
    if code > 128:
        # Not every engine tells that it was memory.
        bounded = code == 137 and limits.memory_mb is not None
        hint = f"; too much memory ends so, at {limits.memory_mb} MB here" if bounded else ""
        return f"ended with exit code {code} (signal {code - 128}, {_signal(code - 128)}{hint}){error}"
    return f"ended with exit code {code}{error}"


def _signal(number: int) -> str:
    return signal.strsignal(number) or "unknown" if number in signal.valid_signals() else "unknown"


def _seconds(stamp: str | None) -> float | None:
    """Nanoseconds are more than Python reads."""
    if not stamp:
        return None
    head, _, fraction = stamp.partition(".")
    digits = fraction.rstrip("Z")
    offset = next((digits[i:] for i, c in enumerate(digits) if c in "+-"), "+00:00")
    try:
        return datetime.fromisoformat(head.rstrip("Z") + offset).timestamp()
    except ValueError:
        return None
