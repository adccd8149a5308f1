"""The fake API server says what a real one would, where the runtime depends on it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from afield.runtimes.kubernetes.objects import job_for
from afield.settings.runtimes import KubernetesOptions
from support.fake_kube import NAMESPACE, TOKEN, FakeKube
from support.fake_kube_store import Problem, matches
from support.kubernetes import fake_kube, until

pytestmark = pytest.mark.anyio
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[FakeKube]:
    async with fake_kube(tmp_path / "kube") as kube:
        kube.nodes.images["sleep:1"] = SLEEPER
        yield kube


@pytest.fixture
async def http(kube: FakeKube) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(kube.url, headers=headers) as session:
        yield session


def a_job(session_id: str = "r.1", **options: Any) -> dict[str, Any]:
    return job_for(KubernetesOptions(image="sleep:1", **options), "run", session_id, "sleep:1")


async def said(response: Any) -> tuple[int, Any]:
    async with response as answer:
        return answer.status, json.loads(await answer.text())


@pytest.mark.parametrize(
    ("selector", "fits"),
    [
        ("", True),
        ("a=1", True),
        ("a==1,b!=1", True),
        ("a=2", False),
        ("a in (1, 2),b", True),
        ("a notin (1,2)", False),
        ("!c", True),
        ("c!=1", True),
        ("!a", False),
        ("c", False),
        ("c in (1)", False),
    ],
)
def test_selectors_mean_what_they_mean_to_kubernetes(selector: str, fits: bool) -> None:
    assert matches({"metadata": {"labels": {"a": "1", "b": "2"}}}, selector) is fits


def test_an_invalid_selector_is_refused() -> None:
    with pytest.raises(Problem):
        matches({"metadata": {}}, "a = = b")


async def test_the_same_name_twice_is_a_conflict(http: aiohttp.ClientSession) -> None:
    assert (await said(http.post(JOBS, json=a_job())))[0] == 201
    code, status = await said(http.post(JOBS, json=a_job()))
    assert (code, status["kind"], status["reason"]) == (409, "Status", "AlreadyExists")


async def test_a_dry_run_makes_nothing_and_still_judges(kube: FakeKube, http: aiohttp.ClientSession) -> None:
    assert (await said(http.post(JOBS, json=a_job(), params={"dryRun": "All"})))[0] == 201
    wrong = a_job(labels={"team": "not a label!"})
    code, status = await said(http.post(JOBS, json=wrong, params={"dryRun": "All"}))
    assert (code, status["reason"]) == (422, "Invalid")
    assert not kube.store.items["jobs"]


async def test_a_watch_continues_where_it_was_and_tells_of_later_versions(
    kube: FakeKube, http: aiohttp.ClientSession
) -> None:
    _, first = await said(http.get(JOBS))
    await said(http.post(JOBS, json=a_job("r.1")))
    await said(http.post(JOBS, json=a_job("r.2")))
    params = {"watch": "1", "resourceVersion": first["metadata"]["resourceVersion"], "timeoutSeconds": "1"}
    async with http.get(JOBS, params={**params, "labelSelector": "afield.session=r.2"}) as answer:
        changes = [json.loads(line) async for line in answer.content]
    assert {c["object"]["metadata"]["labels"]["afield.session"] for c in changes} == {"r.2"}
    assert changes[0]["type"] == "ADDED"
    versions = [int(c["object"]["metadata"]["resourceVersion"]) for c in changes]
    assert versions == sorted(set(versions))


async def test_a_bookmark_carries_a_quiet_watch_forward(http: aiohttp.ClientSession) -> None:
    params = {"watch": "1", "resourceVersion": "100", "allowWatchBookmarks": "true", "timeoutSeconds": "1"}
    await said(http.post(JOBS, json=a_job()))
    async with http.get(JOBS, params={**params, "labelSelector": "afield.run=other"}) as answer:
        changes = [json.loads(line) async for line in answer.content]
    assert {c["type"] for c in changes} == {"BOOKMARK"}
    assert int(changes[-1]["object"]["metadata"]["resourceVersion"]) > 100


async def test_what_was_compacted_is_gone(kube: FakeKube, http: aiohttp.ClientSession) -> None:
    kube.store.compact()
    params = {"watch": "1", "resourceVersion": "100", "timeoutSeconds": "1"}
    async with http.get(PODS, params=params) as answer:
        [change] = [json.loads(line) async for line in answer.content]
    assert (change["type"], change["object"]["code"]) == ("ERROR", 410)


@pytest.mark.parametrize(
    ("how", "pods_stay"), [("Background", False), ("Foreground", False), ("Orphan", True), (None, True)]
)
async def test_who_deletes_a_job_decides_about_its_pods(
    kube: FakeKube, http: aiohttp.ClientSession, how: str | None, pods_stay: bool
) -> None:
    await said(http.post(JOBS, json=a_job()))
    await until(lambda: bool(kube.nodes.running))
    [name] = kube.store.items["jobs"]
    body = {"propagationPolicy": how} if how else {}
    assert (await said(http.delete(f"{JOBS}/{name}", json=body)))[0] == 200
    assert not kube.store.items["jobs"]
    if pods_stay:
        await anyio.sleep(0.3)
        assert kube.store.items["pods"]
    else:
        await until(lambda: not kube.store.items["pods"])
        assert all(running.process.returncode is not None for running in kube.nodes.running.values())
    assert (await said(http.delete(f"{JOBS}/{name}", json=body)))[0] == 404


async def test_a_job_is_not_deleted_for_another_of_its_name(
    kube: FakeKube, http: aiohttp.ClientSession
) -> None:
    await said(http.post(JOBS, json=a_job()))
    [name] = kube.store.items["jobs"]
    code, _ = await said(http.delete(f"{JOBS}/{name}", json={"preconditions": {"uid": "another"}}))
    assert code == 409 and name in kube.store.items["jobs"]


async def test_a_deadline_fails_a_job_and_takes_its_pod(kube: FakeKube, http: aiohttp.ClientSession) -> None:
    await said(http.post(JOBS, json=a_job(job_deadline_s=1, ttl_s=1)))
    [name] = kube.store.items["jobs"]
    ended = [{}]

    def failed() -> bool:
        job = kube.store.items["jobs"].get(name, {})
        ended[0] = next(iter(job.get("status", {}).get("conditions", [])), {})
        return bool(ended[0])

    await until(failed)
    assert (ended[0]["type"], ended[0]["reason"]) == ("Failed", "DeadlineExceeded")
    assert not kube.store.items["pods"]
    await until(lambda: not kube.store.items["jobs"])  # its time to live


async def test_request_without_a_token_gets_401(kube: FakeKube) -> None:
    async with aiohttp.ClientSession(kube.url) as stranger:
        assert (await said(stranger.get(JOBS)))[0] == 401
