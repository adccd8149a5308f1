"""Kubernetes preflight check: cluster, namespace, permissions, referenced objects, dry-run Job.

Each problem is a UsageError that names the value and the remedy. Objects that the credentials may not read
are not checked.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from afield.errors import RateLimited, Unavailable, UsageError
from afield.runtimes.kubernetes.api import KubernetesCluster, KubernetesRefused, retry_unavailable
from afield.runtimes.kubernetes.objects import AccessReview, job_for
from afield.settings.runtimes import KubernetesOptions

NEEDED = (
    *(("batch", "jobs", "", verb) for verb in ("create", "get", "list", "watch", "delete")),
    *(("", "pods", "", verb) for verb in ("list", "watch")),
    ("", "pods", "log", "get"),
    *(("", "pods", "proxy", verb) for verb in ("get", "create")),
)
# Request metadata only, so that contents of secrets are never read.
BARE = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def check(cluster: KubernetesCluster, options: KubernetesOptions, run: str) -> None:
    """Run all checks; raises UsageError at the first problem."""
    if not (options.image or options.image_key):
        raise UsageError("the kubernetes runtime has no image; name one that serves /invocations on its port")
    try:
        await _reach(cluster)
        await _exists(cluster, f"/api/v1/namespaces/{options.namespace}", "namespace", options.namespace)
        await _allowed(cluster)
        await _parts(cluster, options)
        await _accepted(cluster, options, run)
    except (Unavailable, RateLimited) as error:
        raise UsageError(f"the cluster cannot be used: {error}; is its address right?") from error


async def _reach(cluster: KubernetesCluster) -> None:
    try:
        await retry_unavailable(lambda: cluster.call("GET", "/version"))
    except KubernetesRefused as error:
        if error.status == 401:
            raise UsageError(f"{cluster.host} refuses these credentials: {error}; log in again") from error


async def _allowed(cluster: KubernetesCluster) -> None:
    answers = await asyncio.gather(*(_may(cluster, *one) for one in NEEDED))
    missing = [
        f"{verb} {resource}{'/' if sub else ''}{sub}"
        for (_, resource, sub, verb), may in zip(NEEDED, answers, strict=True)
        if not may
    ]
    if missing:
        raise UsageError(
            f"these credentials lack rights in namespace {cluster.namespace!r}: {', '.join(missing)};"
            " apply the Role in docs/how-to/kubernetes.md, or use another service account"
        )


async def _may(cluster: KubernetesCluster, group: str, resource: str, sub: str, verb: str) -> bool:
    attributes = {"namespace": cluster.namespace, "verb": verb, "group": group, "resource": resource}
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**attributes, "subresource": sub}},
    }
    try:
        review = await retry_unavailable(lambda: cluster.call("POST", REVIEWS, body=body))
    except KubernetesRefused:
        return True  # the credentials may not ask; the first Job shows it
    return msgspec.json.decode(review, type=AccessReview).status.allowed


async def _parts(cluster: KubernetesCluster, options: KubernetesOptions) -> None:
    """Check the objects that pods refer to."""
    wanted = [
        (
            cluster.core("serviceaccounts", options.service_account),
            "service account",
            options.service_account,
        ),
        (cluster.core("secrets", options.secret), "secret", options.secret),
        (cluster.core("secrets", options.pull_secret), "pull secret", options.pull_secret),
        (
            f"/apis/node.k8s.io/v1/runtimeclasses/{options.runtime_class}",
            "runtime class",
            options.runtime_class,
        ),
    ]
    for path, what, name in wanted:
        if name:
            await _exists(cluster, path, what, name)


async def _exists(cluster: KubernetesCluster, path: str, what: str, name: str) -> None:
    try:
        await retry_unavailable(lambda: cluster.call("GET", path, headers=BARE))
    except KubernetesRefused as error:
        if error.status == 404:
            where = "" if what in ("namespace", "runtime class") else f" in namespace {cluster.namespace!r}"
            raise UsageError(f"there is no {what} {name!r}{where}; create it, or name another") from error


async def _accepted(cluster: KubernetesCluster, options: KubernetesOptions, run: str) -> None:
    """Create a Job with dryRun, so that the server validates it."""
    body = job_for(options, run, "check.1", options.image or "image-of-a-row")
    try:
        await retry_unavailable(
            lambda: cluster.call("POST", cluster.jobs(), params={"dryRun": "All"}, body=body)
        )
    except RateLimited:
        return  # quota is used up for now, which is no mistake
    except KubernetesRefused as error:
        if error.status != 409:
            raise UsageError(f"the cluster refuses the Jobs of this run: {error}") from error
