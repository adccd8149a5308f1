"""Environment variables that afield reads, and those that agents inherit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from afield.errors import UsageError
from afield.settings.fields import is_table, settings_of
from afield.settings.values import SettingsLayer, merged, parsed, with_paths
from afield.utils.private_files import read_private, state_directory
from afield.utils.process_secrets import hide_variables

SECRETS = (
    "AFIELD_ADMIN_KEY",
    "AFIELD_ENDPOINT_KEY",
    "AFIELD_OUTCOMES",
    "AFIELD_ACR_SECRET_KEY",
    "AFIELD_RELAY_SECRET",
)
PROGRAMS = "AFIELD_PROGRAMS"
"""Variable that names the directory of a harness's programs."""


CAPTURE = ("true", "1", "span_only", "span_and_event")
"""Values of the variable that turns content in spans on."""


class Environment(Struct, frozen=True):
    """Values from environment variables, and directories that depend on them."""

    admin_key: str | None
    """Admin key of a gateway: AFIELD_ADMIN_KEY, or the content of AFIELD_ADMIN_KEY_FILE."""
    runs: Path
    """Directory of runs: AFIELD_RUNS; `runs` if it is unset or empty."""
    envs: Path
    """Directory in which third-party programs are installed."""
    environments: Path
    """Cache of built environments of Harbor tasks."""
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
    """Secret that a relay shares with the gateways of a cluster: AFIELD_RELAY_SECRET."""
    endpoint_key: str = ""
    """API key that agents send to the endpoint of `afield eval --endpoint`: AFIELD_ENDPOINT_KEY."""

    otel_endpoint: str = ""
    """Address of an OTLP collector: OTEL_EXPORTER_OTLP_ENDPOINT or its variant for traces; empty if unset."""
    otel_content: bool = False
    """Whether traces hold prompts and replies: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT."""

    @classmethod
    def read(cls) -> Self:
        """Read the environment, and hide its secrets from other processes of the user."""
        cache = cache_directory()
        # Agents of the same user can read a process's first environment.
        hide_variables(SECRETS)
        return cls(
            os.environ.get("AFIELD_ADMIN_KEY") or _from_file(os.environ.get("AFIELD_ADMIN_KEY_FILE")),
            Path(os.environ.get("AFIELD_RUNS") or "runs"),
            cache / "envs",
            cache / "environments",
            cache / "template-profiles",
            state_directory() / "gateways",
            Path(key) if (key := os.environ.get("AFIELD_INVOCATION_KEY_FILE")) else None,
            os.environ.get("AFIELD_OUTCOMES", ""),
            os.environ.get("AFIELD_ACR_SECRET_KEY", ""),
            os.environ.get("AFIELD_RELAY_SECRET", ""),
            os.environ.get("AFIELD_ENDPOINT_KEY", ""),
            _otel_endpoint(),
            os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower() in CAPTURE,
        )


def _otel_endpoint() -> str:
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or os.environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return ""
    traces = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    return traces or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")


def cache_directory() -> Path:
    """Directory of afield's caches: below XDG_CACHE_HOME, or ~/.cache."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "afield"


def _from_file(path: str | None) -> str | None:
    try:
        return read_private(Path(path)).decode().strip() if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"AFIELD_ADMIN_KEY_FILE {path} cannot be read: {error}") from error


KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)$")
"""Variables that Kubernetes sets for a service, such as one named afield-gateway."""


def environment_layer(prefix: str, struct: type[Struct]) -> SettingsLayer:
    """Values of the variables PREFIX_KEY and PREFIX_TABLE__KEY that are not empty."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, text in os.environ.items():
        if not name.startswith(f"{prefix}_") or not text or name in SECRETS or _from_kubernetes(name, text):
            continue
        parts = name.removeprefix(f"{prefix}_").lower().split("__")
        value = parsed(text, _kind(struct, parts), name)
        for part in reversed(parts):
            value = {part: value}
        values = merged(values, value)
        names[".".join(parts)] = name
    return SettingsLayer(with_paths(values, struct, Path()), lambda key: _variable(key, names, prefix))


def _from_kubernetes(name: str, text: str) -> bool:
    return KUBERNETES.search(name) is not None or ("://" in text and name.endswith("_PORT"))


def _variable(key: str, names: Mapping[str, str], prefix: str) -> str:
    """Variable of a key, of the table it is in, or of a key in its table."""
    for setting, name in names.items():
        if key == setting or key.startswith((f"{setting}.", f"{setting}[")) or setting.startswith(f"{key}."):
            return name
    return f"{prefix}_{key.upper().replace('.', '__')}"


def _kind(struct: type[Struct], parts: Sequence[str]) -> Any:
    """Type of a setting; object for a key of a table with the user's own names, and for unknown ones."""
    kind: Any = struct
    for part in parts:
        settings = {setting.name: setting.plain for setting in settings_of(kind)} if is_table(kind) else {}
        kind = settings.get(part, object)
    return kind


def agent_environment() -> dict[str, str]:
    """The environment that agent processes inherit: this process's, without secrets."""
    return {key: value for key, value in os.environ.items() if key not in SECRETS}


def visible_devices() -> list[str] | None:
    """GPUs named by CUDA_VISIBLE_DEVICES; None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part for part in value.split(",") if part.strip() not in ("", "-1")]


def relay_environment() -> dict[str, str]:
    """The cluster's secret at a relay, for a gateway process."""
    secret = os.environ.get("AFIELD_RELAY_SECRET")
    return {"AFIELD_RELAY_SECRET": secret} if secret else {}


def set_environment(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, for libraries that read nothing else."""
    os.environ.update(values)
