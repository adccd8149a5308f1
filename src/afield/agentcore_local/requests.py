"""What the control plane takes, checked against the service's own model before anything happens.

A field that the service knows and this server does not model is refused by name: taking it and doing
nothing would look like a feature that works.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from afield.agentcore_local.errors import ServiceError, invalid
from afield.wire import json_problem

T = TypeVar("T")
# The quotas page of the service; its wire model allows more, on compute that is not modelled here.
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
    """Names as on the wire; fields that are not known are passed over, as the service does."""


class Container(ApiShape, frozen=True, kw_only=True):
    container_uri: Annotated[str, Meta(min_length=1, max_length=1024)]


class S3Location(ApiShape, frozen=True, kw_only=True):
    bucket: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")]
    prefix: Annotated[str, Meta(min_length=1, max_length=1024)]
    version_id: str | None = None


class Code(ApiShape, frozen=True, kw_only=True):
    s3: S3Location


class CodeConfiguration(ApiShape, frozen=True, kw_only=True):
    code: Code
    runtime: Literal["PYTHON_3_10", "PYTHON_3_11", "PYTHON_3_12", "PYTHON_3_13", "PYTHON_3_14", "NODE_22"]
    entry_point: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=128)]], Meta(min_length=1, max_length=2)
    ]


class Artifact(ApiShape, frozen=True, kw_only=True):
    container_configuration: Container | None = None
    code_configuration: CodeConfiguration | None = None


class Vpc(ApiShape, frozen=True, kw_only=True):
    security_groups: Annotated[
        list[Annotated[str, Meta(pattern=r"^sg-[0-9a-zA-Z]{8,17}$")]], Meta(min_length=1, max_length=16)
    ]
    subnets: Annotated[
        list[Annotated[str, Meta(pattern=r"^subnet-[0-9a-zA-Z]{8,17}$")]], Meta(min_length=1, max_length=16)
    ]


class Network(ApiShape, frozen=True, kw_only=True):
    network_mode: Literal["PUBLIC", "VPC"]
    network_mode_config: Vpc | None = None


class Protocol(ApiShape, frozen=True, kw_only=True):
    server_protocol: Literal["MCP", "HTTP", "A2A", "AGUI"]


class Lifecycle(ApiShape, frozen=True, kw_only=True, omit_defaults=False):
    idle_runtime_session_timeout: Seconds = 900
    max_lifetime: Seconds = LONGEST_S


class RequestHeaders(ApiShape, frozen=True, kw_only=True):
    request_header_allowlist: Annotated[
        list[Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,255}$")]],
        Meta(min_length=1, max_length=20),
    ]


class RuntimeSettings(ApiShape, frozen=True, kw_only=True):
    """What one version of an agent runtime is made of."""

    agent_runtime_artifact: Artifact
    role_arn: Annotated[str, Meta(max_length=2048, pattern=r"^arn:aws(-[^:]+)?:iam::([0-9]{12})?:role/.+$")]
    network_configuration: Network = Network(network_mode="PUBLIC")
    description: Description | None = None
    protocol_configuration: Protocol | None = None
    lifecycle_configuration: Lifecycle = Lifecycle()
    request_header_configuration: RequestHeaders | None = None
    environment_variables: Annotated[
        dict[
            Annotated[str, Meta(max_length=100, pattern=r"^[^=\0]+$")],
            Annotated[str, Meta(max_length=5000, pattern=NO_NUL)],
        ],
        Meta(max_length=50),
    ] = {}


class CreateRequest(RuntimeSettings, frozen=True, kw_only=True):
    agent_runtime_name: Name
    client_token: Token | None = None
    tags: Tags = {}


class UpdateRequest(RuntimeSettings, frozen=True, kw_only=True):
    client_token: Token | None = None


class UpdateEndpointRequest(ApiShape, frozen=True, kw_only=True):
    agent_runtime_version: VersionName | None = None
    description: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    client_token: Token | None = None


class CreateEndpointRequest(UpdateEndpointRequest, frozen=True, kw_only=True):
    name: Name
    tags: Tags = {}


class TagRequest(ApiShape, frozen=True, kw_only=True):
    tags: Tags


class CommandRequest(ApiShape, frozen=True, kw_only=True):
    command: Annotated[str, Meta(min_length=1, max_length=65_536, pattern=NO_NUL)]
    timeout: Annotated[int, Meta(ge=1, le=3600)] = 300


def read(body: bytes, into: type[T]) -> T:
    """Raises the ValidationException that names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=into)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        missing = MISSING.match(message)
        # A key's own path is said as "`key` in `$.host`".
        path = path.rpartition("$")[2].strip("`") + (f".{missing[1]}" if missing else "")
        name, message = path.lstrip(".") or "request", "is required" if missing else message
        raise invalid(name, message) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceError(
            "ValidationException", f"the body is not JSON: {json_problem(body, error)}", reason="CannotParse"
        ) from error


def check(settings: RuntimeSettings, body: bytes) -> None:
    """What one field alone cannot tell."""
    artifact, network = settings.agent_runtime_artifact, settings.network_configuration
    if (artifact.container_configuration is None) == (artifact.code_configuration is None):
        raise invalid(
            "agentRuntimeArtifact", "give containerConfiguration or codeConfiguration, and one only"
        )
    if (network.network_mode == "VPC") != (network.network_mode_config is not None):
        raise invalid("networkConfiguration.networkModeConfig", "goes with networkMode VPC, and only with it")
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


def _check_modelled(given: dict[str, Any]) -> None:
    for name, what in UNMODELLED.items():
        if given.get(name):
            raise invalid(name, f"this local server does not model {what}; leave it out")
