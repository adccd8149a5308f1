"""Harbor server and its client: uploads by digest, runs by key, restarts, cancellation, failures."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import structs
from tests.datasets.test_datasets import harbor_task

from afield.datasets.harbor import HarborTask, read_task
from afield.errors import (
    InfrastructureFailure,
    PolicyFailure,
    RolloutFailure,
    TaskFailure,
    VerifierFailure,
)
from afield.harbor.failures import trial_failure
from afield.harbor.server import HarborApi, HarborRuns
from afield.harbor.server_client import (
    RUNS,
    HarborServer,
    RunRequest,
    RunResponse,
    pack_task,
    read_response,
    run,
)
from afield.harbor.trial import read_result
from afield.sdk.agent import Context
from afield.types import Reason

pytestmark = pytest.mark.anyio
DETAILS = [{"prompt_token_ids": [[1, 2]], "completion_token_ids": [[3]], "logprobs": [[-0.5]]}]


class Trials:
    """Trials that end when they are let go; their reward is the length of the instruction."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, task: HarborTask, request: RunRequest, folder: Path) -> Mapping[str, Any]:
        self.started.append(request.task_id)
        await self.go.wait()
        if error := request.agent.get("error"):
            return {"exception_info": {"exception_type": error, "exception_message": "it broke"}}
        rewards = {"reward": float(len(task.instruction))}
        return {"verifier_result": {"rewards": rewards}, "agent_result": {"rollout_details": DETAILS}}


class Served:
    def __init__(self, url: str, trials: Trials, requests: list[str]) -> None:
        self.url, self.trials, self.requests = url, trials, requests
        self.on_submission: Callable[[], object] = lambda: None

    def uploads(self) -> int:
        return sum(line.startswith("PUT") for line in self.requests)

    def client(self, **options: Any) -> HarborServer:
        return HarborServer(self.url, **{"poll_interval_s": 0.01, "unavailable_timeout_s": 0.0, **options})


@asynccontextmanager
async def serving(directory: Path, port: int = 0, token: str = "") -> AsyncIterator[Served]:
    trials = Trials()
    app = HarborApi(HarborRuns(directory, trials.run), token).application()
    requests: list[str] = []
    served: list[Served] = []

    async def note(request: web.Request, response: web.StreamResponse) -> None:
        requests.append(f"{request.method} {request.path} {response.status}")
        if request.method == "POST" and served:
            served[0].on_submission()

    app.on_response_prepare.append(note)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, port = runner.addresses[0]
        served.append(Served(f"http://{host}:{port}", trials, requests))
        yield served[0]
    finally:
        await runner.cleanup()


@pytest.fixture
def task(tmp_path: Path) -> HarborTask:
    return read_task(harbor_task(tmp_path / "tasks" / "one"))


def request(key: str, **agent: Any) -> RunRequest:
    return RunRequest(
        job_id="g", task_id=key, task_path="/tasks/one", agent=agent, llm_proxy_url="http://127.0.0.1:1/v1"
    )


