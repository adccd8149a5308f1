"""Kubernetes objects: the Job of a session, and its observed state.

1. Structs for Jobs, pods, lists, watch events and statuses, with only the fields that are used. Their fields
have the meaning of the Kubernetes API; defaults stand for absent fields.
2. `job_name` and `label_value` identify a session for any process.
3. `job_for` builds the Job. It runs once, has a deadline and a TTL, and contains nothing of the payload, so
that no reader of Jobs sees keys.
4. `end_of`, `unstartable` and `unschedulable` tell how a session ended, or why it does not start.
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


class ObjectMeta(Struct, frozen=True, rename="camel"):
    """Metadata of an object."""

    name: str = ""
    """Name, unique by kind and namespace."""
    uid: str = ""
    """Unique id."""
    resource_version: str = ""
    """Version that changes with each update."""
    labels: dict[str, str] = {}
    """Labels, which selectors match."""
    annotations: dict[str, str] = {}
    """Annotations, which hold run and session id."""
    creation_timestamp: datetime | None = None
    """Time of creation."""
    deletion_timestamp: datetime | None = None
    """Time of the deletion request; None unless the object is being deleted."""


class Condition(Struct, frozen=True, rename="camel"):
    """Condition in the status of a Job or pod."""

    type: str = ""
    """Kind of condition, such as `Ready`."""
    status: str = ""
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    """Reason in one word."""
    message: str = ""
    """Description."""

    @property
    def holds(self) -> bool:
        return self.status == "True"


class JobStatus(Struct, frozen=True, rename="camel"):
    """Status of a Job."""

    conditions: list[Condition] = []
    """Conditions of the Job."""
    start_time: datetime | None = None
    """Start of the Job; None before."""
    ready: int | None = None
    """Number of ready pods; None if not reported."""


class Job(Struct, frozen=True, rename="camel"):
    """Job of one session."""

    metadata: ObjectMeta = ObjectMeta()
    """Metadata of the Job."""
    status: JobStatus = JobStatus()
    """Status of the Job."""

    @property
    def ended(self) -> Condition | None:
        """Condition that the Job has completed or failed; a Job that is about to fail counts as failed."""
        wanted = ("Failed", "FailureTarget", "Complete")
        return next(
            (c for kind in wanted for c in self.status.conditions if c.type == kind and c.holds), None
        )


class TerminatedState(Struct, frozen=True, rename="camel"):
    """State of a container that has ended."""

    exit_code: int = 0
    """Exit code; 128 plus the signal number if a signal ended it."""
    reason: str = ""
    """Reason in one word, such as `OOMKilled`."""
    message: str = ""
    """Description."""


class WaitingState(Struct, frozen=True, rename="camel"):
    """State of a container that has not started."""

    reason: str = ""
    """Reason in one word, such as `ImagePullBackOff`."""
    message: str = ""
    """Description."""


class ContainerState(Struct, frozen=True):
    """State of a container."""

    waiting: WaitingState | None = None
    """Set while the container has not started."""
    terminated: TerminatedState | None = None
    """Set once the container has ended."""


class ContainerStatus(Struct, frozen=True, rename="camel"):
    """Status of a container in a pod."""

    name: str = ""
    """Name of the container."""
    state: ContainerState = ContainerState()
    """State of the container."""


class PodStatus(Struct, frozen=True, rename="camel"):
    """Status of a pod."""

    phase: str = ""
    """`Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`."""
    reason: str = ""
    """Reason in one word, such as `Evicted`."""
    message: str = ""
    """Description."""
    conditions: list[Condition] = []
    """Conditions of the pod."""
    container_statuses: list[ContainerStatus] = []
    """Statuses of its containers."""


class PodSpec(Struct, frozen=True, rename="camel"):
    """Specification of a pod."""

    node_name: str = ""
    """Node that the pod is scheduled on; empty before."""


class Pod(Struct, frozen=True, rename="camel"):
    """Pod of one session."""

    metadata: ObjectMeta = ObjectMeta()
    """Metadata of the pod."""
    spec: PodSpec = PodSpec()
    """Specification of the pod."""
    status: PodStatus = PodStatus()
    """Status of the pod."""

    def condition(self, kind: str) -> Condition | None:
        return next((c for c in self.status.conditions if c.type == kind), None)

    @property
    def ready(self) -> bool:
        condition = self.condition("Ready")
        return condition is not None and condition.holds and self.metadata.deletion_timestamp is None


class Event(Struct, frozen=True):
    """Event that a controller reports about an object."""

    reason: str = ""
    """Reason in one word, such as `FailedCreate`."""
    message: str = ""
    """Description."""


Item = TypeVar("Item")


class ListMeta(Struct, frozen=True, rename="camel"):
    """Metadata of a list."""

    resource_version: str = ""
    """Version of the list, at which a watch can start."""
    continue_: str = msgspec.field(default="", name="continue")
    """Token of the next page; empty on the last page."""


class ObjectList(Struct, Generic[Item], frozen=True):
    """Page of a list."""

    items: list[Item] | None = None
    """Objects of the page; some servers send null for none."""
    metadata: ListMeta = ListMeta()
    """Metadata of the list."""


class WatchEvent(Struct, frozen=True):
    """Line of a watch."""

    type: str
    """`ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK` or `ERROR`."""
    object: msgspec.Raw
    """The object, not decoded."""


class ApiStatus(Struct, frozen=True, rename="camel"):
    """Error answer of an API server."""

    kind: str = ""
    """`Status`; empty if the answer is not from the API server."""
    message: str = ""
    """Description."""
    reason: str = ""
    """Reason in one word, such as `AlreadyExists`."""
    code: int = 0
    """HTTP status."""


class AccessReview(Struct, frozen=True):
    """Answer to a SelfSubjectAccessReview."""

    class AccessReviewStatus(Struct, frozen=True):
        """Result of the review."""

        allowed: bool = False
        """Whether the credentials have the permission."""

    status: AccessReviewStatus = AccessReviewStatus()
    """Result of the review."""


def job_name(run: str, session_id: str) -> str:
    """Name of a session's Job: readable, and unique by a digest of run and session id."""
    readable = re.sub(r"[^a-z0-9]+", "-", session_id.lower())[:READABLE].strip("-")
    return "-".join(part for part in ("afield", readable, _digest(f"{run}\n{session_id}")) if part)


