"""Agents as Jobs: what the cluster is asked for, how each end is summary, and what does not start."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.errors import InfrastructureFailure, TaskFailure
from afield.interfaces.runtime import Exit, Phase
from afield.runtimes.kubernetes.objects import job_name, label_value
from afield.settings.runtimes import ResourceLimits
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, FailureKind, Reason
from agents.sink import Sink
from support.fake_kube import NAMESPACE, FakeKube
from support.kubernetes import asked, fake_kube, jobs, placed, runtime_on, until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    async with fake_kube(tmp_path / "kube") as kube:
        yield kube


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


# --- what is asked for -------------------------------------------------------------------------------


async def test_a_job_runs_once_has_bounds_and_holds_no_key(kube: FakeKube, sink: Sink) -> None:
    kube.nodes.secrets["tools"] = {"TOOL_KEY": "3"}
    more = {
        "secret": "tools",
        "service_account": "agents",
        "runtime_class": "gvisor",
        "non_root": True,
        "env": {"MODE": "4"},
        "labels": {"team": "rl"},
        "node_selector": {"zone": "a"},
        "job_deadline_s": 77,
        "ttl_s": 11,
    }
    async with placed(kube, sink, **more) as place:
        for name, value in (("TOOL_KEY", 3.0), ("MODE", 4.0)):
            attempt = await place.launch({"do": "environment", "name": name}, name)
            assert await place.wait(attempt) == Exit(log=(await place.wait(attempt)).log, lingers=True)
            assert await place.reward(attempt) == value
    [job, _] = kube.bodies
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert job["metadata"]["labels"] == {
        "team": "rl",
        "afield.run": "run",
        "afield.session": "TOOL_KEY.1",
    }
    assert spec["template"]["metadata"]["labels"] == job["metadata"]["labels"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (
        0,
        77,
        11,
    )
    assert (pod["restartPolicy"], pod["runtimeClassName"]) == ("Never", "gvisor")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("agents", True)
    assert pod["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}
    [container] = pod["containers"]
    asked_for = {"cpu": "500m", "memory": "300Mi", "ephemeral-storage": "512Mi"}
    assert container["resources"] == {"requests": asked_for, "limits": asked_for}
    assert container["envFrom"] == [{"secretRef": {"name": "tools"}}]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["readinessProbe"]["httpGet"] == {"path": "/ping", "port": 8080}
    # The key that `agents.invoking` gives every session, and the secret's own value.
    assert "secret-key" not in json.dumps(kube.bodies) and '"3"' not in json.dumps(kube.bodies)


async def test_without_a_service_account_a_pod_gets_no_token(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        await place.wait(await place.launch({"do": "reward"}))
    assert kube.bodies[0]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("rollout_id", ["x" * 120, "-Rollout_with.odd-", "___", "A", "a"])
async def test_any_session_id_has_a_job_and_is_found_by_it(
    kube: FakeKube, sink: Sink, rollout_id: str
) -> None:
    run = "a run " + "of a long name" * 9
    async with placed(kube, sink, name=run) as place:
        attempt = await place.launch({"do": "reward"}, rollout_id)
        [job] = jobs(kube)
        assert job == job_name(run, attempt.session_id) and len(job) <= 63
        async with runtime_on(kube, name=run) as other:
            live = await other.status(attempt)
            assert live.session_id == attempt.session_id and live.where == f"{NAMESPACE}/{job}"
            if live.phase is not Phase.ENDED:
                assert [one.session_id for one in await other.list()] == [attempt.session_id]
        assert (await place.wait(attempt)).failure is None
        await place.runtime.stop(attempt)
        assert jobs(kube) == []


def test_ids_that_look_alike_have_names_of_their_own() -> None:
    ids = ["a.1", "A.1", "a-1", "a_1", "x" * 126 + ".1", "x" * 126 + ".2"]
    assert len({job_name("run", one) for one in ids}) == len({label_value(one) for one in ids}) == len(ids)


async def test_many_sessions_are_seen_by_one_list_and_one_watch(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        async with anyio.create_task_group() as group:
            for i in range(5):
                group.start_soon(place.launch, {"do": "reward"}, f"r{i}")
        for i in range(5):
            assert (await place.wait(Attempt(f"r{i}", 1))).failure is None
    for kind in ("/jobs", "/pods"):
        assert asked(kube, "GET", kind, watch="1") == 1
        assert asked(kube, "GET", kind, limit="500") == 1
    # Nobody asked for a Job by its name while they ran.
    assert not [path for method, path, _ in kube.requests if method == "GET" and "/jobs/" in path]


# --- ends --------------------------------------------------------------------------------------------


async def test_session_past_its_job_deadline_fails_with_timeout(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, job_deadline_s=4) as place:
        ended = await place.wait(await place.launch({"do": "beat"}))
        assert ended.failure and ended.failure.reason is Reason.TIMEOUT
        assert "DeadlineExceeded" in ended.failure.message
        await sink.until_quiet("beat")


async def test_an_evicted_pod_is_reported_with_the_message_of_its_node(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat", "say": "last words"})
        await sink.until_told("beat")
        await kube.nodes.evict(kube.pod_of("r.1"))
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.DIED
        assert "Evicted: The node was low on resource" in ended.failure.message
        assert "last words" in ended.failure.message and "last words" in ended.log


async def test_a_lost_node_is_a_failure_of_the_infrastructure(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat"})
        await sink.until_told("beat")
        await kube.nodes.lose_node()
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.kind is FailureKind.INFRASTRUCTURE
        assert "DeletionByTaintManager" in ended.failure.message and "node-1" in ended.failure.message
        kube.nodes.lost = False


@pytest.mark.parametrize("how", ["Background", "Foreground"])
async def test_deleted_job_fails_the_attempt_as_died(kube: FakeKube, sink: Sink, how: str) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat"})
        await kube.nodes.delete_job(job_name("run", "r.1"), how)
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.DIED and "deleted" in ended.failure.message


async def test_what_has_ended_is_gone_after_its_time_to_live_and_its_log_stays(
    kube: FakeKube, sink: Sink
) -> None:
    async with placed(kube, sink, ttl_s=1) as place:
        attempt = Attempt("r", 1)
        with contextlib.suppress(InfrastructureFailure):  # it may die before its answer is out
            await place.launch({"do": "exit"})
        ended = await place.wait(attempt)
        assert ended.failure and "exit code 3" in ended.failure.message
        await until(lambda: jobs(kube) == [])
        assert (await place.runtime.status(attempt)).phase is Phase.UNKNOWN
        assert "about to leave" in await place.runtime.logs(attempt)
        assert (await place.wait(attempt)) == ended


# --- what does not start -----------------------------------------------------------------------------


async def test_image_that_cannot_be_pulled_fails_the_launch_before_its_timeout(
    kube: FakeKube, sink: Sink
) -> None:
    async with placed(kube, sink, image="registry.example/nothing:1") as place:
        with pytest.raises(InfrastructureFailure, match=r"(?s)ErrImagePull.*nothing:1.*not found") as caught:
            with anyio.fail_after(60):
                await place.launch({"do": "reward"})
        assert caught.value.reason is Reason.LAUNCH
        assert jobs(kube) == []


async def test_missing_secret_fails_the_launch_before_its_timeout(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, secret="absent") as place:
        with pytest.raises(
            InfrastructureFailure, match='CreateContainerConfigError: secret "absent" not found'
        ):
            await place.launch({"do": "reward"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"node_selector": {"zone": "b"}}, "didn't match"),
        ({"limits": ResourceLimits(cpus=100)}, "Insufficient cpu"),
    ],
)
async def test_unschedulable_pod_fails_the_launch_before_its_timeout(
    kube: FakeKube, sink: Sink, more: dict[str, Any], said: str
) -> None:
    async with placed(kube, sink, unschedulable_s=1.0, **more) as place:
        with (
            pytest.raises(InfrastructureFailure, match=f"0/1 nodes are available.*{said}"),
            anyio.fail_after(60),
        ):
            await place.launch({"do": "reward"})
        assert jobs(kube) == []


async def test_a_server_that_never_serves_fails_with_its_output(kube: FakeKube, sink: Sink) -> None:
    kube.nodes.images["mute:1"] = [
        sys.executable,
        "-u",
        "-c",
        "import time; print('thinking'); time.sleep(600)",
    ]
    async with placed(kube, sink, image="mute:1", start_timeout_s=2.0) as place:
        with pytest.raises(InfrastructureFailure, match=r"(?s)not ready within 2 s.*thinking") as caught:
            await place.launch({"do": "reward"})
        assert caught.value.reason is Reason.LAUNCH
        await until(lambda: not kube.store.items["pods"])


async def test_what_dies_before_it_serves_fails_its_launch(kube: FakeKube, sink: Sink) -> None:
    kube.nodes.images["broken:1"] = [sys.executable, "-c", "raise SystemExit('no such agent')"]
    async with placed(kube, sink, image="broken:1") as place:
        with pytest.raises(InfrastructureFailure, match=r"(?s)exit code 1.*no such agent") as caught:
            await place.launch({"do": "reward"})
        assert caught.value.reason is Reason.LAUNCH


async def test_a_session_can_be_stopped_while_its_pod_starts(kube: FakeKube, sink: Sink) -> None:
    kube.nodes.images["mute:1"] = [sys.executable, "-c", "import time; time.sleep(600)"]
    refused: list[InfrastructureFailure] = []
    async with placed(kube, sink, image="mute:1") as place:

        async def launch() -> None:
            try:
                await place.launch({"do": "reward"})
            except InfrastructureFailure as failure:
                refused.append(failure)

        async with anyio.create_task_group() as group:
            group.start_soon(launch)
            await until(lambda: bool(kube.nodes.running))
            await place.runtime.stop(Attempt("r", 1))
        assert [failure.reason for failure in refused] == [Reason.CANCELLED]
        await until(lambda: not jobs(kube) and not kube.store.items["pods"])


async def test_a_payload_that_is_no_json_is_refused_before_anything_is_made(
    kube: FakeKube, sink: Sink
) -> None:
    async with runtime_on(kube) as runtime:
        with pytest.raises(TaskFailure, match=r"the payload of r\.1"):
            await runtime.launch(Attempt("r", 1), {"value": float("nan"), "at": object()})
    assert kube.bodies == []


# --- images of task rows -----------------------------------------------------------------------------


async def test_a_row_names_the_image_of_its_job(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, image_key="image") as place:
        usual = next(iter(kube.nodes.images))
        kube.nodes.images["tasks/one:1"] = kube.nodes.images[usual]
        for rollout_id, row in (("own", {"image": "tasks/one:1"}), ("usual", {})):
            attempt = await place.launch({"do": "reward", **row}, rollout_id)
            assert (await place.wait(attempt)).failure is None
        with pytest.raises(TaskFailure, match="image = 7 of the task row must name an image"):
            await place.launch({"do": "reward", "image": 7}, "number")
    images = [body["spec"]["template"]["spec"]["containers"][0]["image"] for body in kube.bodies]
    assert images == ["tasks/one:1", usual]


async def test_rows_must_name_an_image_where_none_is_set(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, image="", image_key="image") as place:
        await place.runtime.check()
        with pytest.raises(TaskFailure, match="the task row names no image in 'image'"):
            await place.launch({"do": "reward"})
