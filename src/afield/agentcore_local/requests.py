"""Request bodies of the control plane, validated against the service's model.

A field that the service supports and this server does not model is rejected by name, because accepting it
would look like a working feature.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from afield.agentcore_local.errors import ServiceError, invalid
from afield.wire import json_problem

T = TypeVar("T")
# From the service's quotas page; its wire model allows more, for compute types that are not modelled here.
SHORTEST_S, LONGEST_S = 60, 28_800
NO_NUL = r"^[^\0]*$"
MISSING = re.compile(r"^Object missing required field `(\w+)`$")
NAME = r"^[a-zA-Z][a-zA-Z0-9_]{0,47}$"
ECR = re.compile(
    r"^(([0-9]{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?|public\.ecr\.aws)"
    r"/((?:[a-z0-9]+(?:[._-][a-z0-9]+)*/)*[a-z0-9]+(?:[._-][a-z0-9]+)*)(?::([^:@]{1,300}))?(?:@(.+))?$"
)
UNMODELLED = {
    "authorizerConfiguration": "JWT authorizers",
    "hooksConfiguration": "lifecycle hooks",
    "filesystemConfigurations": "file systems",
    "capacityProviderConfiguration": "capacity providers",
    "allowedPorts": "session URLs",
    "platformVersion": "platform versions",
    "metadataConfiguration": "the metadata service",
    "resourceConfigurations": "memory sizes",
}

Name = Annotated[str, Meta(pattern=NAME)]
Token = Annotated[str, Meta(min_length=33, max_length=256)]
Description = Annotated[str, Meta(min_length=1, max_length=4096)]
VersionName = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,4}$")]
Seconds = Annotated[int, Meta(ge=SHORTEST_S, le=LONGEST_S)]
Tags = Annotated[
    dict[Annotated[str, Meta(min_length=1, max_length=128)], Annotated[str, Meta(max_length=256)]],
    Meta(max_length=50),
]


class ApiShape(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of request bodies, with camelCase names on the wire.

    Unknown fields are ignored, as in the service.
    """


class Container(ApiShape, frozen=True, kw_only=True):
    """Container image of an agent runtime."""

    container_uri: Annotated[str, Meta(min_length=1, max_length=1024)]
    """URI of the image in ECR, or the name of an image of this server."""


class S3Location(ApiShape, frozen=True, kw_only=True):
    """Object in S3."""

    bucket: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    """Name of the bucket."""
    prefix: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Key of the object."""
    version_id: str | None = None
    """Version of the object; None for the latest."""


class Code(ApiShape, frozen=True, kw_only=True):
    """Location of an agent's code."""

    s3: S3Location
    """Object with the code archive."""


class CodeConfiguration(ApiShape, frozen=True, kw_only=True):
    """Code and interpreter of an agent runtime without a container image."""

    code: Code
    """Location of the code."""
    runtime: Literal["PYTHON_3_10", "PYTHON_3_11", "PYTHON_3_12", "PYTHON_3_13", "PYTHON_3_14", "NODE_22"]
    """Language version that runs the code."""
    entry_point: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(min_length=1, max_length=2)
    ]
    """File to run, optionally preceded by a wrapper program."""


class Artifact(ApiShape, frozen=True, kw_only=True):
    """Program of an agent runtime: exactly one of container and code."""

    container_configuration: Container | None = None
    """Container image; None for code."""
    code_configuration: CodeConfiguration | None = None
    """Code and interpreter; None for a container."""


class Vpc(ApiShape, frozen=True, kw_only=True):
    """VPC settings; validated, otherwise without effect."""

    security_groups: Annotated[
        list[Annotated[str, Meta(pattern=r"^sg-[0-9a-zA-Z]{8,17}$")]], Meta(min_length=1, max_length=16)
    ]
    """Ids of security groups."""
    subnets: Annotated[
        list[Annotated[str, Meta(pattern=r"^subnet-[0-9a-zA-Z]{8,17}$")]], Meta(min_length=1, max_length=16)
    ]
    """Ids of subnets."""


class Network(ApiShape, frozen=True, kw_only=True):
    """Network settings of an agent runtime."""

    network_mode: Literal["PUBLIC", "VPC"]
    """Type of network."""
    network_mode_config: Vpc | None = None
    """VPC settings; None unless the mode is VPC."""


class Protocol(ApiShape, frozen=True, kw_only=True):
    """Protocol settings of an agent runtime."""

    server_protocol: Literal["MCP", "HTTP", "A2A", "AGUI"]
    """Protocol that the program serves; MCP and A2A are rejected as not modelled."""


class Lifecycle(ApiShape, frozen=True, kw_only=True, omit_defaults=False):
    """Lifetime limits of sessions."""

    idle_runtime_session_timeout: Seconds = 900
    """Idle time after which a session ends, in seconds."""
    max_lifetime: Seconds = LONGEST_S
    """Maximum age of a session, in seconds."""


class RequestHeaders(ApiShape, frozen=True, kw_only=True):
    """Client headers that reach the program."""

    request_header_allowlist: Annotated[
        list[Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,255}$")]],
        Meta(min_length=1, max_length=20),
    ]
    """Names of the headers."""


