"""What afield takes from the environment, and what agents get of it; nothing else reads it."""

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

SECRET = ("AFIELD_ADMIN_KEY", "AFIELD_OUTCOMES", "AFIELD_ACR_SECRET_KEY")


class Environment(Struct, frozen=True):
    """What afield takes from the environment."""

    admin_key: str | None
    runs: Path
    envs: Path  # where foreign programs are installed
    template_profiles: Path  # cached profiles of chat templates
    secrets: Path  # signing secrets of gateways, one file for each store
    invocation_key: Path | None = None  # signs what goes to agents that others serve; None is the user's own
    outcomes: str = ""  # where a gateway's outcomes go; an address may hold a password, which argv would show
    acr_secret_key: str = ""  # what clients of `afield agentcore-local` sign with

    @classmethod
    def read(cls) -> Self:
        given = os.environ.get("XDG_CACHE_HOME")
        cache = (Path(given) if given else Path.home() / ".cache") / "afield"
        # Agents of the same user can read a process's first environment; we have it in memory from here on.
        hide_variables(SECRET)
        return cls(
            os.environ.get("AFIELD_ADMIN_KEY") or _from_file(os.environ.get("AFIELD_ADMIN_KEY_FILE")),
            Path(os.environ.get("AFIELD_RUNS", "runs")),
            cache / "envs",
            cache / "template-profiles",
            state_directory() / "gateways",
            Path(key) if (key := os.environ.get("AFIELD_INVOCATION_KEY_FILE")) else None,
            os.environ.get("AFIELD_OUTCOMES", ""),
            os.environ.get("AFIELD_ACR_SECRET_KEY", ""),
        )


def _from_file(path: str | None) -> str | None:
    try:
        return read_private(Path(path)).decode().strip() if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"AFIELD_ADMIN_KEY_FILE {path} cannot be read: {error}") from error


def from_environment(prefix: str) -> dict[str, Any]:
    """The values of PREFIX_KEY and PREFIX_TABLE__KEY, read as `assigned` reads them; an empty one is none."""
    given = {name: value for name, value in os.environ.items() if name.startswith(f"{prefix}_") and value}
    keys = {name: name.removeprefix(f"{prefix}_").lower().replace("__", ".") for name in given}
    return assigned([f"{keys[name]}={value}" for name, value in given.items()])


def agent_environment() -> dict[str, str]:
    """The environment an agent process inherits: ours without our secrets."""
    return {key: value for key, value in os.environ.items() if key not in SECRET}


def lend(values: Mapping[str, str]) -> None:
    """Into this process's environment, for libraries that look only there."""
    os.environ.update(values)
