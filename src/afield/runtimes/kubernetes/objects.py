"""What of a cluster's objects is read here: Jobs, their pods, lists, watch events and refusals.

Only the fields that decide something; the rest of what a cluster says is skipped unread. `name_of` and
`label_of` say under which name and label a session is found, from any process.
"""

from __future__ import annotations

import re
from datetime import datetime
from hashlib import sha256
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

RUN = "afield.run"
SESSION = "afield.session"
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
READABLE = 30


class Meta(Struct, frozen=True, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Condition(Struct, frozen=True, rename="camel"):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""

    @property
    def holds(self) -> bool:
        return self.status == "True"


class JobStatus(Struct, frozen=True, rename="camel"):
    conditions: list[Condition] = []
    start_time: datetime | None = None
    ready: int | None = None


class Job(Struct, frozen=True, rename="camel"):
    metadata: Meta = Meta()
    status: JobStatus = JobStatus()

    @property
    def ended(self) -> Condition | None:
        """The condition that says so; a Job that is about to fail has failed."""
        wanted = ("Failed", "FailureTarget", "Complete")
        return next(
            (c for kind in wanted for c in self.status.conditions if c.type == kind and c.holds), None
        )


class Terminated(Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class Stalled(Struct, frozen=True, rename="camel"):
    reason: str = ""
    message: str = ""


class State(Struct, frozen=True):
    waiting: Stalled | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, frozen=True, rename="camel"):
    name: str = ""
    state: State = State()


class PodStatus(Struct, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    container_statuses: list[ContainerStatus] = []


class PodSpec(Struct, frozen=True, rename="camel"):
    node_name: str = ""


class Pod(Struct, frozen=True, rename="camel"):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, kind: str) -> Condition | None:
        return next((c for c in self.status.conditions if c.type == kind), None)

    @property
    def ready(self) -> bool:
        found = self.condition("Ready")
        return found is not None and found.holds and self.metadata.deletion_timestamp is None


class Event(Struct, frozen=True):
    """What a controller tells about an object, for people to read."""

    reason: str = ""
    message: str = ""


Item = TypeVar("Item")


class ListMeta(Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Listed(Struct, Generic[Item], frozen=True):
    """Some servers say null for nothing."""

    items: list[Item] | None = None
    metadata: ListMeta = ListMeta()


class Change(Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Status(Struct, frozen=True, rename="camel"):
    """How an API server refuses."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0


class Review(Struct, frozen=True):
    """Whether we may do something."""

    class Answer(Struct, frozen=True):
        allowed: bool = False

    status: Answer = Answer()


def name_of(run: str, session_id: str) -> str:
    """Of a session's Job: readable, and its own: other runs may have sessions of the same id, and two ids may
    look alike in small letters.
    """
    readable = re.sub(r"[^a-z0-9]+", "-", session_id.lower())[:READABLE].strip("-")
    return "-".join(part for part in ("afield", readable, _digest(f"{run}\n{session_id}")) if part)


def label_of(text: str) -> str:
    """As a label's value; what does not fit into one is replaced by its digest."""
    return text if LABEL.fullmatch(text) else f"sha256-{_digest(text)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]
