"""The kubernetes runtime on a cluster of your own; docs/how-to/kubernetes.md says what it needs.

Skipped unless AFIELD_TEST_KUBECONFIG and AFIELD_TEST_IMAGE are set, in CI as well: there is no cluster there.
The agent in the image gets a gateway that does not answer: what it makes of that is its own affair, since
only lives and ends of Jobs are looked at.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.errors import InfrastructureFailure
from afield.interfaces.runtime import Phase
from afield.runtimes.kubernetes.runtime import KubernetesRuntime
from afield.settings.runtimes import KubernetesOptions
from afield.types import Attempt
from agents.invoking import invocation, payload

KUBECONFIG, IMAGE = os.environ.get("AFIELD_TEST_KUBECONFIG", ""), os.environ.get("AFIELD_TEST_IMAGE", "")
NAMESPACE = os.environ.get("AFIELD_TEST_NAMESPACE", "default")
START_S = 300.0

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.kubernetes,
    pytest.mark.skipif(
        not (KUBECONFIG and IMAGE), reason="name AFIELD_TEST_KUBECONFIG and AFIELD_TEST_IMAGE to run this"
    ),
]
Make = Callable[..., KubernetesRuntime]


@pytest.fixture
def run() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def make(run: str, tmp_path: Path) -> Make:
    def make(**more: Any) -> KubernetesRuntime:
        given = {"image": IMAGE, "attempt_timeout_s": 600, "ttl_s": 60, **more}
        options = KubernetesOptions(kubeconfig=KUBECONFIG, namespace=NAMESPACE, **given)
        return KubernetesRuntime(options, name=run, log_dir=tmp_path / "logs", start_timeout_s=START_S)

    return make


@pytest.fixture
async def attempt(run: str, make: Make) -> AsyncIterator[Attempt]:
    attempt = Attempt(f"{run}-rollout", 1)
    yield attempt
    async with make() as runtime:
        await runtime.stop(attempt)


def a_payload(attempt: Attempt) -> dict[str, Any]:
    return payload({"question": "what is 6 times 7?"}, invocation(attempt.rollout_id, attempt.n))


async def test_the_cluster_passes_the_check(make: Make) -> None:
    async with make() as runtime:
        await runtime.check()


async def test_a_session_is_launched_seen_from_elsewhere_and_stopped(make: Make, attempt: Attempt) -> None:
    async with make() as runtime, make() as other:
        await runtime.launch(attempt, a_payload(attempt))
        assert (await other.status(attempt)).phase in (Phase.STARTING, Phase.RUNNING)
        assert [live.session_id for live in await other.list()] == [attempt.session_id]
        assert isinstance(await other.logs(attempt), str)
        await other.stop(attempt)
        await other.stop(attempt)
        with anyio.fail_after(60):
            await runtime.wait(attempt)
            while await other.list():
                await anyio.sleep(0.5)
        assert (await other.status(attempt)).phase is Phase.UNKNOWN


async def test_launching_from_two_processes_is_one_job(make: Make, attempt: Attempt) -> None:
    async with make() as first, make() as second:
        await first.launch(attempt, a_payload(attempt))
        await second.launch(attempt, a_payload(attempt))
        assert len(await first.list()) == 1


async def test_missing_image_fails_the_launch_before_its_timeout(make: Make, attempt: Attempt) -> None:
    async with make(image="registry.invalid/afield/nothing:0") as runtime:
        with pytest.raises(InfrastructureFailure, match="Image"), anyio.fail_after(START_S / 2):
            await runtime.launch(attempt, a_payload(attempt))
        assert await runtime.list() == []


async def test_unschedulable_pod_fails_the_launch_before_its_timeout(make: Make, attempt: Attempt) -> None:
    async with make(node_selector={"afield.example/nowhere": "true"}, unschedulable_s=5.0) as runtime:
        with pytest.raises(InfrastructureFailure, match="nodes are available"), anyio.fail_after(60):
            await runtime.launch(attempt, a_payload(attempt))
        assert await runtime.list() == []
