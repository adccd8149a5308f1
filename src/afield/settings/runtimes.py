"""Options of each runtime: sandbox, container, AgentCore, Kubernetes, Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field

from afield.settings.fields import (
    Bound,
    Count,
    CountOrZero,
    Metavar,
    NotNegative,
    Port,
    Positive,
    SettingsGroup,
)

Amount = Annotated[int, Bound(above=0)]


class ResourceLimits(SettingsGroup, frozen=True, kw_only=True):
    """Resource limits of one session; None is no limit."""

    cpus: Positive | None = 1.0
    """CPU cores."""
    memory_mb: Amount | None = 1024
    """Memory in MiB."""
    pids: Amount | None = 256
    """Processes and threads."""
    disk_mb: Amount | None = 512
    """MiB that the session may write. In a container the image becomes read-only and only /tmp, in memory,
    can be written."""
    files: Amount | None = 1024
    """Open files."""


def _check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"env: {name!r} is not a variable name: it must not be empty or contain '='")
        if "\0" in value:
            raise ValueError(f"env: the value of {name} has a NUL character, which no system takes")


class SandboxOptions(SettingsGroup, frozen=True, kw_only=True):
    """Agents in bubblewrap sandboxes on this machine."""

    title: ClassVar[str] = "Runtime sandbox"

    limits: ResourceLimits = ResourceLimits()
    """Resource limits of one session."""
    mounts: tuple[str, ...] = ()
    """Paths that agents may read, in addition to the system, the Python environment and their own folder."""
    allow: tuple[str, ...] = ()
    """HOST:PORT addresses that agents may reach, in addition to the gateway."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of agents."""
    without_bubblewrap: Literal["refuse", "process"] = "refuse"
    """Fallback where bubblewrap is not installed. `process` runs agents in plain processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_env(self.env)


class ContainerOptions(SettingsGroup, frozen=True, kw_only=True):
    """Agents in containers of a Docker or Podman engine."""

    title: ClassVar[str] = "Runtime container"

    image: Annotated[str, Metavar("IMAGE")] = ""
    """Image of the agent. Needed, here or as --runtime container=IMAGE, unless all rows name one."""
    image_key: Annotated[str, Metavar("COLUMN")] = ""
    """Column of task rows with the image of each task; rows without it use `image`."""
    socket: str = ""
    """Address of Docker or Podman, unix:// or tcp://; if empty, DOCKER_HOST or else the usual sockets."""
    pull: Literal["missing", "always", "never"] = "missing"
    """When to pull the image."""
    command: tuple[str, ...] = ()
    """Command that replaces the image's own."""
    network: str = "bridge"
    """Docker or Podman network that containers of agents join."""
    host: str = ""
    """Name of this machine inside containers; if empty, afield detects it."""
    mounts: tuple[str, ...] = ()
    """Bind mounts as HOST:CONTAINER or HOST:CONTAINER:ro."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of agents."""
    # Images made for other platforms write beside their code, and the engine bounds open files.
    limits: ResourceLimits = ResourceLimits(disk_mb=None, files=None)
    """Resource limits of one session."""
    port: Port = 8080
    """Port that the agent listens on."""
    user: str = ""
    """User inside the container; if empty, the image's user."""
    runtime: str = ""
    """OCI runtime, such as runsc; if empty, the default of Docker or Podman."""
    init: bool = True
    """Run an init process that reaps zombies."""
    keep: tuple[str, ...] = ()
    """Linux capabilities that are not dropped, such as CHOWN."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_env(self.env)
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:]*:/[^:]+(:ro)?", mount):
                raise ValueError(f"mount {mount!r} must be /HOST:/CONTAINER or /HOST:/CONTAINER:ro")


class AgentCoreOptions(SettingsGroup, frozen=True, kw_only=True):
    """Agents on AWS Bedrock AgentCore Runtime, or on `afield agentcore-local`."""

    title: ClassVar[str] = "Runtime agentcore"

    arn: str = ""
    """ARN of an existing agent runtime."""
    image_key: Annotated[str, Metavar("COLUMN")] = ""
    """Column of task rows with the image of each task; `arns` maps the image to its agent runtime."""
    arns: Mapping[str, str] = field(default_factory=dict)
    """ARN of an existing agent runtime for each image that rows name."""
    agent_name: str = ""
    """Name of an agent runtime to create or update, instead of `arn`."""
    container_uri: str = ""
    """Image URI of the AgentCore agent runtime that afield creates."""
    role_arn: str = ""
    """Execution role of the AgentCore agent runtime that afield creates."""
    subnets: tuple[str, ...] = ()
    """VPC subnets of the AgentCore agent runtime that afield creates."""
    security_groups: tuple[str, ...] = ()
    """VPC security groups of the AgentCore agent runtime that afield creates."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the AgentCore agent runtime that afield creates."""
    qualifier: str = "DEFAULT"
    """Endpoint qualifier of the agent runtime."""
    region: str = ""
    """AWS region; if empty, the region of the AWS configuration."""
    endpoint_url: str = ""
    """Address of a compatible server, such as `afield agentcore-local`."""
    bucket: str = ""
    """S3 bucket for outcomes of agents; if the transport is `files`, afield uses `s3://BUCKET` instead."""
    rate: Positive = 25.0
    """Largest number of session starts per second."""
    stop_rate: Positive = 25.0
    """Largest number of session stops per second."""
    cold_start_s: NotNegative = 10.0
    """Seconds that a session takes to start."""
    sessions: Annotated[int, Bound(above=0)] = 1000
    """Largest number of concurrent sessions."""
    idle_s: int = 900
    """Seconds after which AgentCore ends an idle session."""
    max_rollout_s: int = 3600
    """Seconds after which AgentCore ends any session."""
    ready_s: Positive = 600.0
    """Seconds to wait for a created agent runtime to become ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_env(self.env)


class KubernetesOptions(SettingsGroup, frozen=True, kw_only=True):
    """Agents as Jobs of a Kubernetes cluster."""

    title: ClassVar[str] = "Runtime kubernetes"

    image: Annotated[str, Metavar("IMAGE")] = ""
    """Image of the agent. Needed, here or as --runtime kubernetes=IMAGE, unless all rows name one."""
    image_key: Annotated[str, Metavar("COLUMN")] = ""
    """Column of task rows with the image of each task; rows without it use `image`."""
    namespace: str = "default"
    """Namespace of the Jobs."""
    kubeconfig: str = ""
    """Kubeconfig file; if empty, the default one, or the service account inside a cluster."""
    context: str = ""
    """Context of the kubeconfig; if empty, the current one."""
    command: tuple[str, ...] = ()
    """Command that replaces the image's own."""
    service_account: str = ""
    """Service account of the pods."""
    runtime_class: str = ""
    """RuntimeClass of the pods, such as gvisor."""
    secret: str = ""
    """Secret whose entries become environment variables, by reference."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of agents."""
    limits: ResourceLimits = ResourceLimits()
    """Resource limits of one session; `pids` and `files` are the nodes' own."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Node labels that pods require."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of Jobs and pods."""
    pull: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """Image pull policy."""
    pull_secret: str = ""
    """Secret with the credentials of the image's registry."""
    non_root: bool = False
    """Require the image to run as a user other than root."""
    port: Count = 8080
    """Port that the agent listens on."""
    ttl_s: CountOrZero = 300
    """Seconds after which Kubernetes removes a finished Job."""
    job_deadline_s: Count = 3600
    """Seconds after which Kubernetes ends a Job."""
    unschedulable_s: NotNegative = 60.0
    """Seconds after which a pod without a node fails. Raise it where nodes are added on demand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_env(self.env)


class RayOptions(SettingsGroup, frozen=True, kw_only=True):
    """A Ray cluster, for agents and for gateways."""

    title: ClassVar[str] = "Runtime ray"

    address: str = ""
    """Address of the cluster; if empty, afield starts one on this machine."""
    cpus: float = 1.0
    """CPUs of one agent."""
    gpus: float = 0.0
    """GPUs of one agent."""
    memory_mb: int | None = None
    """Memory of one agent in MiB, for scheduling."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom Ray resources of one agent."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray runtime environment of agents."""
    log_dir: str = ""
    """Directory of agent logs on the nodes; if empty, Ray's."""
    gateway_cpus: NotNegative = 0.0
    """CPUs that each gateway reserves, with `on = "ray"`."""
    gateway_gpus: NotNegative = 0.0
    """GPUs that each gateway reserves for its embedded engine, with `on = "ray"`."""
