"""Agent runtimes, their versions and endpoints: the state behind the control plane.

A version is CREATING or UPDATING until its program was found startable and the configured time has
passed, then READY or FAILED with a reason. DEFAULT follows the newest version that is ready; other
endpoints stay where they were pointed. A version that failed leaves what runs alone.
"""

from __future__ import annotations

import secrets
import string
from datetime import UTC, datetime
from typing import Literal

from afield.agentcore_local.errors import Problem, not_found
from afield.agentcore_local.images import Image
from afield.agentcore_local.requests import EndpointChange, EndpointWish, Settings

Status = Literal["CREATING", "CREATE_FAILED", "UPDATING", "UPDATE_FAILED", "READY", "DELETING"]
ALPHABET = string.ascii_letters + string.digits
DEFAULT = "DEFAULT"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made_up_id() -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(10))


class Version:
    def __init__(self, number: int, settings: Settings, image: Image) -> None:
        self.number, self.settings, self.image = str(number), settings, image
        self.status: Status = "CREATING" if number == 1 else "UPDATING"
        self.updated = now()
        self.failure = ""

    def settle(self, failure: str) -> None:
        self.failure, self.updated = failure, now()
        if not failure:
            self.status = "READY"
        else:
            self.status = "CREATE_FAILED" if self.number == "1" else "UPDATE_FAILED"


class Endpoint:
    def __init__(self, name: str, target: str, description: str | None) -> None:
        self.name, self.id = name, f"{name}-{made_up_id()}"
        self.live: str | None = None
        self.target, self.description = target, description
        self.tags: dict[str, str] = {}
        self.status: Status = "CREATING"
        self.created = self.updated = now()

    def point(self, version: str) -> None:
        self.live = self.target = version
        self.status, self.updated = "READY", now()


class Runtime:
    def __init__(self, name: str, arn_prefix: str, settings: Settings, image: Image) -> None:
        self.name, self.id = name, f"{name}-{made_up_id()}"
        self.arn = f"{arn_prefix}:runtime/{self.id}"
        self.created = now()
        self.deleting = False
        self.versions = {"1": Version(1, settings, image)}
        self.endpoints = {DEFAULT: Endpoint(DEFAULT, "1", None)}
        self.tags: dict[str, str] = {}

    @property
    def newest(self) -> Version:
        return self.versions[str(len(self.versions))]

    @property
    def status(self) -> Status:
        return "DELETING" if self.deleting else self.newest.status

    def check_settled(self) -> None:
        if self.status in ("CREATING", "UPDATING", "DELETING"):
            raise Problem("ConflictException", f"agent {self.id} is {self.status}; try again when it is not")

    def update(self, settings: Settings, image: Image) -> Version:
        self.check_settled()
        version = Version(len(self.versions) + 1, settings, image)
        self.versions[version.number] = version
        default = self.endpoints[DEFAULT]
        default.target = version.number
        default.status = "UPDATING" if default.live else "CREATING"
        return version

    def settle(self, version: Version, failure: str) -> None:
        version.settle(failure)
        default = self.endpoints[DEFAULT]
        if not failure:
            default.point(version.number)
        else:
            default.status = "UPDATE_FAILED" if default.live else "CREATE_FAILED"

    # --- versions and endpoints ------------------------------------------------------------------

    def version(self, number: str) -> Version:
        if number not in self.versions:
            raise not_found(f"version {number} of agent {self.id}")
        return self.versions[number]

    def endpoint(self, name: str) -> Endpoint:
        if name not in self.endpoints:
            raise not_found(f"endpoint {name} of agent {self.id}")
        return self.endpoints[name]

    def serving(self, qualifier: str) -> Version:
        """The version that answers at an endpoint."""
        endpoint = self.endpoints.get(qualifier)
        if endpoint is None or endpoint.live is None or self.deleting:
            message = f"No endpoint or agent found with qualifier '{qualifier}' for agent '{self.arn}'"
            raise Problem("ResourceNotFoundException", message)
        return self.versions[endpoint.live]

    def add_endpoint(self, wish: EndpointWish) -> Endpoint:
        if wish.name in self.endpoints:
            raise Problem("ConflictException", f"agent {self.id} has an endpoint {wish.name} already")
        version = self._ready(wish.agent_runtime_version or self.newest.number)
        endpoint = Endpoint(wish.name, version.number, wish.description)
        endpoint.tags.update(wish.tags)
        endpoint.point(endpoint.target)
        self.endpoints[wish.name] = endpoint
        return endpoint

    def point_endpoint(self, name: str, wish: EndpointChange) -> Endpoint:
        """It stays at its version where none is named."""
        endpoint = self.endpoint(name)
        if name == DEFAULT:
            raise Problem("ConflictException", "DEFAULT follows the newest version and cannot be pointed")
        endpoint.point(self._ready(wish.agent_runtime_version or endpoint.target).number)
        endpoint.description = wish.description or endpoint.description
        return endpoint

    def _ready(self, number: str) -> Version:
        version = self.version(number)
        if version.status != "READY":
            raise Problem("ConflictException", f"version {version.number} is {version.status}, not READY")
        return version

    def drop_endpoint(self, name: str) -> None:
        self.endpoint(name)
        if name == DEFAULT:
            raise Problem("ConflictException", "DEFAULT lives as long as its agent; delete the agent")
        del self.endpoints[name]

    # --- as the service shows them ---------------------------------------------------------------

    def summary(self, version: Version) -> dict[str, object]:
        return {
            "agentRuntimeArn": self.arn,
            "agentRuntimeId": self.id,
            "agentRuntimeVersion": version.number,
            "agentRuntimeName": self.name,
            "description": version.settings.description or "",
            "lastUpdatedAt": version.updated,
            "status": "DELETING" if self.deleting else version.status,
        }

    def endpoint_view(self, endpoint: Endpoint) -> dict[str, object]:
        shown: dict[str, object] = {
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
            shown["liveVersion"] = endpoint.live
        if endpoint.description:
            shown["description"] = endpoint.description
        return shown
