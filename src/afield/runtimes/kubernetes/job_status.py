"""What the state of a Job and of its pod means: it ended, and how; or it will never start, and why.

The two are watched apart, so that the effect may be seen before its cause: an end is `sure` when nothing
that is still to come could explain it better.
"""

from __future__ import annotations

import signal

from msgspec import Struct

from afield.runtimes.kubernetes.objects import Condition, Job, Pod, Terminated
from afield.types import Reason

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