async def test_run_is_polled_to_its_result(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        ended = await client.wait(await client.submit(request("r.1"), task))
    assert (ended.status, ended.rewards) == ("completed", {"reward": float(len(task.instruction))})
    assert ended.rollout_details == DETAILS


async def test_task_is_uploaded_once_until_it_changes(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served:
        for number in range(3):
            async with served.client() as client:
                await client.wait(await client.submit(request(f"r{number}.1"), task))
        assert served.uploads() == 1
        (task.path / "instruction.md").write_text("Another.\n")
        changed = read_task(task.path)
        async with served.client() as client:
            ended = await client.wait(await client.submit(request("r9.1"), changed))
        assert (served.uploads(), ended.rewards) == (2, {"reward": 9.0})


async def test_batch_uploads_each_task_once(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        runs = [(request(f"r{number}.1"), task) for number in range(8)]
        ids = await client.submit_batch(runs)
        ended = await asyncio.gather(*(client.wait(run_id) for run_id in ids))
    assert ids == [f"r{number}.1" for number in range(8)]
    assert {run.status for run in ended} == {"completed"}
    assert served.uploads() == 1
    assert sum(line.startswith(f"POST {RUNS}") for line in served.requests) == 1


async def test_clients_that_upload_one_task_at_once_all_get_their_runs(
    tmp_path: Path, task: HarborTask
) -> None:
    (task.path / "tests" / "data").write_bytes(bytes(4_000_000))  # takes a while to unpack
    task = read_task(task.path)
    archive = pack_task(task.path)
    runs = HarborRuns(tmp_path / "state", Trials().run)
    runs.open()
    digests = await asyncio.gather(
        *(asyncio.to_thread(runs.add_task, archive, task.digest) for _ in range(16))
    )
    assert set(digests) == {task.digest}
    assert [path.name for path in (tmp_path / "state" / "tasks").iterdir()] == [task.digest]


async def test_answer_that_is_no_harbor_servers_is_an_infrastructure_failure(task: HarborTask) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>Sign in</html>", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        with pytest.raises(InfrastructureFailure, match=r"does not answer as a Harbor server: .*Sign in"):
            async with HarborServer(f"http://{host}:{port}", unavailable_timeout_s=0.0):
                pass
    finally:
        await runner.cleanup()


async def test_repeated_key_is_the_same_run(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served:
        served.trials.go.clear()
        async with served.client() as client:
            first = await client.submit(request("r.1"), task)
        async with served.client() as client:  # after a restart of the client
            assert await client.submit(request("r.1"), task) == first
            served.trials.go.set()
            assert (await client.wait(first)).status == "completed"
            assert await client.submit(request("r.1"), task) == first
    assert served.trials.started == ["r.1"]


async def test_results_survive_a_restart_and_interrupted_runs_fail(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        await client.wait(await client.submit(request("done.1"), task))
    # A killed server leaves the record of a running trial.
    left = tmp_path / "state" / "runs" / "left.1.json"
    left.write_bytes(msgspec.json.encode(RunResponse(run_id="left.1", status="running")))
    async with serving(tmp_path / "state") as served, served.client() as client:
        assert (await client.wait("done.1")).rewards == {"reward": float(len(task.instruction))}
        with pytest.raises(InfrastructureFailure, match="restarted during the run"):
            read_response(await client.wait("left.1"))
        assert not await client.upload(task)


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    os.utime(path, (then, then))


async def test_old_runs_and_tasks_are_deleted_and_used_ones_kept(tmp_path: Path, task: HarborTask) -> None:
    trials, state = Trials(), tmp_path / "state"
    runs = HarborRuns(state, trials.run, keep_hours=2)
    runs.open()
    digest = runs.add_task(pack_task(task.path))

    def submit(key: str) -> None:
        runs.submit(structs.replace(request(key), task_digest=digest))
        (state / "trials" / key).mkdir()

    for key in ("old.1", "new.1"):
        submit(key)
    while not all(run and run.status == "completed" for run in map(runs.get, ("old.1", "new.1"))):
        await asyncio.sleep(0.01)
    trials.go.clear()
    submit("running.1")
    for path in ("runs/old.1.json", "runs/running.1.json", f"tasks/{digest}"):
        age(state / path, 3)
    await runs.delete_old()
    assert {path.name for path in (state / "trials").iterdir()} == {"new.1", "running.1"}
    assert runs.get("old.1") is None and runs.get("new.1") and runs.get("running.1")
    assert runs.has_task(digest)
    await runs.cancel("running.1")
    age(state / "tasks" / digest, 3)
    assert runs.has_task(digest)  # a client is about to submit it
    await runs.delete_old()
    assert runs.has_task(digest)
    age(state / "tasks" / digest, 3)
    await runs.delete_old()
    assert not any((state / "tasks").iterdir())
    await runs.close()


async def test_cancelled_run_ends(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        served.trials.go.clear()
        run_id = await client.submit(request("r.1"), task)
        await client.cancel(run_id)
        ended = await client.wait(run_id)
        assert ended.status == "cancelled"
        with pytest.raises(InfrastructureFailure) as caught:
            read_response(ended)
        assert caught.value.reason is Reason.CANCELLED


async def test_run_that_is_cancelled_before_its_submission_arrives_never_starts(
    tmp_path: Path, task: HarborTask
) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        await client.cancel("r.1")
        run_id = await client.submit(request("r.1"), task)
        assert (await client.wait(run_id)).status == "cancelled"
    assert served.trials.started == []


async def test_agent_that_is_cancelled_during_its_submission_leaves_no_run(
    tmp_path: Path, task: HarborTask
) -> None:
    async with serving(tmp_path / "state") as served:
        served.trials.go.clear()
        rollout = context(url=served.url, tasks=str(task.path.parent))
        agent = asyncio.create_task(run({"id": "one"}, rollout))
        served.on_submission = agent.cancel  # the run has started, and the answer is on its way
        with pytest.raises(asyncio.CancelledError):
            await agent
        async with served.client() as client:
            assert (await client.wait("r.1", timeout_s=5.0)).status == "cancelled"


@pytest.mark.parametrize("loop_turns", range(6))
async def test_run_is_cancelled_however_far_it_has_come(
    tmp_path: Path, task: HarborTask, loop_turns: int
) -> None:
    trials = Trials()
    trials.go.clear()
    runs = HarborRuns(tmp_path / "state", trials.run)
    runs.open()
    digest = runs.add_task(pack_task(task.path))
    run_id = runs.submit(structs.replace(request("r.1"), task_digest=digest))
    for _ in range(loop_turns):
        await asyncio.sleep(0)
    await runs.cancel(run_id)
    run = runs.get(run_id)
    assert run is not None and run.status == "cancelled"
    await runs.close()


async def test_run_that_takes_too_long_is_cancelled(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        served.trials.go.clear()
        run_id = await client.submit(request("r.1"), task)
        with pytest.raises(InfrastructureFailure, match=r"did not end within 0\.1 s") as caught:
            await client.wait(run_id, timeout_s=0.1)
        assert caught.value.reason is Reason.TIMEOUT
        assert (await client.wait(run_id)).status == "cancelled"


async def test_server_that_is_gone_is_an_infrastructure_failure(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        run_id = await client.submit(request("r.1"), task)
        with pytest.raises(InfrastructureFailure, match="does not know the run other"):
            await client.wait("other")
        await client.wait(run_id)
    with pytest.raises(InfrastructureFailure, match="does not answer") as caught:
        async with served.client():
            pass
    assert caught.value.reason is Reason.LAUNCH


async def test_client_continues_when_the_server_is_back(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        await client.wait(await client.submit(request("r.1"), task))

    async def poll() -> RunResponse:
        async with served.client(unavailable_timeout_s=60.0) as client:
            return await client.wait("r.1")

    polling = asyncio.create_task(poll())
    await asyncio.sleep(0)
    async with serving(tmp_path / "state", int(served.url.rpartition(":")[2])):
        assert (await polling).status == "completed"


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_wrong_token_is_refused(tmp_path: Path, task: HarborTask, token: str) -> None:
    async with serving(tmp_path / "state", token="right") as served:
        async with served.client(token=token) as client:
            with pytest.raises(TaskFailure, match="HTTP 401"):
                await client.submit(request("r.1"), task)
        async with served.client(token="right") as client:
            assert await client.submit(request("r.1"), task) == "r.1"


async def test_damaged_upload_is_refused(tmp_path: Path, task: HarborTask) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        with pytest.raises(TaskFailure, match="HTTP 422: the archive has digest"):
            await client.upload(structs.replace(task, digest="0" * 64))
        (task.path / "task.toml").write_text("agent = 3\n")
        with pytest.raises(TaskFailure, match=r"task\.toml:1: agent = 3"):
            await client.submit(request("r.1"), structs.replace(task, digest="1" * 64))
    assert not any((tmp_path / "state" / "tasks").iterdir())


class Published:
    """A server with the published protocol alone, as other programs have it."""

    def __init__(self) -> None:
        self.archives: list[int] = []
        self.polls = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post(RUNS, self.submit),
                web.get(RUNS + "/{run_id}/status", self.status),
                web.get(RUNS + "/{run_id}/result", self.result),
            ]
        )
        return app

    async def submit(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert json.loads(str(form["metadata"]))["task_id"]
        archive = form["task_archive"]
        assert isinstance(archive, web.FileField)
        self.archives.append(len(archive.file.read()))
        return web.json_response({"run_id": f"run-{len(self.archives)}"})

    async def status(self, request: web.Request) -> web.Response:
        self.polls += 1
        return web.json_response({"status": "running" if self.polls < 3 else "failed"})

    async def result(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"run_id": request.match_info["run_id"], "status": "failed", "rewards": {"reward": 0.0}}
            | {"error": "harbor.trial.errors.VerifierTimeoutError: too slow", "retry_count": 0}
        )


async def test_server_with_the_published_protocol_alone(tmp_path: Path, task: HarborTask) -> None:
    published = Published()
    runner = web.AppRunner(published.application())
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with HarborServer(f"http://{host}:{port}", poll_interval_s=0.01) as client:
            ids = await client.submit_batch([(request("a.1"), task), (request("b.1"), task)])
            ended = await client.wait(ids[0])
    finally:
        await runner.cleanup()
    assert (ids, len(published.archives)) == (["run-1", "run-2"], 2)
    with pytest.raises(VerifierFailure, match="VerifierTimeoutError: too slow"):
        read_response(ended)


class LosesAnswers(Published):
    """A server that starts a run, and whose first answers to submissions do not reach the client."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.answer = status

    async def submit(self, request: web.Request) -> web.Response:
        if self.answer == 429:  # refused: no run was started
            self.answer = 200
            return web.Response(status=429)
        response = await super().submit(request)
        if self.answer == 0:
            assert request.transport is not None
            request.transport.abort()
        return response if self.answer == 200 else web.Response(status=self.answer or 200)


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("status", [0, 502, 503, 504])
async def test_submission_is_sent_once_to_a_server_that_does_not_recognise_keys(
    task: HarborTask, status: int
) -> None:
    server = LosesAnswers(status)
    async with (
        serving_app(server.application()) as url,
        HarborServer(url, unavailable_timeout_s=30.0) as client,
    ):
        with pytest.raises(InfrastructureFailure, match=r"may have started the run.*'keys'") as caught:
            await client.submit(request("r.1"), task)
    assert caught.value.reason is Reason.LAUNCH
    assert len(server.archives) == 1


async def test_refused_submission_is_sent_again_to_a_server_that_does_not_recognise_keys(
    task: HarborTask,
) -> None:
    server = LosesAnswers(429)
    async with (
        serving_app(server.application()) as url,
        HarborServer(url, unavailable_timeout_s=30.0) as client,
    ):
        assert await client.submit(request("r.1"), task) == "run-1"


@pytest.mark.parametrize(
    ("kind", "failure", "reason"),
    [
        ("AgentTimeoutError", PolicyFailure, Reason.TIMEOUT),
        ("ContextLengthExceededError", PolicyFailure, Reason.CONTEXT),
        ("RewardFileNotFoundError", VerifierFailure, Reason.REWARD),
        ("VerifierTimeoutError", VerifierFailure, Reason.TIMEOUT),
        ("SandboxBuildFailedError", TaskFailure, Reason.LAUNCH),
        ("EnvironmentStartTimeoutError", InfrastructureFailure, Reason.LAUNCH),
        ("APIConnectionError", InfrastructureFailure, Reason.ENGINE),
        ("KeyError", TaskFailure, Reason.RAISED),
    ],
)
async def test_failure_of_a_trial_has_the_kind_of_its_exception(
    tmp_path: Path, task: HarborTask, kind: str, failure: type[RolloutFailure], reason: Reason
) -> None:
    async with serving(tmp_path / "state") as served, served.client() as client:
        ended = await client.wait(await client.submit(request("r.1", error=kind), task))
    with pytest.raises(failure, match="it broke") as caught:
        read_response(ended)
    assert caught.value.reason is reason


def test_codes_of_the_gateway_are_policy_failures() -> None:
    failure = trial_failure("BadRequestError", "Error code: 400 - {'error': {'code': 'budget_exhausted'}}")
    assert (type(failure), failure.reason) == (PolicyFailure, Reason.BUDGET)


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ({"verifier_result": {"rewards": {"reward": 1, "speed": 2}}}, 1),
        (
            {
                "verifier_result": {"rewards": {"speed": 2}},
                "exception_info": {"exception_type": "AgentTimeoutError"},
            },
            2,
        ),
    ],
)
def test_verified_trial_keeps_its_reward(result: dict[str, Any], reward: float) -> None:
    assert read_result(result)["reward"] == reward


@pytest.mark.parametrize("result", [{}, {"verifier_result": {"rewards": {"a": 1, "b": 2}}}])
def test_trial_without_one_reward_is_a_verifier_failure(result: dict[str, Any]) -> None:
    with pytest.raises(VerifierFailure):
        read_result(result)


def context(**args: Any) -> Context:
    return Context(
        base_url="http://127.0.0.1:1/s/x",
        openai_base_url="http://127.0.0.1:1/s/x/v1",
        api_key="key",
        model_id="m",
        session_id="r.1",
        rollout_id="r",
        attempt=1,
        group_id="g",
        input_id="one",
        exp_id="exp",
        args=args,
    )


async def test_agent_has_a_server_run_its_rollout(tmp_path: Path, task: HarborTask) -> None:
    tasks = str(task.path.parent)
    async with serving(tmp_path / "state") as served:
        rollout = context(url=served.url, tasks=tasks, poll_interval_s=0.01)
        assert (await run({"id": "one"}, rollout))["reward"] == float(len(task.instruction))
        served.trials.go.clear()
        again = asyncio.create_task(run({"id": "one"}, structs.replace(rollout, session_id="r.2")))
        while served.trials.started[-1] != "r.2":
            await asyncio.sleep(0.01)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        async with served.client() as client:
            assert (await client.wait("r.2")).status == "cancelled"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "missing required field `url`"),
        ({"url": "server:80"}, "must be an address"),
        ({"url": "http://127.0.0.1:9", "tasks": "gone"}, "has no directory here"),
        ({"url": "http://127.0.0.1:9", "harnes": "x"}, "unknown field `harnes`"),
    ],
)
async def test_wrong_argument_is_a_task_failure(args: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFailure, match=message) as caught:
        await run({"id": "one"}, context(**args))
    assert caught.value.reason is Reason.LAUNCH
