"""Control plane: agent runtimes, versions, endpoints and tags, kept in memory.

1. A version is CREATING or UPDATING until its program can be started and the configured time has passed, then
READY or failed with a reason. A failed version does not affect running ones.
2. DEFAULT follows the newest ready version; other endpoints stay at their version.
3. Repeating a create or update with its client token returns the same answer. Requests are validated before
they change anything.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from afield.agentcore_local.errors import ServiceError, invalid, not_found
from afield.agentcore_local.faults import FaultInjector
from afield.agentcore_local.hosts import HostError, ProgramHosts
from afield.agentcore_local.images import AgentImage, image_of
from afield.agentcore_local.requests import (
    CreateEndpointRequest,
    CreateRequest,
    RuntimeSettings,
    TagRequest,
    UpdateEndpointRequest,
    UpdateRequest,
    check,
    read,
)
from afield.agentcore_local.sessions import LocalSessions

Status = Literal["CREATING", "CREATE_FAILED", "UPDATING", "UPDATE_FAILED", "READY", "DELETING"]
ALPHABET = string.ascii_letters + string.digits
DEFAULT = "DEFAULT"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def random_id() -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(10))


class RuntimeVersion:
    """Version of an agent runtime."""

    def __init__(self, number: int, settings: RuntimeSettings, image: AgentImage) -> None:
        self.number, self.settings, self.image = str(number), settings, image
        self.status: Status = "CREATING" if number == 1 else "UPDATING"
        self.updated = now()
        self.failure = ""

    def finish(self, failure: str) -> None:
        """Set the final status: READY, or failed if `failure` is not empty."""
        self.failure, self.updated = failure, now()
        if not failure:
            self.status = "READY"
        else:
            self.status = "CREATE_FAILED" if self.number == "1" else "UPDATE_FAILED"


class RuntimeEndpoint:
    """Endpoint of an agent runtime: a name that serves one version."""

    def __init__(self, name: str, target: str, description: str | None) -> None:
        self.name, self.id = name, f"{name}-{random_id()}"
        self.live: str | None = None
        self.target, self.description = target, description
        self.tags: dict[str, str] = {}
        self.status: Status = "CREATING"
        self.created = self.updated = now()

    def point(self, version: str) -> None:
        self.live = self.target = version
        self.status, self.updated = "READY", now()


class LocalAgentRuntime:
    """Agent runtime with its versions and endpoints."""

    def __init__(self, name: str, arn_prefix: str, settings: RuntimeSettings, image: AgentImage) -> None:
        self.name, self.id = name, f"{name}-{random_id()}"
        self.arn = f"{arn_prefix}:runtime/{self.id}"
        self.created = now()
        self.deleting = False
        self.versions = {"1": RuntimeVersion(1, settings, image)}
        self.endpoints = {DEFAULT: RuntimeEndpoint(DEFAULT, "1", None)}
        self.tags: dict[str, str] = {}

    @property
    def newest(self) -> RuntimeVersion:
        return self.versions[str(len(self.versions))]

    @property
    def status(self) -> Status:
        return "DELETING" if self.deleting else self.newest.status

    def check_not_changing(self) -> None:
        """Raise the ConflictException while a create, update or delete is in progress."""
        if self.status in ("CREATING", "UPDATING", "DELETING"):
            raise ServiceError(
                "ConflictException", f"agent {self.id} is {self.status}; try again when it is not"
            )

    def update(self, settings: RuntimeSettings, image: AgentImage) -> RuntimeVersion:
        self.check_not_changing()
        version = RuntimeVersion(len(self.versions) + 1, settings, image)
        self.versions[version.number] = version
        default = self.endpoints[DEFAULT]
        default.target = version.number
        default.status = "UPDATING" if default.live else "CREATING"
        return version

    def finish(self, version: RuntimeVersion, failure: str) -> None:
        """Set the final status of a version, and point DEFAULT to it on success."""
        version.finish(failure)
        default = self.endpoints[DEFAULT]
        if not failure:
            default.point(version.number)
        else:
            default.status = "UPDATE_FAILED" if default.live else "CREATE_FAILED"

    # --- versions and endpoints ------------------------------------------------------------------

    def version(self, number: str) -> RuntimeVersion:
        if number not in self.versions:
            raise not_found(f"version {number} of agent {self.id}")
        return self.versions[number]

    def endpoint(self, name: str) -> RuntimeEndpoint:
        if name not in self.endpoints:
            raise not_found(f"endpoint {name} of agent {self.id}")
        return self.endpoints[name]

    def serving(self, qualifier: str) -> RuntimeVersion:
        """Version that an endpoint serves; raises the ResourceNotFoundException if there is none."""
        endpoint = self.endpoints.get(qualifier)
        if endpoint is None or endpoint.live is None or self.deleting:
            message = f"No endpoint or agent found with qualifier '{qualifier}' for agent '{self.arn}'"
            raise ServiceError("ResourceNotFoundException", message)
        return self.versions[endpoint.live]

    def add_endpoint(self, options: CreateEndpointRequest) -> RuntimeEndpoint:
        if options.name in self.endpoints:
            raise ServiceError("ConflictException", f"agent {self.id} has an endpoint {options.name} already")
        version = self._ready(options.agent_runtime_version or self.newest.number)
        endpoint = RuntimeEndpoint(options.name, version.number, options.description)
        endpoint.tags.update(options.tags)
        endpoint.point(endpoint.target)
        self.endpoints[options.name] = endpoint
        return endpoint

    def point_endpoint(self, name: str, options: UpdateEndpointRequest) -> RuntimeEndpoint:
        """Point an endpoint to a version; without one it keeps its version."""
        endpoint = self.endpoint(name)
        if name == DEFAULT:
            raise ServiceError(
                "ConflictException", "endpoint DEFAULT always has the newest version; update another"
            )
        endpoint.point(self._ready(options.agent_runtime_version or endpoint.target).number)
        endpoint.description = options.description or endpoint.description
        return endpoint

    def _ready(self, number: str) -> RuntimeVersion:
        version = self.version(number)
        if version.status != "READY":
            raise ServiceError(
                "ConflictException", f"version {version.number} is {version.status}, not READY"
            )
        return version

    def drop_endpoint(self, name: str) -> None:
        self.endpoint(name)
        if name == DEFAULT:
            raise ServiceError("ConflictException", "DEFAULT lives as long as its agent; delete the agent")
        del self.endpoints[name]

    # --- API representations ---------------------------------------------------------------------

    def summary(self, version: RuntimeVersion) -> dict[str, object]:
        return {
            "agentRuntimeArn": self.arn,
            "agentRuntimeId": self.id,
            "agentRuntimeVersion": version.number,
            "agentRuntimeName": self.name,
            "description": version.settings.description or "",
            "lastUpdatedAt": version.updated,
            "status": "DELETING" if self.deleting else version.status,
        }

    def endpoint_view(self, endpoint: RuntimeEndpoint) -> dict[str, object]:
        view: dict[str, object] = {
            "name": endpoint.name,
            "id": endpoint.id,
            "targetVersion": endpoint.target,
            "agentRuntimeEndpointArn": f"{self.arn}/runtime-endpoint/{endpoint.name}",
            "agentRuntimeArn": self.arn,
            "status": endpoint.status,
            "createdAt": endpoint.created,
            "lastUpdatedAt": endpoint.updated,
        }
        if endpoint.live:
            view["liveVersion"] = endpoint.live
        if endpoint.description:
            view["description"] = endpoint.description
        return view


PAGE = 100
MOST_TAGS = 50
Reply = tuple[int, dict[str, Any]]


class Account(Struct, frozen=True, kw_only=True):
    """AWS account of the server."""

    region: str = "us-west-2"
    """Region in ARNs."""
    account: str = "123456789012"
    """Account id in ARNs."""
    ready_s: float = 0.0
    """Time until a created or updated runtime is ready, in seconds."""
    code_root: Path | None = None
    """Folder that stands for code in S3; None rejects code configurations."""

    def __post_init__(self) -> None:
        if not 0 <= self.ready_s < math.inf:
            raise ValueError(f"ready_s = {self.ready_s:g} must be finite and at least 0")
        if not re.match(r"^[0-9]{12}$", self.account):
            raise ValueError(f"account {self.account!r} must have 12 digits")
        if not re.match(r"^[a-z0-9-]+$", self.region):
            raise ValueError(f"region {self.region!r} must be like us-west-2")

    @property
    def arn(self) -> str:
        return f"arn:aws:bedrock-agentcore:{self.region}:{self.account}"


class ControlPlane:
    """Operations on agent runtimes, endpoints and tags."""

    def __init__(
        self,
        account: Account,
        images: Mapping[str, AgentImage],
        hosts: ProgramHosts,
        sessions: LocalSessions,
        faults: FaultInjector,
    ) -> None:
        self._account, self._images, self._hosts = account, images, hosts
        self._sessions, self._faults = sessions, faults
        self._runtimes: dict[str, LocalAgentRuntime] = {}
        self._tokens: dict[tuple[str, str], tuple[Any, Reply]] = {}
        self._work: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    def find(self, name: str) -> LocalAgentRuntime:
        """Find an agent runtime by ARN or id."""
        runtime = self._runtimes.get(name.rpartition("/")[2])
        if runtime is None or (name.startswith("arn:") and name != runtime.arn):
            raise not_found(f"agent runtime {name}")
        return runtime

    # --- agent runtimes --------------------------------------------------------------------------

    def create(self, body: bytes) -> Reply:
        options = read(body, CreateRequest)
        check(options, body)
        return self._once("create", options.client_token, body, lambda: self._create(options))

    def _create(self, options: CreateRequest) -> Reply:
        if any(runtime.name == options.agent_runtime_name for runtime in self._runtimes.values()):
            raise ServiceError(
                "ConflictException", f"an agent named {options.agent_runtime_name} exists already"
            )
        image = image_of(options.agent_runtime_artifact, self._images, self._account.code_root)
        runtime = LocalAgentRuntime(options.agent_runtime_name, self._account.arn, options, image)
        runtime.tags.update(options.tags)
        self._runtimes[runtime.id] = runtime
        self._later(self._make_ready(runtime, runtime.newest))
        return 202, self._creation_response(runtime)

    def _once(self, what: str, token: str | None, body: bytes, do: Callable[[], Reply]) -> Reply:
        parsed = msgspec.json.decode(body or b"{}")
        if (previous := self._tokens.get((what, token or ""))) is None:
            reply = do()
            if token:
                self._tokens[what, token] = parsed, reply
            return reply
        if previous[0] != parsed:
            message = "this client token came with another request before"
            raise ServiceError("ValidationException", message, reason="IdempotentParameterMismatchException")
        return previous[1]

    def update(self, runtime_id: str, body: bytes) -> Reply:
        runtime = self.find(runtime_id)
        options = read(body, UpdateRequest)
        check(options, body)
        return self._once(
            f"update {runtime.id}", options.client_token, body, lambda: self._update(runtime, options)
        )

    def _update(self, runtime: LocalAgentRuntime, options: UpdateRequest) -> Reply:
        image = image_of(options.agent_runtime_artifact, self._images, self._account.code_root)
        version = runtime.update(options, image)
        self._later(self._make_ready(runtime, version))
        return 202, {**self._creation_response(runtime), "lastUpdatedAt": version.updated}

    def get(self, runtime_id: str, version: str | None) -> Reply:
        runtime = self.find(runtime_id)
        selected = runtime.version(version) if version else runtime.newest
        settings = msgspec.to_builtins(selected.settings)
        hidden = ("agentRuntimeName", "clientToken", "tags")
        view = {name: value for name, value in settings.items() if name not in hidden}
        view |= runtime.summary(selected) | self._identity(runtime)
        view |= {
            "createdAt": runtime.created,
            "networkConfiguration": selected.settings.network_configuration,
        }
        view |= {"lifecycleConfiguration": selected.settings.lifecycle_configuration}
        if selected.failure:
            view["failureReason"] = selected.failure
        if not view["description"]:
            del view["description"]
        return 200, view

    def delete(self, runtime_id: str) -> Reply:
        runtime = self.find(runtime_id)
        if runtime.status in ("CREATING", "UPDATING"):
            runtime.check_not_changing()
        if not runtime.deleting:
            runtime.deleting = True
            self._sessions.stop_all(runtime.id)
            self._later(self._forget(runtime))
        return 202, {"status": "DELETING", "agentRuntimeId": runtime.id}

    def list(self, query: Mapping[str, str]) -> Reply:
        rows = [runtime.summary(runtime.newest) for runtime in self._runtimes.values()]
        return 200, _page("agentRuntimes", rows, query)

    def versions(self, runtime_id: str, query: Mapping[str, str]) -> Reply:
        runtime = self.find(runtime_id)
        rows = [runtime.summary(version) for version in reversed(runtime.versions.values())]
        return 200, _page("agentRuntimes", rows, query)

    def _creation_response(self, runtime: LocalAgentRuntime) -> dict[str, Any]:
        return {
            "agentRuntimeArn": runtime.arn,
            "agentRuntimeId": runtime.id,
            "agentRuntimeVersion": runtime.newest.number,
            "createdAt": runtime.created,
            "status": runtime.status,
            **self._identity(runtime),
        }

    def _identity(self, runtime: LocalAgentRuntime) -> dict[str, Any]:
        directory = "workload-identity-directory/default/workload-identity"
        return {
            "workloadIdentityDetails": {
                "workloadIdentityArn": f"{self._account.arn}:{directory}/{runtime.id}"
            }
        }

    async def _make_ready(self, runtime: LocalAgentRuntime, version: RuntimeVersion) -> None:
        await asyncio.sleep(self._account.ready_s)
        failure = "injected by --fault create" if self._faults.draw("create", runtime.name) else ""
        try:
            await self._hosts.prepare(version.image)
        except HostError as error:
            failure = str(error)
        runtime.finish(version, failure)

    async def _forget(self, runtime: LocalAgentRuntime) -> None:
        await asyncio.sleep(self._account.ready_s)
        self._runtimes.pop(runtime.id, None)
        of_it = [
            key for key, (_, reply) in self._tokens.items() if reply[1]["agentRuntimeArn"] == runtime.arn
        ]
        for key in of_it:
            del self._tokens[key]

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # --- endpoints -------------------------------------------------------------------------------

    def create_endpoint(self, runtime_id: str, body: bytes) -> Reply:
        runtime, options = self.find(runtime_id), read(body, CreateEndpointRequest)

        def make() -> Reply:
            endpoint = runtime.add_endpoint(options)
            more = {"agentRuntimeId": runtime.id, "endpointName": endpoint.name, "status": "CREATING"}
            return 202, {**runtime.endpoint_view(endpoint), **more}

        return self._once(f"endpoint of {runtime.id}", options.client_token, body, make)

    def update_endpoint(self, runtime_id: str, name: str, body: bytes) -> Reply:
        runtime = self.find(runtime_id)
        options = read(body, UpdateEndpointRequest)

        def point() -> Reply:
            endpoint = runtime.point_endpoint(name, options)
            return 202, {**runtime.endpoint_view(endpoint), "status": "UPDATING"}

        return self._once(f"endpoint {name} of {runtime.id}", options.client_token, body, point)

    def get_endpoint(self, runtime_id: str, name: str) -> Reply:
        runtime = self.find(runtime_id)
        return 200, runtime.endpoint_view(runtime.endpoint(name))

    def delete_endpoint(self, runtime_id: str, name: str) -> Reply:
        runtime = self.find(runtime_id)
        runtime.drop_endpoint(name)
        return 202, {"status": "DELETING", "agentRuntimeId": runtime.id, "endpointName": name}

    def list_endpoints(self, runtime_id: str, query: Mapping[str, str]) -> Reply:
        runtime = self.find(runtime_id)
        endpoints: Sequence[RuntimeEndpoint] = list(runtime.endpoints.values())
        return 200, _page("runtimeEndpoints", [runtime.endpoint_view(e) for e in endpoints], query)

    # --- tags ------------------------------------------------------------------------------------

    def tags(self, arn: str) -> Reply:
        return 200, {"tags": self._tagged(arn)}

    def tag(self, arn: str, body: bytes) -> Reply:
        tags, more = self._tagged(arn), read(body, TagRequest).tags
        if len(tags | more) > MOST_TAGS:
            raise ServiceError(
                "ServiceQuotaExceededException", f"{arn} would have more than {MOST_TAGS} tags"
            )
        tags.update(more)
        return 204, {}

    def untag(self, arn: str, names: Sequence[str]) -> Reply:
        tags = self._tagged(arn)
        for name in names:
            tags.pop(name, None)
        return 204, {}

    def _tagged(self, arn: str) -> dict[str, str]:
        """Tags of an agent runtime, or of one of its endpoints."""
        host, endpoint, name = arn.partition("/runtime-endpoint/")
        runtime = self.find(host)
        return runtime.endpoint(name).tags if endpoint else runtime.tags


def _page(name: str, rows: Sequence[dict[str, object]], query: Mapping[str, str]) -> dict[str, Any]:
    try:
        size, start = int(query.get("maxResults", PAGE)), int(query.get("nextToken", 0))
    except ValueError as error:
        raise invalid("nextToken", str(error)) from error
    if start < 0:
        raise invalid("nextToken", f"{start} is not a token that this server returned")
    if not 1 <= size <= PAGE:
        raise invalid("maxResults", f"{size} must be from 1 to {PAGE}")
    page: dict[str, Any] = {name: rows[start : start + size]}
    if start + size < len(rows):
        page["nextToken"] = str(start + size)
    return page
