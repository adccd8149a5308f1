"""Agents as Jobs: watches that break, a server that says no, and others who use the same cluster."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from afield.errors import InfrastructureFailure, RateLimited
from afield.interfaces.runtime import Phase
from afield.runtimes.kubernetes.objects import job_for, job_name
from afield.settings.runtimes import KubernetesOptions
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Reason
from agents.places import ACTING
from agents.sink import Sink
from support.fake_kube import FakeKube
from support.kubernetes import asked, fake_kube, image_of, jobs, placed, readiness, runtime_on, until

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
        row = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        posts.append(time.time() + row["seconds"])
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


# --- watching ----------------------------------------------------------------------------------------


async def test_a_cut_watch_is_taken_up_where_it_was(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        attempt = await place.launch({"do": "beat"})
        await sink.until_told("beat")
        for _ in range(3):
            await until(lambda: kube.watches == 2)
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
        await until(lambda: kube.watches == 2)
        # In one breath, so that no watch sees it: the Job and its pod go, and so does the memory of it.
        pod = kube.pod_of("lost.1")
        kube.nodes.running[pod].kill()
        kube.store.items["pods"].pop(pod)
        kube.store.items["jobs"].pop(job_name("run", "lost.1"))
        kube.store.compact()
        kube.store.wake()
        ended = await place.wait(lost)
        assert ended.failure and ended.failure.reason is Reason.DIED and "deleted" in ended.failure.message
        assert (await place.runtime.status(kept)).phase is Phase.RUNNING
        await sink.until_told("beat", kept.session_id)
        again = await place.launch({"do": "reward"}, "again")
        assert (await place.wait(again)).failure is None
    assert asked(kube, "GET", "/pods", limit="500") >= 2


async def test_temporarily_unavailable_api_server_fails_no_attempt(kube: FakeKube, sink: Sink) -> None:
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
    kube.expired_pages = 2
    async with runtime_on(kube) as runtime:
        assert len({live.session_id for live in await runtime.list()}) == 1_201


# --- a server that says no ---------------------------------------------------------------------------


async def test_a_server_that_is_asked_too_much_slows_us_down(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as place:
        kube.refuse = [("POST", 429)]
        with pytest.raises(RateLimited) as caught:
            await place.launch({"do": "reward"})
        assert caught.value.retry_after_s == 1.0
        assert (await place.wait(await place.launch({"do": "reward"}))).failure is None


async def test_a_full_quota_slows_us_down(kube: FakeKube, sink: Sink) -> None:
    kube.quota_jobs = 1
    async with placed(kube, sink) as place:
        first = await place.launch({"do": "beat"}, "first")
        with pytest.raises(RateLimited, match="exceeded quota"):
            await place.launch({"do": "reward"}, "second")
        await place.runtime.stop(first)
        assert (await place.wait(await place.launch({"do": "reward"}, "second"))).failure is None


async def test_job_without_pod_quota_raises_rate_limited_and_is_deleted(kube: FakeKube, sink: Sink) -> None:
    kube.nodes.quota_pods = 0
    async with placed(kube, sink) as place:
        with pytest.raises(RateLimited, match="exceeded quota"), anyio.fail_after(60):
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


# --- others ------------------------------------------------------------------------------------------


async def test_a_second_launcher_finds_the_first_ones_session(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as first, placed(kube, sink) as second:
        attempt = await first.launch({"do": "sleep", "seconds": 2.0})
        await second.launch({"do": "sleep", "seconds": 2.0})
        assert (await first.wait(attempt)).failure is None
        assert (await second.wait(attempt)).failure is None
        assert len(sink.told("began")) == 1 and len(kube.bodies) == 1


async def test_agent_that_answers_every_payload_alike_gets_each_payload_once(
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
            assert (await second.wait(attempt)).failure is None
            assert (await third.logs(attempt)).count("payload") == 1


async def test_a_job_whose_launcher_died_before_its_payload_is_not_adopted(
    kube: FakeKube, sink: Sink
) -> None:
    image = image_of(kube, f"{ACTING}:act")
    kube.make_job(job_for(KubernetesOptions(image=image), "run", "r.1", image))
    await until(lambda: bool(jobs(kube)) and "True" in readiness(kube, "r.1"))
    async with placed(kube, sink) as place:
        assert await place.runtime.adopt(Attempt("r", 1)) is False
        attempt = await place.launch({"do": "reward", "value": 0.5})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.5
    assert kube.bodies == [] and jobs(kube) == []


async def test_runs_with_sessions_of_one_name_do_not_meet(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink, name="theirs") as theirs, placed(kube, sink, name="ours") as ours:
        attempt = await theirs.launch({"do": "beat"})
        assert await ours.runtime.adopt(Attempt("r", 1)) is False
        assert await ours.runtime.list() == []
        assert await ours.runtime.logs(attempt) == ""
        assert (await ours.runtime.status(attempt)).phase is Phase.UNKNOWN
        await ours.runtime.stop(attempt)
        assert (await ours.wait(await ours.launch({"do": "reward", "value": 0.5}, n=2))).failure is None
        await ours.launch({"do": "beat"}, n=3)
        await theirs.launch({"do": "beat"}, n=3)
        await ours.runtime.stop(Attempt("r", 3))
        assert sorted(live.session_id for live in await theirs.runtime.list()) == ["r.1", "r.3"]
        assert {live.phase for live in await theirs.runtime.list()} == {Phase.RUNNING}


async def test_an_attempt_is_adopted_even_when_the_server_is_unavailable(kube: FakeKube, sink: Sink) -> None:
    async with placed(kube, sink) as first, placed(kube, sink) as second:
        attempt = await first.launch({"do": "beat"})
        kube.down = True
        assert await second.runtime.adopt(attempt) is None
        kube.down = False
        sink.enough(attempt.session_id)
        assert (await second.wait(attempt)).failure is None
        assert await second.reward(attempt) == 1.0
