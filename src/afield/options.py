"""What each kind of place can be told: plain values, checked on construction, shared by all who need them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one session; None is no limit. `disk_mb` bounds what it may write, `files` its open files."""

    cpus: float | None = 1.0
    memory_mb: int | None = 1024
    pids: int | None = 256
    disk_mb: int | None = 512
    files: int | None = 1024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value} must be positive")


class SandboxOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents in sandboxes of this machine. `mounts` are paths they may read beside the system, the Python
    environment and their own folder; `allow` are HOST:PORT they may reach beside the gateway.
    """

    limits: Limits = Limits()
    mounts: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    without_bubblewrap: Literal["refuse", "process"] = "refuse"


class ContainerOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents in containers of a Docker or Podman engine. `socket` is its address (unix:///run/... or tcp://...);
    empty takes DOCKER_HOST's or the usual places. `mounts` are HOST:CONTAINER[:ro]. `network` is the engine's
    word (bridge, host, none, a name). `command` replaces the image's own.
    """

    image: str = ""
    socket: str = ""
    pull: Literal["missing", "always", "never"] = "missing"
    command: tuple[str, ...] = ()
    network: str = "host"
    mounts: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    port: int = 8080
    user: str = ""
    runtime: str = ""


class AgentCoreOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents on AWS Bedrock AgentCore. `arn` is a runtime that exists; or one named `agent_name` is created, or
    updated, from `container_uri` and `role_arn`. `endpoint_url` is a compatible server, such as `afield acr`.
    `rate` counts session starts, `stop_rate` stops, each per second; `sessions` those alive at once.
    """

    arn: str = ""
    agent_name: str = ""
    container_uri: str = ""
    role_arn: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    qualifier: str = "DEFAULT"
    region: str = ""
    endpoint_url: str = ""
    bucket: str = ""
    rate: float = 25.0
    stop_rate: float = 25.0
    cold_start_s: float = 10.0
    sessions: int = 1000
    idle_s: int = 900
    max_rollout_s: int = 3600  # the lifetime of a session
    ready_s: float = 600.0


class KubernetesOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as Jobs. `secret` names a Secret whose entries become environment variables, by reference."""

    image: str = ""
    namespace: str = "default"
    kubeconfig: str = ""
    context: str = ""
    command: tuple[str, ...] = ()
    service_account: str = ""
    runtime_class: str = ""  # e.g. gvisor
    secret: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    port: int = 8080
    ttl_s: int = 300
    deadline_s: int = 3600


class RayOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as tasks of a Ray cluster. `address` empty starts one on this machine."""

    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    memory_mb: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    log_dir: str = ""
