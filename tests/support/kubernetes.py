"""A cluster for a test, whose images are agents of tests/agents, and runtimes that use it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.settings.runtimes import KubernetesOptions, ResourceLimits
from agents.places import ACTING, BOUND_S, Place
from agents.sink import Sink
from support.fake_kube import NAMESPACE, FakeKube
from support.fake_kube_nodes import isolation


@contextlib.asynccontextmanager
async def fake_kube(folder: Path, tls: tuple[Path, Path] | None = None) -> AsyncIterator[FakeKube]:
    """Skips where pods cannot be kept apart; where `CI` is set, it fails."""
    try:
        isolation()
    except FileNotFoundError as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    async with FakeKube(folder, tls).running() as kube:
        kube.nodes.env = dict(os.environ)
        yield kube


def image_of(kube: FakeKube, target: str) -> str:
    """The image that serves an agent."""
    image = f"agents/{Path(target).name.replace('.py:', '-')}:1"
    serve = [
        sys.executable,
        "-u",
        "-m",
        "afield.sdk.serve",
        target,
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
        "--unsigned",
    ]
    kube.nodes.images[image] = serve
    return image


def runtime_on(
    kube: FakeKube, name: str = "run", start_timeout_s: float = 60.0, **more: Any
) -> KubernetesRuntime:
    given = {
        "image": image_of(kube, f"{ACTING}:act"),
        "limits": ResourceLimits(cpus=0.5, memory_mb=300),
        **more,
    }
    options = KubernetesOptions(namespace=NAMESPACE, kubeconfig=str(kube.kubeconfig), **given)
    log_dir = kube.folder / "kept"
    return KubernetesRuntime(options, name=name, log_dir=log_dir, start_timeout_s=start_timeout_s, poll_s=0.1)


@contextlib.asynccontextmanager
async def placed(kube: FakeKube, sink: Sink, **more: Any) -> AsyncIterator[Place]:
    async with runtime_on(kube, **more) as runtime:
        yield Place(runtime, sink.transport, sink)


def jobs(kube: FakeKube) -> list[str]:
    return sorted(kube.store.items["jobs"])


def asked(kube: FakeKube, method: str, end: str, **query: str) -> int:
    return sum(
        m == method and path.endswith(end) and query.items() <= asked.items()
        for m, path, asked in kube.requests
    )


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(BOUND_S):
        while not condition():
            await anyio.sleep(0.02)


def readiness(kube: FakeKube, session_id: str) -> list[str]:
    """Of its pod, once it has one."""
    pods = kube.store.items["pods"].values()
    ours = [pod for pod in pods if pod["metadata"]["annotations"].get("afield.session") == session_id]
    return [c["status"] for pod in ours for c in pod["status"].get("conditions", []) if c["type"] == "Ready"]
