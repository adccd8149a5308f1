"""The Job of a session, as the cluster is asked for it.

It runs once, has a deadline, and is deleted some time after its end. Nothing of the payload is in it, so
that whoever may read Jobs reads no keys.
"""

from __future__ import annotations

from typing import Any

from afield.options import KubernetesOptions, Limits
from afield.runtimes.kubernetes.objects import RUN, SESSION, label_of, name_of

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


def _resources(limits: Limits) -> dict[str, str]:
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