class RuntimeSettings(ApiShape, frozen=True, kw_only=True):
    """Settings of one version of an agent runtime."""

    agent_runtime_artifact: Artifact
    """Program to run."""
    role_arn: Annotated[str, Meta(max_length=2048, pattern=r"^arn:aws(-[^:]+)?:iam::([0-9]{12})?:role/.+$")]
    """ARN of the IAM role; validated, otherwise without effect."""
    network_configuration: Network = Network(network_mode="PUBLIC")
    """Network settings; public by default."""
    description: Description | None = None
    """Description; None for an empty one."""
    protocol_configuration: Protocol | None = None
    """Protocol settings; None means HTTP."""
    lifecycle_configuration: Lifecycle = Lifecycle()
    """Lifetime limits of sessions."""
    request_header_configuration: RequestHeaders | None = None
    """Client headers that reach the program; None for the standard ones only."""
    environment_variables: Annotated[
        dict[
            Annotated[str, Meta(max_length=100, pattern=r"^[^=\0]+$")],
            Annotated[str, Meta(max_length=5000, pattern=NO_NUL)],
        ],
        Meta(max_length=50),
    ] = {}
    """Environment variables of the program."""


class CreateRequest(RuntimeSettings, frozen=True, kw_only=True):
    """Body of CreateAgentRuntime."""

    agent_runtime_name: Name
    """Name of the agent runtime, unique in the account."""
    client_token: Token | None = None
    """Idempotency token; None for none."""
    tags: Tags = {}
    """Tags of the agent runtime."""


class UpdateRequest(RuntimeSettings, frozen=True, kw_only=True):
    """Body of UpdateAgentRuntime."""

    client_token: Token | None = None
    """Idempotency token; None for none."""


class UpdateEndpointRequest(ApiShape, frozen=True, kw_only=True):
    """Body of UpdateAgentRuntimeEndpoint."""

    agent_runtime_version: VersionName | None = None
    """Version to serve; None keeps the current one, or takes the newest for a new endpoint."""
    description: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """New description; None keeps the current one."""
    client_token: Token | None = None
    """Idempotency token; None for none."""


class CreateEndpointRequest(UpdateEndpointRequest, frozen=True, kw_only=True):
    """Body of CreateAgentRuntimeEndpoint."""

    name: Name
    """Name of the endpoint."""
    tags: Tags = {}
    """Tags of the endpoint."""


class TagRequest(ApiShape, frozen=True, kw_only=True):
    """Body of TagResource."""

    tags: Tags
    """Tags to add or replace."""


class CommandRequest(ApiShape, frozen=True, kw_only=True):
    """Body of InvokeAgentRuntimeCommand."""

    command: Annotated[str, Meta(min_length=1, max_length=65_536, pattern=NO_NUL)]
    """Shell command."""
    timeout: Annotated[int, Meta(ge=1, le=3600)] = 300
    """Time limit in seconds."""


def read(body: bytes, into: type[T]) -> T:
    """Decode a request body; raises the ValidationException that names the invalid field."""
    try:
        return msgspec.json.decode(body or b"{}", type=into)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        missing = MISSING.match(message)
        # msgspec reports the path of an invalid key as "`key` in `$.host`".
        path = path.rpartition("$")[2].strip("`") + (f".{missing[1]}" if missing else "")
        name, message = path.lstrip(".") or "request", "is required" if missing else message
        raise invalid(name, message) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceError(
            "ValidationException", f"the body is not JSON: {json_problem(body, error)}", reason="CannotParse"
        ) from error


def check(settings: RuntimeSettings, body: bytes) -> None:
    """Validate across fields; raises the ValidationException that names the invalid field."""
    artifact, network = settings.agent_runtime_artifact, settings.network_configuration
    if (artifact.container_configuration is None) == (artifact.code_configuration is None):
        raise invalid(
            "agentRuntimeArtifact", "give containerConfiguration or codeConfiguration, and one only"
        )
    if (network.network_mode == "VPC") != (network.network_mode_config is not None):
        problem = "is required" if network.network_mode_config is None else "is not allowed"
        raise invalid(
            "networkConfiguration.networkModeConfig", f"{problem} with networkMode {network.network_mode}"
        )
    lifecycle = settings.lifecycle_configuration
    if lifecycle.idle_runtime_session_timeout > lifecycle.max_lifetime:
        raise invalid(
            "lifecycleConfiguration.idleRuntimeSessionTimeout",
            f"{lifecycle.idle_runtime_session_timeout} is more than maxLifetime {lifecycle.max_lifetime}",
        )
    protocol = settings.protocol_configuration
    if protocol and protocol.server_protocol in ("MCP", "A2A"):
        raise invalid(
            "protocolConfiguration.serverProtocol",
            f"this local server does not model {protocol.server_protocol}; use HTTP",
        )
    _check_modelled(msgspec.json.decode(body))


def _check_modelled(fields: dict[str, Any]) -> None:
    for name, what in UNMODELLED.items():
        if fields.get(name):
            raise invalid(name, f"this local server does not model {what}; leave it out")
