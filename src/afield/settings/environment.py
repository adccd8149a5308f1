"""Environment variables that afield reads, and those that agents inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from afield.errors import UsageError
from afield.private_files import read_private, state_directory
from afield.process_secrets import hide_variables
from afield.settings.values import assigned

SECRETS = ("AFIELD_ADMIN_KEY", "AFIELD_OUTCOMES", "AFIELD_ACR_SECRET_KEY", "AFIELD_RELAY_SECRET")


class Environment(Struct, frozen=True):
    """Values from environment variables, and directories that depend on them."""

    admin_key: str | None
    """Admin key of a gateway: AFIELD_ADMIN_KEY, or the content of AFIELD_ADMIN_KEY_FILE."""
    runs: Path
    """Directory of runs: AFIELD_RUNS, default `runs`."""
    envs: Path
    """Directory in which third-party programs are installed."""
    template_profiles: Path
    """Cache of chat template profiles."""
    secrets: Path
    """Directory of signing secrets, one file for each gateway store."""
    invocation_key: Path | None = None
    """Key that signs calls to agents that are served elsewhere: AFIELD_INVOCATION_KEY_FILE, default the
    user's own."""
    outcomes: str = ""
    """Transport of a gateway's outcomes: AFIELD_OUTCOMES. An address may hold a password, which a command
    line would show."""
    agentcore_secret_key: str = ""
    """Secret key of clients of `afield agentcore-local`: AFIELD_ACR_SECRET_KEY."""
    relay_secret: str = ""
    """Secret of a cluster at a relay: AFIELD_RELAY_SECRET."""

    @classmethod
    def read(cls) -> Self:
        """Read the environment, and hide its secrets from other processes of the user."""
        cache_home = os.environ.get("XDG_CACHE_HOME")
        cache = (Path(cache_home) if cache_home else Path.home() / ".cache") / "afield"
        # Agents of the same user can read a process's first environment.
        hide_variables(SECRETS)
        return cls(
            os.environ.get("AFIELD_ADMIN_KEY") or _from_file(os.environ.get("AFIELD_ADMIN_KEY_FILE")),
            Path(os.environ.get("AFIELD_RUNS", "runs")),
            cache / "envs",
            cache / "template-profiles",
            state_directory() / "gateways",
            Path(key) if (key := os.environ.get("AFIELD_INVOCATION_KEY_FILE")) else None,
            os.environ.get("AFIELD_OUTCOMES", ""),
            os.environ.get("AFIELD_ACR_SECRET_KEY", ""),
            os.environ.get("AFIELD_RELAY_SECRET", ""),
        )


def _from_file(path: str | None) -> str | None:
    try:
        return read_private(Path(path)).decode().strip() if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"AFIELD_ADMIN_KEY_FILE {path} cannot be read: {error}") from error


def from_environment(prefix: str) -> dict[str, Any]:
    """Values of PREFIX_KEY and PREFIX_TABLE__KEY variables that are not empty, read as `assigned` does."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(f"{prefix}_") and value}
    keys = {name: name.removeprefix(f"{prefix}_").lower().replace("__", ".") for name in variables}
    return assigned([f"{keys[name]}={value}" for name, value in variables.items()])


def agent_environment() -> dict[str, str]:
    """The environment that agent processes inherit: this process's, without secrets."""
    return {key: value for key, value in os.environ.items() if key not in SECRETS}


def set_environment(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, for libraries that read nothing else."""
    os.environ.update(values)
