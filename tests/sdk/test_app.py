"""The HTTP contract of an agent's container, of both apps that offer it, and `python -m afield.sdk.serve`."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio
import pytest

import afield
from afield.errors import UsageError
from afield.sdk.agent import AgentEntry
from afield.sdk.app import BODY_BYTES
from afield.sdk.runner import Runner
from afield.sdk.serve import load
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt
from afield.wire import OutcomeRecord
from agents.invoking import EXP, invocation, payload
from agents.places import waiting_for
from support.paths import TESTS

with warnings.catch_warnings():
    # bedrock-agentcore still declares its models the way pydantic 1 did.
    warnings.simplefilter("ignore", DeprecationWarning)
    from afield.sdk.agentcore import RolloutApp

pytestmark = pytest.mark.anyio

AGENTS = TESTS / "agents"
AnyApp = afield.App | RolloutApp


@pytest.fixture(params=[afield.App, RolloutApp])
def app(request: pytest.FixtureRequest) -> AnyApp:
    return request.param()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FilesTransport]:
    async with FilesTransport(tmp_path / "store") as transport:
        yield transport


TENANT = "x-amzn-bedrock-agentcore-runtime-custom-tenant"


async def call(
    app: AnyApp,
    method: str,
    path: str,
    chunks: list[bytes] | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
    raw: bool = False,
) -> tuple[int, Any]:
    """One request to an ASGI app, the way a server makes it."""
    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode()}
    scope |= {
        "query_string": b"",
        "headers": headers or [],
        "scheme": "http",
        "server": ("agent", 8080),
        "root_path": "",
    }
    parts = chunks or [b""]
    incoming = [
        {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
        for i, part in enumerate(parts)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        if raw and not incoming:
            await anyio.sleep_forever()  # a stream ends when its client disconnects
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    with anyio.fail_after(60):
        await app(scope, receive, send)
    body = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], body if raw else json.loads(body)


async def invoke(app: AnyApp, body: object) -> tuple[int, Any]:
    return await call(app, "POST", "/invocations", [json.dumps(body).encode()])


async def ping(app: AnyApp) -> Any:
    status, answer = await call(app, "GET", "/ping")
    assert status == 200
    return answer


async def idle(app: AnyApp) -> None:
    with anyio.fail_after(60):
        while (await ping(app))["active"]:
            await anyio.sleep(0.01)


async def record(store: FilesTransport, rollout_id: str = "r") -> OutcomeRecord:
    decision = await store.decision(waiting_for(Attempt(rollout_id, 1)))
    assert isinstance(decision, OutcomeRecord), decision
    return decision


# --- both apps -----------------------------------------------------------------------------------


async def test_a_rollout_that_was_stopped_is_over_soon_and_repeating_is_harmless(app: AnyApp) -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def work(payload: dict) -> dict:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.set()
        return {"rewards": 1.0}

    app.rollout_entrypoint(work)
    assert (await call(app, "DELETE", "/invocations/r.1"))[1] == {"session_id": "r.1", "stopped": False}
    await invoke(app, payload({}, invocation()))
    while not begun.is_set():
        await anyio.sleep(0.01)
    for _ in range(2):
        assert (await call(app, "DELETE", "/invocations/r.1"))[0] == 200
    await idle(app)
    assert cleaned.is_set()
    assert (await call(app, "DELETE", "/invocations/r.1"))[1]["stopped"] is False


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_invocation_is_answered_at_once_and_worked_on_in_the_background(
    app: AnyApp, store: FilesTransport, is_async: bool
) -> None:
    release = threading.Event()
    runs: list[Any] = []

    def work(payload: dict, context: afield.Context) -> dict:
        runs.append(context.session_id)
        # Blocking in an async agent as well: /ping must not care.
        assert release.wait(60)
        return {"rewards": {"correct": 1.0}, "whole": payload["_rollout"]["session_id"]}

    async def work_async(payload: dict, context: afield.Context) -> dict:
        return work(payload, context)

    app.rollout_entrypoint(work_async if is_async else work)
    before = await ping(app)
    assert before["status"] == "Healthy" and before["active"] == []
    body = payload({"q": 1}, invocation(**store.address(EXP)))
    status, answer = await invoke(app, body)
    assert (status, answer["status"], answer["session_id"]) == (200, "processing", "r.1")
    assert answer["data_key"] == "exp/t/r.1.json"
    busy = await ping(app)
    assert busy["status"] == "HealthyBusy" and busy["active"] == ["r.1"]
    assert isinstance(busy["time_of_last_update"], int)
    assert await invoke(app, body) == (200, answer)
    release.set()
    await idle(app)
    assert (await ping(app))["status"] == "Healthy"
    assert await invoke(app, body) == (200, answer)
    assert runs == ["r.1"]
    assert (await record(store)).extra == {"whole": "r.1"}


async def test_the_time_of_the_last_update_follows_the_status(app: AnyApp, store: FilesTransport) -> None:
    release = threading.Event()

    @app.rollout_entrypoint
    def work(payload: dict) -> float:
        return float(release.wait(60))

    healthy = (await ping(app))["time_of_last_update"]
    await anyio.sleep(1.1)
    await invoke(app, payload({}, invocation(**store.address(EXP))))
    busy = (await ping(app))["time_of_last_update"]
    assert healthy < busy
    await anyio.sleep(1.1)
    assert (await ping(app))["time_of_last_update"] == busy
    release.set()
    await idle(app)
    assert busy < (await ping(app))["time_of_last_update"] <= time.time()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda p: p.pop("_rollout"), "_rollout"),
        (lambda p: p["_rollout"].pop("api_key"), "api_key"),
        (lambda p: p["_rollout"].update(base_url="gateway"), "base_url"),
        (lambda p: p["_rollout"].update(attempt="first"), "attempt"),
        (lambda p: p["_rollout"].update(session_id="other.1"), "session_id"),
        (lambda p: p["_rollout"].pop("outcome_url"), "outcome_url"),
        (lambda p: p.update(_rollout=[]), "_rollout"),
    ],
)
async def test_a_payload_that_is_no_rollout_is_refused_before_any_work(
    app: AnyApp, change: Callable[[Any], Any], names: str
) -> None:
    runs: list[Any] = []
    app.rollout_entrypoint(lambda payload: runs.append(payload))
    body = payload({"q": 1}, invocation())
    change(body)
    status, answer = await invoke(app, body)
    assert status == 400 and names in answer["error"]["message"] and answer["error"]["hint"]
    assert not runs and (await ping(app))["active"] == []


@pytest.mark.parametrize("body", [b"", b"{", b"not json", b"\xff\xfe", b"[" * 100_000])
async def test_a_body_that_is_not_json_is_refused(app: AnyApp, body: bytes) -> None:
    app.rollout_entrypoint(lambda payload: 1.0)
    status, answer = await call(app, "POST", "/invocations", [body])
    assert status == 400 and answer["error"]["type"] == "invalid_json"


async def test_a_body_over_the_limit_is_refused(app: AnyApp) -> None:
    app.rollout_entrypoint(lambda payload: 1.0)
    chunk = b" " * (BODY_BYTES // 8)
    status, answer = await call(app, "POST", "/invocations", [chunk] * 9)
    assert status == 413 and "100 MiB" in answer["error"]["message"]


async def test_a_second_entrypoint_is_refused(app: AnyApp) -> None:
    app.rollout_entrypoint(lambda payload: 1.0)
    with pytest.raises(UsageError, match="already has a rollout entrypoint"):
        app.rollout_entrypoint(lambda payload: 2.0)


async def test_several_hundred_agents_run_at_once(app: AnyApp, store: FilesTransport) -> None:
    together = threading.Barrier(300)

    @app.rollout_entrypoint
    def work(payload: dict) -> float:
        together.wait(60)
        return 1.0

    for i in range(300):
        await invoke(app, payload({}, invocation(f"r{i}", **store.address(EXP))))
    await idle(app)
    everyone = [waiting_for(Attempt(f"r{i}", 1)) for i in range(300)]
    assert len(await store.sweep(everyone)) == 300


async def test_other_paths_and_methods_say_what_there_is() -> None:
    app = afield.App()
    assert (await call(app, "GET", "/"))[0] == 404
    assert (await call(app, "GET", "/invocations"))[0] == 405
    status, answer = await invoke(app, payload({}, invocation()))
    assert status == 500 and "@app.rollout_entrypoint" in answer["error"]["hint"]


async def test_an_outcome_that_cannot_be_delivered_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = afield.App()
    app.rollout_entrypoint(lambda payload: 1.0)
    await invoke(app, payload({}, invocation(outcome_url="file:relative")))
    await idle(app)
    assert "r.1 outcome lost" in caplog.text


def test_an_async_agent_that_runs_at_shutdown_is_cancelled_without_an_outcome() -> None:
    begun, cleaned, ended = threading.Event(), threading.Event(), threading.Event()
    delivered: list[Any] = []

    async def work(payload: dict[str, Any]) -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1.0

    entry = AgentEntry(fn=work, whole_payload=True, takes_context=False)
    runner = Runner(entry, deliver=lambda *a: bool(delivered.append(a)), ended=lambda _: ended.set())
    runner.accept(payload({}, invocation()))
    assert begun.wait(60)
    runner.close()
    assert cleaned.wait(60) and ended.wait(60)
    assert delivered == []


def test_an_async_agent_that_is_about_to_begin_at_shutdown_has_no_outcome_either() -> None:
    calls = [threading.Event(), threading.Event()]
    release, ended = threading.Event(), threading.Semaphore(0)
    delivered: list[Any] = []

    async def work(number: int) -> float:
        if number == 1:
            await asyncio.Event().wait()
        release.wait(60)  # the event loop is busy when the second one is submitted
        raise OSError("no space left")

    def call(payload: dict[str, Any]) -> Coroutine[Any, Any, float]:
        calls[payload["n"]].set()
        return work(payload["n"])

    entry = AgentEntry(fn=call, whole_payload=True, takes_context=False)
    runner = Runner(entry, deliver=lambda *a: bool(delivered.append(a)), ended=lambda _: ended.release())
    for number, called in enumerate(calls):
        runner.accept(payload({"n": number}, invocation(rollout_id=f"r{number}")))
        assert called.wait(60)
    runner.close()
    release.set()
    assert ended.acquire(timeout=60) and ended.acquire(timeout=60)
    assert delivered == []


async def test_what_still_runs_at_shutdown_is_logged(app: AnyApp, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    app.rollout_entrypoint(lambda payload: release.wait(60))
    messages: list[Any] = [{"type": "lifespan.startup"}]
    sent: list[Any] = []
    shutdown = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await shutdown.wait()
        return {"type": "lifespan.shutdown"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async with anyio.create_task_group() as group:
        group.start_soon(app, {"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
        await invoke(app, payload({}, invocation(outcome_url="file:relative")))
        shutdown.set()
    release.set()
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert "r.1 running at shutdown" in caplog.text
    await idle(app)


async def test_the_agentcore_apps_own_tracking_says_busy() -> None:
    app = RolloutApp()
    task = app.add_async_task("something of the agent's own")
    assert (await ping(app))["status"] == "HealthyBusy"
    app.complete_async_task(task)
    assert (await ping(app))["status"] == "Healthy"


@pytest.mark.parametrize("production_first", [True, False])
async def test_an_agentcore_app_serves_production_and_rollouts(
    production_first: bool, store: FilesTransport
) -> None:
    app = RolloutApp()

    def rollouts(payload: dict[str, Any], context: afield.Context) -> dict[str, Any]:
        return {"reward": 1.0, "tenant": context.request_headers.get(TENANT)}

    async def production(payload: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"said": payload["prompt"], "tenant": context.request_headers[TENANT]}

    both = [app.entrypoint, app.rollout_entrypoint]
    for decorate in both if production_first else reversed(both):
        decorate(production if decorate == app.entrypoint else rollouts)
    headers = [(TENANT.encode(), b"acme")]
    body = json.dumps({"prompt": "Hi"}).encode()
    assert await call(app, "POST", "/invocations", [body], headers) == (200, {"said": "Hi", "tenant": "acme"})
    body = json.dumps(payload({}, invocation(**store.address(EXP)))).encode()
    status, _ = await call(app, "POST", "/invocations", [body], headers)
    assert status == 200
    await idle(app)
    assert (await record(store)).extra == {"tenant": "acme"}


async def test_streams_of_a_production_entrypoint_stay_streams() -> None:
    app = RolloutApp()
    app.rollout_entrypoint(lambda payload: 1.0)

    @app.entrypoint
    async def production(payload: dict[str, Any]) -> AsyncIterator[str]:
        yield "one"
        yield "two"

    status, body = await call(app, "POST", "/invocations", [b'{"prompt": "Hi"}'], raw=True)
    assert status == 200 and body.count(b"data: ") == 2


# --- serve ---------------------------------------------------------------------------------------


@contextmanager
def serving(target: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "afield.sdk.serve", target, "--watch-stdin", *options]
    command += ["--unsigned", "--outcome-root", "/"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def request(url: str, body: object | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": "x" * 33}
    with urlopen(Request(url, data, headers), timeout=30) as response:
        return json.loads(response.read())


@pytest.mark.parametrize(
    ("target", "extra"),
    [
        ("served.py:app", {"was_whole": True}),
        ("served.py:invoke", {"was_whole": True}),
        ("served.py:plain", {"was_whole": False, "session": "r.1"}),
        ("toolkit_style.py:app", {"same_session": True}),
    ],
)
async def test_every_kind_of_target_is_served(target: str, extra: Any, store: FilesTransport) -> None:
    with serving(str(AGENTS / target)) as (_, port):
        base = f"http://127.0.0.1:{port}"
        assert request(f"{base}/ping")["status"] == "Healthy"
        body = payload({"value": 0.5}, invocation(**store.address(EXP)))
        assert request(f"{base}/invocations", body)["status"] == "processing"
        assert await store.hints(EXP, 30) == [Attempt("r", 1)]
        with pytest.raises(HTTPError, match="400"):
            request(f"{base}/invocations", {"value": 1})
    kept = await record(store)
    assert kept.outcome.reward == 0.5 and kept.extra == extra


def test_a_module_can_be_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(AGENTS.parent))
    assert load("agents.served:app").runner is not None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no-colon", "must be path/to/file.py:name"),
        ("missing.py:agent", "there is no file"),
        (f"{AGENTS / 'served.py'}:agnet", "it has: app, empty, invoke, plain"),
        (f"{AGENTS / 'served.py'}:empty", "@empty.rollout_entrypoint"),
        (f"{AGENTS / 'served.py'}:__name__", "an agent must be a function"),
        ("no_such_package.module:agent", "No module named 'no_such_package'"),
    ],
)
def test_what_cannot_be_served_ends_with_2_and_says_why(target: str, said: str) -> None:
    command = [sys.executable, "-m", "afield.sdk.serve", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and said in done.stderr


def test_a_file_that_fails_to_import_shows_its_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nraise ValueError('at import')\n")
    with pytest.raises(UsageError, match=r"broken\.py.*line 2(.|\n)*ValueError: at import"):
        load(f"{broken}:agent")


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "afield.sdk.serve",
            f"{AGENTS / 'served.py'}:app",
            "--port",
            str(port),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and f"port {port} on 127.0.0.1" in done.stderr


def test_it_ends_when_its_stdin_does() -> None:
    with serving(f"{AGENTS / 'served.py'}:app") as (process, _):
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) != 0


def test_sigterm_ends_it_and_what_was_running_is_logged(tmp_path: Path) -> None:
    with serving(f"{AGENTS / 'acting.py'}:act") as (process, port):
        body = payload({"do": "hang"}, invocation(outcome_url=tmp_path.as_uri()))
        request(f"http://127.0.0.1:{port}/invocations", body)
        os.kill(process.pid, signal.SIGTERM)
        process.wait(60)
        assert process.stderr and "r.1 running at shutdown" in process.stderr.read()
