"""The local AgentCore server as a client sees it: sessions of an unmodified program, through boto3."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import boto3
import pytest
from anyio.from_thread import start_blocking_portal
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials

from afield.agentcore_local.control_plane import Account
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.sessions import Timings
from support.agentcore_server import (
    IMAGES,
    PROGRAM,
    AgentCoreClient,
    agentcore_server,
    client,
    session_id,
    wait_gone,
)

pytestmark = pytest.mark.anyio
SHARED_SESSION = session_id()


@pytest.fixture(scope="module")
def shared() -> Iterator[AgentCoreClient]:
    """Caller of a server with one running session, `SHARED_SESSION`."""

    async def ready(caller: AgentCoreClient) -> None:
        await caller.ready(
            environmentVariables={"FLAVOUR": "plum"},
            requestHeaderConfiguration={"requestHeaderAllowlist": ["X-Shop"]},
        )
        await caller.invoke({}, SHARED_SESSION)

    with (
        pytest.MonkeyPatch.context() as patch,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(agentcore_server()) as caller,
    ):
        patch.setenv("A_SECRET_OF_THE_SERVER", "hush")
        portal.call(ready, caller)
        yield caller


async def test_an_unmodified_program_answers_in_a_session_that_stays() -> None:
    async with agentcore_server() as caller:
        assert await caller.ready() == "READY"
        session = session_id()
        first = await caller.raw({"a": [1, "é"]}, session)
        assert first["statusCode"] == 200
        assert first["runtimeSessionId"] == session
        assert first["contentType"].startswith("application/json")
        document = json.loads(first["body"])
        assert (document["count"], document["session"], document["payload"]) == (1, session, {"a": [1, "é"]})
        again = await caller.invoke({}, session)
        assert (again["count"], again["pid"]) == (2, document["pid"])
        other = await caller.invoke({})
        assert (other["count"], other["pid"] != document["pid"]) == (1, True)
        assert len(await caller.sessions()) == 2


async def test_an_invoke_without_a_session_id_gets_a_new_one() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        answer = await caller.call(
            caller.data.invoke_agent_runtime, agentRuntimeArn=caller.arn, payload=b"{}"
        )
        assert len(answer["runtimeSessionId"]) >= 33
        assert [s["runtimeSessionId"] for s in await caller.sessions()] == [answer["runtimeSessionId"]]
        await asyncio.to_thread(answer["response"].read)


async def test_a_streamed_answer_passes_through_as_events(shared: AgentCoreClient) -> None:
    answer = await shared.raw({"do": "stream", "n": 3}, SHARED_SESSION, accept="text/event-stream")
    assert answer["contentType"].startswith("text/event-stream")
    assert answer["body"].decode() == "".join(f'data: {{"n": {i}}}\n\n' for i in range(3))


async def test_the_first_event_of_a_stream_arrives_before_its_end(shared: AgentCoreClient) -> None:
    def first_line(data: Any, arn: str) -> tuple[bytes, bool]:
        answer = data.invoke_agent_runtime(
            agentRuntimeArn=arn,
            runtimeSessionId=SHARED_SESSION,
            payload=json.dumps({"do": "stream", "n": 500}).encode(),
        )
        with contextlib.closing(answer["response"]) as body:
            return next(body.iter_lines()), body._raw_stream.closed

    line, closed = await asyncio.to_thread(first_line, shared.data, shared.arn)
    assert (line, closed) == (b'data: {"n": 0}', False)


async def test_a_large_payload_passes(shared: AgentCoreClient) -> None:
    text = "x" * 5_000_000
    assert (await shared.invoke({"text": text}, SHARED_SESSION))["payload"]["text"] == text


async def test_allowed_and_custom_headers_reach_the_program_and_others_do_not(
    shared: AgentCoreClient,
) -> None:
    def invoke(data: Any, arn: str) -> dict[str, Any]:
        def add(request: Any, **_: Any) -> None:
            request.headers["X-Amzn-Bedrock-AgentCore-Runtime-Custom-Flavour"] = "plum"
            request.headers["X-Shop"] = "seven"
            request.headers["X-Other"] = "kept out"

        event = "before-sign.bedrock-agentcore.InvokeAgentRuntime"
        data.meta.events.register(event, add)
        try:
            answer = data.invoke_agent_runtime(
                agentRuntimeArn=arn, runtimeSessionId=SHARED_SESSION, payload=b'{"do": "headers"}'
            )
        finally:
            data.meta.events.unregister(event, add)
        return json.loads(answer["response"].read())["headers"]

    headers = await asyncio.to_thread(invoke, shared.data, shared.arn)
    lower = {name.lower(): value for name, value in headers.items()}
    assert lower["x-amzn-bedrock-agentcore-runtime-custom-flavour"] == "plum"
    assert lower["x-shop"] == "seven"
    assert "authorization" not in lower
    assert "x-other" not in lower


async def test_the_program_has_the_environment_of_its_runtime_and_not_of_the_server(
    shared: AgentCoreClient,
) -> None:
    env = await shared.invoke({"do": "env"}, SHARED_SESSION)
    assert env["FLAVOUR"] == "plum"
    assert "A_SECRET_OF_THE_SERVER" not in env


async def test_many_invokes_at_a_cold_session_are_one_start() -> None:
    async with agentcore_server(pace=Timings(cold_start_s=0.5)) as caller:
        await caller.ready()
        session = session_id()
        said: list[dict[str, Any]] = []

        async def invoke() -> None:
            said.append(await caller.invoke({}, session))

        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(invoke)
        assert anyio.current_time() - began >= 0.5
        assert len({one["pid"] for one in said}) == 1
        assert sorted(one["count"] for one in said) == list(range(1, 9))
        assert (await caller.view("stats"))["starts"] == 1


async def test_a_function_is_served_with_the_sdk_and_a_command_finds_its_port(tmp_path: Path) -> None:
    target = tmp_path / "agent.py"
    target.write_text("def agent(payload):\n    return 1.0\n")
    program = tmp_path / "serve.sh"
    program.write_text('cd "$(dirname "$0")" && exec python3 plain.py\n')
    (tmp_path / "plain.py").write_text(PLAIN)
    images = {"sdk": AgentImage(target=f"{target}:agent"), "plain": AgentImage(argv=("sh", str(program)))}
    async with agentcore_server(images=images) as caller:

        def of(name: str) -> dict[str, Any]:
            return {"containerConfiguration": {"containerUri": name}}

        await caller.ready("sdk", agentRuntimeArtifact=of("sdk"))
        with pytest.raises(caller.data.exceptions.RuntimeClientError, match=r"Received error \(400\)"):
            await caller.invoke({"no": "_rollout"})
        await caller.ready("plain", agentRuntimeArtifact=of("plain"))
        assert await caller.invoke({"n": 1}) == {"got": {"n": 1}}
        card = await caller.call(caller.data.get_agent_card, agentRuntimeArn=caller.arn)
        assert card["agentCard"] == {"status": "Healthy"}  # whatever the program serves there


PLAIN = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"status": "Healthy"})
    def do_POST(self):
        self.answer({"got": json.loads(self.rfile.read(int(self.headers["content-length"])))})
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


async def test_code_configuration_runs_an_entry_point_of_the_code_root() -> None:
    code = {
        "code": {"s3": {"bucket": "bucket", "prefix": "code.zip"}},
        "runtime": "PYTHON_3_11",
        "entryPoint": [PROGRAM.name],
    }
    async with agentcore_server(images={}, account=Account(code_root=PROGRAM.parent)) as caller:
        await caller.ready(agentRuntimeArtifact={"codeConfiguration": code})
        assert (await caller.invoke({"a": 1}))["payload"] == {"a": 1}
        away = {**code, "entryPoint": ["../conftest.py"]}
        with pytest.raises(caller.control.exceptions.ValidationException, match="entryPoint"):
            await caller.create("away", agentRuntimeArtifact={"codeConfiguration": away})


# --- stopping ------------------------------------------------------------------------------------


async def test_a_stopped_session_is_gone_with_all_it_started_and_stopping_again_is_404() -> None:
    async with agentcore_server() as caller:
        await caller.ready()
        session = session_id()
        pid = (await caller.invoke({}, session))["pid"]
        child = (await caller.invoke({"do": "child"}, session))["pid"]
        assert (await caller.stop(session))["statusCode"] == 200
        await wait_gone(pid, child)
        assert await caller.sessions() == []
        with pytest.raises(caller.data.exceptions.ResourceNotFoundException, match=session):
            await caller.stop(session)
        assert (await caller.invoke({}, session))["count"] == 1


async def test_a_stop_while_a_session_starts_ends_the_start() -> None:
    async with agentcore_server(pace=Timings(cold_start_s=30)) as caller:
        await caller.ready()
        session = session_id()
        with pytest.raises(caller.data.exceptions.RetryableConflictException, match="stopped"):
            async with anyio.create_task_group() as group:
                group.start_soon(_stop_soon, caller, session)
                try:
                    await caller.invoke({}, session)
                except caller.data.exceptions.ClientError as error:
                    raised = error
            raise raised
        assert await caller.sessions() == []


async def _stop_soon(caller: AgentCoreClient, session: str) -> None:
    await caller.wait_sessions(1)
    await caller.stop(session)


# --- commands ------------------------------------------------------------------------------------


async def run_command(caller: Any, session: str, **body: Any) -> list[dict[str, Any]]:
    answer = await caller.call(
        caller.data.invoke_agent_runtime_command,
        agentRuntimeArn=caller.arn,
        runtimeSessionId=session,
        body=body,
    )
    assert answer["runtimeSessionId"] == session
    return [event["chunk"] for event in await asyncio.to_thread(list, answer["stream"])]


async def test_a_command_streams_stdout_and_stderr_and_returns_its_exit_code(shared: AgentCoreClient) -> None:
    events = await run_command(shared, SHARED_SESSION, command="echo $FLAVOUR; echo no >&2; exit 4")
    assert events[0] == {"contentStart": {}}
    assert {"contentDelta": {"stdout": "plum\n"}} in events
    assert {"contentDelta": {"stderr": "no\n"}} in events
    assert events[-1] == {"contentStop": {"exitCode": 4, "status": "COMPLETED"}}


async def test_a_command_beyond_its_timeout_is_killed_and_reported_as_timed_out(
    shared: AgentCoreClient,
) -> None:
    before = (await shared.invoke({}, SHARED_SESSION))["count"]
    events = await run_command(shared, SHARED_SESSION, command="echo $$; exec sleep 600", timeout=2)
    assert events[-1] == {"contentStop": {"exitCode": -1, "status": "TIMED_OUT"}}
    await wait_gone(int(events[1]["contentDelta"]["stdout"]))
    assert (await shared.invoke({}, SHARED_SESSION))["count"] == before + 1
    with pytest.raises(shared.data.exceptions.ValidationException, match="timeout"):
        await run_command(shared, SHARED_SESSION, command="true", timeout=4000)


async def test_unsigned_requests_are_refused_where_signatures_are_wanted() -> None:
    async with agentcore_server(signed=True) as caller:
        assert await caller.ready() == "READY"
        from botocore import UNSIGNED
        from botocore.config import Config

        unsigned = boto3.client(
            "bedrock-agentcore-control",
            endpoint_url=caller.url,
            region_name="us-west-2",
            config=Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}),
        )
        with pytest.raises(unsigned.exceptions.AccessDeniedException, match="not signed"):
            await asyncio.to_thread(unsigned.list_agent_runtimes)


async def test_two_clients_of_one_server_see_the_same_runtimes() -> None:
    async with agentcore_server(images=IMAGES) as caller:
        await caller.ready()
        other = client("bedrock-agentcore-control", caller.url)
        listed = await asyncio.to_thread(other.list_agent_runtimes)
        assert [one["agentRuntimeName"] for one in listed["agentRuntimes"]] == ["math"]


def keyed(service: str, url: str, secret: str) -> Any:
    config = Config(retries={"total_max_attempts": 1}, read_timeout=60)
    keys = {"aws_access_key_id": "any", "aws_secret_access_key": secret}
    return boto3.client(service, endpoint_url=url, region_name="us-west-2", config=config, **keys)


async def test_only_requests_signed_with_the_servers_key_are_taken() -> None:
    async with agentcore_server(secret_key="right/key+1") as caller:
        caller.control = keyed("bedrock-agentcore-control", caller.url, "right/key+1")
        caller.data = keyed("bedrock-agentcore", caller.url, "right/key+1")
        assert await caller.ready() == "READY"
        session = session_id()
        assert (await caller.invoke({"x": 1}, session))["count"] == 1
        listed = await caller.call(caller.control.list_agent_runtimes, maxResults=5)
        assert len(listed["agentRuntimes"]) == 1
        caller.data = keyed("bedrock-agentcore", caller.url, "wrong")
        with pytest.raises(caller.data.exceptions.AccessDeniedException, match="signature does not match"):
            await caller.invoke({}, session)
        async with aiohttp.ClientSession() as http, http.get(f"{caller.url}/_acr/sessions") as answer:
            assert answer.status == 403


async def test_a_signature_holds_for_the_body_it_was_made_of() -> None:
    async with agentcore_server(secret_key="right") as caller:
        request = AWSRequest("PUT", f"{caller.url}/runtimes/", data=b"{}")
        SigV4Auth(Credentials("any", "right"), "bedrock-agentcore", "us-west-2").add_auth(request)
        statuses = []
        async with aiohttp.ClientSession() as http:
            for body in (b"{}", b'{"other": 1}'):
                async with http.put(request.url, data=body, headers=dict(request.headers)) as answer:
                    statuses.append((answer.status, (await answer.json())["message"][:20]))
        assert [status for status, _ in statuses] == [400, 403], statuses


@pytest.mark.parametrize("parser", ["h11", "httptools"])
async def test_a_payload_that_is_too_large_is_named_as_such(parser: str) -> None:
    async with agentcore_server(http=parser) as caller:
        await caller.ready()
        with pytest.raises(caller.data.exceptions.ValidationException) as refused:
            await caller.raw(b"x" * 100_000_001)
        assert "has 100000001 bytes, 100000000 are allowed" in str(refused.value)


async def test_half_a_character_is_named_as_such() -> None:
    async with agentcore_server() as caller:
        async with (
            aiohttp.ClientSession() as http,
            http.put(f"{caller.url}/runtimes/", data=b'{"agentRuntimeName": "\\ud800"}') as answer,
        ):
            body = await answer.json()
        assert answer.status == 400
        assert r"byte 22 has \ud800, half of a surrogate pair" in body["message"]
