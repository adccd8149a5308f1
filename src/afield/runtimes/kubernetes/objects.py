"""What of a cluster's objects is read here: Jobs, their pods, lists, watch events and refusals.

Only the fields that decide something; the rest of what a cluster says is skipped unread. `name_of` and
`label_of` say under which name and label a session is found, from any process.
"""

from __future__ import annotations

import re
import signal
from datetime import datetime
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from afield.settings.runtimes import KubernetesOptions, ResourceLimits
from afield.types import Reason

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


CONTAINER = "agent"
GRACE_S = 5
# A node that is gone is waited for this long; clusters say five minutes where nothing else is said.
LOST_NODE_S = 30
PROBE_S = 1


def job_for(options: KubernetesOptions, run: str, session_id: str) -> dict[str, Any]:
    labels = {**options.labels, RUN: label_of(run), SESSION: label_of(session_id)}
    notes = {RUN: run, SESSION: session_id}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(run, session_id), "labels": labels, "annotations": notes},
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": options.job_deadline_s,
            "ttlSecondsAfterFinished": options.ttl_s,
            "template": {"metadata": {"labels": labels, "annotations": notes}, "spec": _pod(options)},
        },
    }


def _pod(options: KubernetesOptions) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.non_root:
        security["runAsNonRoot"] = True
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": bool(options.service_account),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": security,
        "tolerations": [_patience("not-ready"), _patience("unreachable")],
        "containers": [_container(options)],
    }
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.runtime_class:
        pod["runtimeClassName"] = options.runtime_class
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.pull_secret:
        pod["imagePullSecrets"] = [{"name": options.pull_secret}]
    return pod


def _container(options: KubernetesOptions) -> dict[str, Any]:
    resources = _resources(options.limits)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": options.pull,
        "ports": [{"containerPort": options.port}],
        "env": [{"name": name, "value": value} for name, value in options.env.items()],
        "resources": {"requests": resources, "limits": resources},
        "readinessProbe": {
            "httpGet": {"path": "/ping", "port": options.port},
            "periodSeconds": PROBE_S,
            # An agent that is busy answers late; it is not to lose its address for that.
            "failureThreshold": 30,
            "timeoutSeconds": 5,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    if options.command:
        container["command"] = list(options.command)
    return container


def _resources(limits: ResourceLimits) -> dict[str, str]:
    asked: dict[str, str] = {}
    if limits.cpus is not None:
        asked["cpu"] = f"{max(1, round(limits.cpus * 1000))}m"
    if limits.memory_mb is not None:
        asked["memory"] = f"{limits.memory_mb}Mi"
    if limits.disk_mb is not None:
        asked["ephemeral-storage"] = f"{limits.disk_mb}Mi"
    return asked


def _patience(what: str) -> dict[str, Any]:
    return {
        "key": f"node.kubernetes.io/{what}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": LOST_NODE_S,
    }


# Reasons a container waits for that no waiting mends.
HOPELESS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ErrImageNeverPull",
        "InvalidImageName",
        "ImageInspectError",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)


class End(Struct, frozen=True):
    """`said` is empty where it ended well."""

    said: str = ""
    reason: Reason = Reason.DIED
    sure: bool = True


class Observed(Struct):
    """What was last seen of a session in the cluster."""

    job: Job | None = None
    pod: Pod | None = None
    job_gone: bool = False
    pod_gone: bool = False

    @property
    def told(self) -> str:
        """For an error message: what it is doing."""
        if self.pod is None:
            return "it has no pod yet"
        waiting = [s.state.waiting for s in self.pod.status.container_statuses if s.state.waiting]
        why = next((f"{w.reason}: {w.message}" for w in waiting), "").rstrip(": ")
        return f"its pod {self.pod.metadata.name} is {self.pod.status.phase}" + (f" ({why})" if why else "")


def end_of(sight: Observed) -> End | None:
    ended = sight.job.ended if sight.job else None
    if ended and ended.type == "Complete":
        return End()
    if ended and ended.reason == "DeadlineExceeded":
        return End(
            f"it ran past its deadline ({_words(ended)}); raise job_deadline_s if it may", Reason.TIMEOUT
        )
    if found := _pod_end(sight):
        return found
    if sight.job_gone:
        return End("its Job was deleted, not by us", sure=False)
    if ended:
        return End(f"its Job failed ({_words(ended)})", sure=False)
    return None


def _pod_end(sight: Observed) -> End | None:
    pod = sight.pod
    if pod is None:
        return None
    if pod.status.phase == "Succeeded":
        return End()
    disrupted = pod.condition("DisruptionTarget")
    deleted = sight.pod_gone or pod.metadata.deletion_timestamp is not None
    where = f" on node {pod.spec.node_name}" if pod.spec.node_name else ""
    if pod.status.phase == "Failed":
        # One that is being deleted was ended by somebody, who may tell why.
        return End(f"it {_failed(pod)}{where}", sure=not deleted or disrupted is not None)
    if deleted and disrupted and disrupted.holds:
        return End(f"its pod was taken away{where} ({_words(disrupted)})")
    if deleted:
        return End(f"its pod was deleted{where}, not by us", sure=False)
    return None


def unstartable(pod: Pod) -> str:
    """Why a pod will never start; empty while it may."""
    for status in pod.status.container_statuses:
        waiting = status.state.waiting
        if waiting and waiting.reason in HOPELESS:
            return f"{waiting.reason}: {waiting.message}".rstrip(": ")
    return ""


def unschedulable(pod: Pod) -> str:
    """Why no node takes a pod now; empty where one has."""
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False" and scheduled.reason == "Unschedulable":
        return scheduled.message or scheduled.reason
    return ""


def _failed(pod: Pod) -> str:
    ended = next((s.state.terminated for s in pod.status.container_statuses if s.state.terminated), None)
    if ended and ended.reason == "OOMKilled":
        return "was killed for using more memory than its limit (OOMKilled); raise memory_mb if it may"
    if pod.status.reason:
        return f"failed: {pod.status.reason}: {pod.status.message}".rstrip(": ")
    return f"died with {_code(ended)}" if ended else "failed, and nobody says why"


def _code(ended: Terminated) -> str:
    told = f"exit code {ended.exit_code}"
    if ended.exit_code > 128:
        told += f" (signal {ended.exit_code - 128}, {signal.strsignal(ended.exit_code - 128)})"
    return f"{told}: {ended.message}".rstrip(": ")


def _words(condition: Condition) -> str:
    return f"{condition.reason}: {condition.message}".rstrip(": ")