def label_value(text: str) -> str:
    """Value for a label; text that is not allowed in labels is replaced by its digest."""
    return text if LABEL.fullmatch(text) else f"sha256-{_digest(text)}"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


CONTAINER = "agent"
GRACE_S = 5
# Time until pods of a lost node are evicted, in seconds; the cluster default is five minutes.
LOST_NODE_S = 30
PROBE_S = 1


def job_for(options: KubernetesOptions, run: str, session_id: str, image: str) -> dict[str, Any]:
    """Build the Job of a session."""
    labels = {**options.labels, RUN: label_value(run), SESSION: label_value(session_id)}
    notes = {RUN: run, SESSION: session_id}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job_name(run, session_id), "labels": labels, "annotations": notes},
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "activeDeadlineSeconds": options.job_deadline_s,
            "ttlSecondsAfterFinished": options.ttl_s,
            "template": {"metadata": {"labels": labels, "annotations": notes}, "spec": _pod(options, image)},
        },
    }


def _pod(options: KubernetesOptions, image: str) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.non_root:
        security["runAsNonRoot"] = True
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": bool(options.service_account),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": security,
        "tolerations": [_toleration("not-ready"), _toleration("unreachable")],
        "containers": [_container(options, image)],
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


def _container(options: KubernetesOptions, image: str) -> dict[str, Any]:
    resources = _resources(options.limits)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": options.pull,
        "ports": [{"containerPort": options.port}],
        "env": [{"name": name, "value": value} for name, value in options.env.items()],
        "resources": {"requests": resources, "limits": resources},
        "readinessProbe": {
            "httpGet": {"path": "/ping", "port": options.port},
            "periodSeconds": PROBE_S,
            # A busy agent answers late and must not become unready for that.
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
    requests: dict[str, str] = {}
    if limits.cpus is not None:
        requests["cpu"] = f"{max(1, round(limits.cpus * 1000))}m"
    if limits.memory_mb is not None:
        requests["memory"] = f"{limits.memory_mb}Mi"
    if limits.disk_mb is not None:
        requests["ephemeral-storage"] = f"{limits.disk_mb}Mi"
    return requests


def _toleration(what: str) -> dict[str, Any]:
    return {
        "key": f"node.kubernetes.io/{what}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": LOST_NODE_S,
    }


# Waiting reasons that do not resolve by themselves.
UNSTARTABLE = frozenset(
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


class SessionEnd(Struct, frozen=True):
    """How a session ended."""

    failure: str = ""
    """Description of the failure; empty if the session succeeded."""
    reason: Reason = Reason.DIED
    """Reason of the failure."""
    sure: bool = True
    """Whether this is the final cause; False if a more specific one may still be observed."""


class Observed(Struct):
    """Last observed state of a session's Job and pod."""

    job: Job | None = None
    """The Job; None if none was observed."""
    pod: Pod | None = None
    """The pod; None if none was observed."""
    job_gone: bool = False
    """Whether the Job was deleted."""
    pod_gone: bool = False
    """Whether the pod was deleted."""

    @property
    def summary(self) -> str:
        """Current state in words, for error messages."""
        if self.pod is None:
            return "it has no pod yet"
        waiting = [s.state.waiting for s in self.pod.status.container_statuses if s.state.waiting]
        why = next((f"{w.reason}: {w.message}" for w in waiting), "").rstrip(": ")
        return f"its pod {self.pod.metadata.name} is {self.pod.status.phase}" + (f" ({why})" if why else "")


def end_of(observed: Observed) -> SessionEnd | None:
    """How the session ended; None while it runs."""
    ended = observed.job.ended if observed.job else None
    if ended and ended.type == "Complete":
        return SessionEnd()
    if ended and ended.reason == "DeadlineExceeded":
        return SessionEnd(
            f"it ran past its deadline ({_words(ended)}); raise job_deadline_s if it needs longer",
            Reason.TIMEOUT,
        )
    if pod_end := _pod_end(observed):
        return pod_end
    if observed.job_gone:
        return SessionEnd("its Job was deleted, not by us", sure=False)
    if ended:
        return SessionEnd(f"its Job failed ({_words(ended)})", sure=False)
    return None


def _pod_end(observed: Observed) -> SessionEnd | None:
    pod = observed.pod
    if pod is None:
        return None
    if pod.status.phase == "Succeeded":
        return SessionEnd()
    disrupted = pod.condition("DisruptionTarget")
    deleted = observed.pod_gone or pod.metadata.deletion_timestamp is not None
    where = f" on node {pod.spec.node_name}" if pod.spec.node_name else ""
    if pod.status.phase == "Failed":
        # A pod that is being deleted may yet report the cause.
        return SessionEnd(f"it {_failed(pod)}{where}", sure=not deleted or disrupted is not None)
    if deleted and disrupted and disrupted.holds:
        return SessionEnd(f"its pod was taken away{where} ({_words(disrupted)})")
    if deleted:
        return SessionEnd(f"its pod was deleted{where}, not by us", sure=False)
    return None


def unstartable(pod: Pod) -> str:
    """Why a pod will never start; empty if it may start."""
    for status in pod.status.container_statuses:
        waiting = status.state.waiting
        if waiting and waiting.reason in UNSTARTABLE:
            return f"{waiting.reason}: {waiting.message}".rstrip(": ")
    return ""


def unschedulable(pod: Pod) -> str:
    """Why no node accepts a pod at present; empty if it is not known to be unschedulable."""
    scheduled = pod.condition("PodScheduled")
    if scheduled and scheduled.status == "False" and scheduled.reason == "Unschedulable":
        return scheduled.message or scheduled.reason
    return ""


def _failed(pod: Pod) -> str:
    ended = next((s.state.terminated for s in pod.status.container_statuses if s.state.terminated), None)
    if ended and ended.reason == "OOMKilled":
        return "was killed for using more memory than its limit (OOMKilled); raise memory_mb if it needs more"
    if pod.status.reason:
        return f"failed: {pod.status.reason}: {pod.status.message}".rstrip(": ")
    return f"died with {_code(ended)}" if ended else "failed without a reason"


def _code(ended: TerminatedState) -> str:
    summary = f"exit code {ended.exit_code}"
    if ended.exit_code > 128:
        summary += f" (signal {ended.exit_code - 128}, {signal.strsignal(ended.exit_code - 128)})"
    return f"{summary}: {ended.message}".rstrip(": ")


def _words(condition: Condition) -> str:
    return f"{condition.reason}: {condition.message}".rstrip(": ")
