"""Agents as Jobs: what the cluster is asked for, what it may do to us, and how each end is told."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.errors import InfrastructureFailure, TaskFailure, Throttled
from afield.options import KubernetesOptions, Limits
from afield.runtimes.kube import KubernetesRuntime
from afield.runtimes.kube_job import job_for
from afield.runtimes.kube_objects import label_of, name_of
from afield.seams.runtime import Exit, Phase
from afield.transports.files import FilesTransport
from afield.types import Attempt, FailureKind, Reason
from agents.places import ACTING, BOUND_S, Place
from agents.sink import Sink
from fake_kube import NAMESPACE, FakeKube
from kubes import fake_kube, image_of

pytestmark = pytest.mark.anyio

# As AgentCore's own app: no word on which sessions are active, and a payload twice is work twice.
PLAIN = """
import http.server, json, sys, threading, time
posts = []
class App(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        busy = any(time.time() < end for end in posts)
        self.say({"status": "HealthyBusy" if busy else "Healthy", "time_of_last_update": 0})
    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        posts.append(time.time() + told["seconds"])
        print(f"payload {len(posts)}", flush=True)
        self.say({"status": "processing"})
    def say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), App).serve_forever()
"""


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    async with fake_kube(tmp_path / "kube") as kube:
        yield kube


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


def runtime_on(
    kube: FakeKube, name: str = "run", start_timeout_s: float = 60.0, **more: Any
) -> KubernetesRuntime:
    given = {"image": image_of(kube, f"{ACTING}:act"), "limits": Limits(cpus=0.5, memory_mb=300), **more}
    options = KubernetesOptions(namespace=NAMESPACE, kubeconfig=str(kube.kubeconfig), **given)
    log_dir = kube.folder / "kept"
    return KubernetesRuntime(options, name=name, log_dir=log_dir, start_timeout_s=start_timeout_s, poll_s=0.1)


@asynccontextmanager
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


async def until(kube: FakeKube, condition: Any) -> None:
    with anyio.fail_after(BOUND_S):
        while not condition():
            await anyio.sleep(0.02)


# --- what is asked for -----------------------------------------------------------------------------


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
        "deadline_s": 77,
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
    async with placed(kube, sink, name="a run " + "of a long name" * 9) as place:
        attempt = await place.launch({"do": "reward"}, rollout_id)
        [job] = jobs(kube)
        assert job == name_of(attempt.session_id) and len(job) <= 63
        async with runtime_on(kube, name="a run " + "of a long name" * 9) as other:
            live = await other.status(attempt)
            assert live.session_id == attempt.session_id and live.where == f"{NAMESPACE}/{job}"
            if live.phase is not Phase.ENDED:
                assert [one.session_id for one in await other.list()] == [attempt.session_id]
        assert (await place.wait(attempt)).failure is None
        await place.runtime.stop(attempt)
        assert jobs(kube) == []


def test_ids_that_look_alike_have_names_of_their_own() -> None:
    ids = ["a.1", "A.1", "a-1", "a_1", "x" * 126 + ".1", "x" * 126 + ".2"]
    assert len({name_of(one) for one in ids}) == len({label_of(one) for one in ids}) == len(ids)


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


# --- watching ----------------------------------------------------------------------------------------


async def test_a_cut_watch_is_taken_up_where_it_was(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat"})
        await sink.until_told("beat")
        for _ in range(3):
            await until(kube, lambda: kube.watches == 2)
            kube.drop_watches()
        kube.nodes.running[kube.pod_of("r.1")].kill()
        ended = await place.wait(attempt)
        assert ended.failure and "exit code 137" in ended.failure.message
    assert asked(kube, "GET", "/jobs", limit="500") == asked(kube, "GET", "/pods", limit="500") == 1
    versions = {
        q["resourceVersion"] for _, path, q in kube.requests if "watch" in q and path.endswith("/pods")
    }
    assert len(versions) > 1


async def test_a_watch_that_is_too_old_begins_anew_and_misses_nothing(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        kept = await place.launch({"do": "beat"}, "kept")
        lost = await place.launch({"do": "beat"}, "lost")
        await until(kube, lambda: kube.watches == 2)
        # In one breath, so that no watch sees it: the Job and its pod go, and so does the memory of it.
        pod = kube.pod_of("lost.1")
        kube.nodes.running[pod].kill()
        kube.store.items["pods"].pop(pod)
        kube.store.items["jobs"].pop(name_of("lost.1"))
        kube.store.compact()
        kube.store.wake()
        ended = await place.wait(lost)
        assert ended.failure and ended.failure.reason is Reason.DIED and "deleted" in ended.failure.message
        assert (await place.runtime.status(kept)).phase is Phase.RUNNING
        await sink.until_told("beat", kept.session_id)
        again = await place.launch({"do": "reward"}, "again")
        assert (await place.wait(again)).failure is None
    assert asked(kube, "GET", "/pods", limit="500") >= 2


async def test_a_server_that_is_away_for_a_while_costs_nobody_anything(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "sleep", "seconds": 1.0})
        kube.down = True
        kube.drop_watches()
        await anyio.sleep(1.5)
        assert not kube.watches
        kube.down = False
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 1.0
        again = await place.launch({"do": "reward"}, n=2)
        assert (await place.wait(again)).failure is None


async def test_a_list_comes_in_pages(kube: FakeKube) -> None:
    for i in range(1_201):
        labels, notes = {"afield.run": "run"}, {"afield.session": f"r{i}.1"}
        meta = {"name": f"j{i}", "labels": labels, "annotations": notes}
        kube.store.create("jobs", {"metadata": meta, "spec": {}, "status": {}})
    async with runtime_on(kube) as runtime:
        assert len({live.session_id for live in await runtime.list()}) == 1_201
    assert asked(kube, "GET", "/jobs") == 3


# --- ends --------------------------------------------------------------------------------------------


async def test_a_session_past_its_deadline_is_ended_and_says_so(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, deadline_s=4) as place:
        ended = await place.wait(await place.launch({"do": "beat"}))
        assert ended.failure and ended.failure.reason is Reason.TIMEOUT
        assert "DeadlineExceeded" in ended.failure.message
        await sink.until_quiet("beat")


async def test_an_evicted_pod_is_told_with_the_words_of_its_node(kube: FakeKube, sink: Sink) -> None:
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
async def test_a_job_that_somebody_deletes_is_told(kube: FakeKube, sink: Sink, how: str) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat"})
        await kube.nodes.delete_job(name_of("r.1"), how)
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
        await until(kube, lambda: jobs(kube) == [])
        assert (await place.runtime.status(attempt)).phase is Phase.UNKNOWN
        assert "about to leave" in await place.runtime.logs(attempt)
        assert (await place.wait(attempt)) == ended


# --- what does not start -------------------------------------------------------------------------------


async def test_an_image_that_cannot_be_pulled_is_known_early(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, image="registry.example/nothing:1") as place:
        with pytest.raises(InfrastructureFailure, match=r"(?s)ErrImagePull.*nothing:1.*not found") as caught:
            with anyio.fail_after(10):
                await place.launch({"do": "reward"})
        assert caught.value.reason is Reason.LAUNCH
        assert jobs(kube) == []


async def test_a_secret_that_is_not_there_is_known_early(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, secret="absent") as place:
        with pytest.raises(
            InfrastructureFailure, match='CreateContainerConfigError: secret "absent" not found'
        ):
            await place.launch({"do": "reward"})


@pytest.mark.parametrize(
    ("more", "said"),
    [({"node_selector": {"zone": "b"}}, "didn't match"), ({"limits": Limits(cpus=100)}, "Insufficient cpu")],
)
async def test_a_pod_that_no_node_takes_is_known_early(
    kube: FakeKube, sink: Sink, more: dict[str, Any], said: str
) -> None:
    async with placed(kube, sink, unschedulable_s=1.0, **more) as place:
        with (
            pytest.raises(InfrastructureFailure, match=f"0/1 nodes are available.*{said}"),
            anyio.fail_after(10),
        ):
            await place.launch({"do": "reward"})
        assert jobs(kube) == []


async def test_what_never_serves_is_given_up_with_what_it_printed(kube: FakeKube, sink: Sink) -> None:
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
        await until(kube, lambda: not kube.store.items["pods"])


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
            await until(kube, lambda: bool(kube.nodes.running))
            await place.runtime.stop(Attempt("r", 1))
        assert [failure.reason for failure in refused] == [Reason.CANCELLED]
        await until(kube, lambda: not jobs(kube) and not kube.store.items["pods"])


async def test_a_payload_that_is_no_json_is_refused_before_anything_is_made(
    kube: FakeKube, sink: Sink
) -> None:
    async with runtime_on(kube) as runtime:
        with pytest.raises(TaskFailure, match=r"the payload of r\.1"):
            await runtime.launch(Attempt("r", 1), {"value": float("nan"), "at": object()})
    assert kube.bodies == []


# --- a server that says no -----------------------------------------------------------------------------


async def test_a_server_that_is_asked_too_much_slows_us_down(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        kube.refuse = [("POST", 429)]
        with pytest.raises(Throttled) as caught:
            await place.launch({"do": "reward"})
        assert caught.value.retry_after_s == 1.0
        assert (await place.wait(await place.launch({"do": "reward"}))).failure is None


async def test_a_full_quota_slows_us_down(kube: FakeKube, sink: Sink) -> None:
    kube.quota_jobs = 1
    async with placed(kube, sink) as place:
        first = await place.launch({"do": "beat"}, "first")
        with pytest.raises(Throttled, match="exceeded quota"):
            await place.launch({"do": "reward"}, "second")
        await place.runtime.stop(first)
        assert (await place.wait(await place.launch({"do": "reward"}, "second"))).failure is None


async def test_a_job_that_gets_no_pod_for_want_of_quota_slows_us_down_and_is_gone(
    kube: FakeKube, sink: Sink
) -> None:
    kube.nodes.quota_pods = 0
    async with placed(kube, sink) as place:
        with pytest.raises(Throttled, match="exceeded quota"), anyio.fail_after(20):
            await place.launch({"do": "reward"})
        assert jobs(kube) == []
        kube.nodes.quota_pods = None
        assert (await place.wait(await place.launch({"do": "reward"}))).failure is None


async def test_a_server_that_stumbles_is_asked_again(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        kube.refuse = [("POST", 500), ("POST", 503), ("DELETE", 500)]
        attempt = await place.launch({"do": "beat"})
        await place.runtime.stop(attempt)
        assert jobs(kube) == []
        assert not kube.refuse


async def test_credentials_that_may_not_create_fail_the_launch_with_the_servers_words(
    kube: FakeKube, sink: Sink
) -> None:
    kube.denied = {("create", "jobs")}
    async with placed(kube, sink) as place:
        with pytest.raises(InfrastructureFailure, match="cannot create resource"):
            await place.launch({"do": "reward"})


# --- others --------------------------------------------------------------------------------------------


async def test_a_second_launcher_finds_the_first_ones_session(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as first, placed(kube, sink) as second:
        attempt = await first.launch({"do": "sleep", "seconds": 2.0})
        await second.launch({"do": "sleep", "seconds": 2.0})
        assert (await first.wait(attempt)).failure is None
        assert (await second.wait(attempt)).failure is None
        assert len(sink.told("began")) == 1 and len(kube.bodies) == 1


async def test_an_agent_that_forgets_payloads_gets_each_one_once(
    kube: FakeKube, sink: Sink, tmp_path: Path
) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    kube.nodes.images["plain:1"] = [sys.executable, str(tmp_path / "plain.py"), "{port}"]
    async with placed(kube, sink, image="plain:1") as first, placed(kube, sink, image="plain:1") as second:
        attempt = await first.launch({"seconds": 2.0})
        await second.launch({"seconds": 2.0})
        async with runtime_on(kube) as third:
            assert await third.adopt(attempt) is True
            assert (await third.wait(attempt)).failure is None
            assert (await third.logs(attempt)).count("payload") == 1
        assert (await second.wait(attempt)).failure is None


async def test_a_job_whose_launcher_died_before_its_payload_is_not_adopted(
    kube: FakeKube, sink: Sink
) -> None:
    image = image_of(kube, f"{ACTING}:act")
    kube.make_job(job_for(KubernetesOptions(image=image), "run", "r.1"))
    await until(kube, lambda: bool(jobs(kube)) and "True" in _readiness(kube, "r.1"))
    async with placed(kube, sink) as place:
        assert await place.runtime.adopt(Attempt("r", 1)) is False
        attempt = await place.launch({"do": "reward", "value": 0.5})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.5
    assert kube.bodies == [] and jobs(kube) == []


async def test_a_job_of_another_run_is_neither_taken_nor_touched(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, name="theirs") as theirs, placed(kube, sink, name="ours") as ours:
        attempt = await theirs.launch({"do": "beat"})
        with pytest.raises(InfrastructureFailure, match="is a Job of 'theirs'"):
            await ours.launch({"do": "beat"})
        await ours.runtime.stop(attempt)
        assert await ours.runtime.adopt(Attempt("r", 1)) is False
        assert await ours.runtime.list() == []
        assert await ours.runtime.logs(attempt) == ""
        assert (await ours.runtime.status(attempt)).phase is Phase.UNKNOWN
        assert (await theirs.runtime.status(attempt)).phase is Phase.RUNNING


async def test_an_attempt_is_adopted_even_when_the_server_is_away(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as first, placed(kube, sink) as second:
        attempt = await first.launch({"do": "sleep", "seconds": 8.0})
        kube.down = True
        assert await second.runtime.adopt(attempt) is None
        kube.down = False
        assert (await second.wait(attempt)).failure is None
        assert await second.reward(attempt) == 1.0


def _readiness(kube: FakeKube, session_id: str) -> list[str]:
    """Of its pod, once it has one."""
    pods = kube.store.items["pods"].values()
    ours = [pod for pod in pods if pod["metadata"]["annotations"].get("afield.session") == session_id]
    return [c["status"] for pod in ours for c in pod["status"].get("conditions", []) if c["type"] == "Ready"]
