"""The contract on AgentCore, spoken by real boto3 clients with a compatible server on this machine."""

from __future__ import annotations

import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp
import anyio
import msgspec
import pytest
from tests.contracts.runtime_contract import RuntimeContract

from afield.agentcore_local.control_plane import Account
from afield.agentcore_local.faults import parse
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.quotas import Quotas
from afield.agentcore_local.server import AgentCoreServer, AgentCoreServerOptions
from afield.errors import InfrastructureFailure, NotFound, RateLimited, TaskFailure, UsageError
from afield.interfaces.runtime import Phase
from afield.interfaces.sandbox import ExecResult
from afield.runtimes.agentcore.api import AgentCoreApi
from afield.runtimes.agentcore.runtime import AgentCoreRuntime
from afield.runtimes.agentcore.sandbox import AgentCoreSandbox
from afield.runtimes.agentcore.sessions import AgentCoreSession, SessionTable
from afield.settings.runtimes import AgentCoreOptions
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Reason
from agents.places import ACTING, AGENTS, Place, Spec
from agents.sink import Sink

pytestmark = pytest.mark.anyio

ROLE = "arn:aws:iam::123456789012:role/agents"
IMAGES = {"acting": f"{ACTING}:act", "slow": f"{AGENTS / 'slow_start.py'}:act"}


def options(url: str, image: str = "acting", **more: Any) -> AgentCoreOptions:
    return AgentCoreOptions(
        **{"endpoint_url": url, "agent_name": image, "container_uri": image, "role_arn": ROLE, **more}
    )


class Deployed(AgentCoreRuntime):
    """Checked as it is opened, as whoever runs rollouts does: that makes the agent there is to be."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.check()
        return self


def make_runtime(url: str, image: str, folder: str) -> AgentCoreRuntime:
    """Runtime of the contract; its controller process calls this, too.

    Each folder has an agent runtime of its own, so that tests with the same session ids share a server.
    """
    agent_name = f"{image}_{zlib.crc32(folder.encode())}"
    where = options(url, image, agent_name=agent_name)
    return Deployed(where, name="run", session_table=Path(folder) / "sessions.sqlite")


@asynccontextmanager
async def serving(sink: Sink | None = None, isolation: Any = "none", **more: Any) -> AsyncIterator[str]:
    """A server with the agents of these tests; sandboxed ones reach the sink and nothing else."""
    values = {
        "images": {name: AgentImage(target=target) for name, target in IMAGES.items()},
        "isolation": isolation,
        "allow": (("127.0.0.1", sink.port),) if sink else (),
        "quotas": Quotas(start_rate=1000, stop_rate=1000, invoke_rate=1000),
        **more,
    }
    async with AgentCoreServer(AgentCoreServerOptions(**values)) as server:
        yield server.url


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def shared_sink(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sink]:
    transport = FilesTransport(tmp_path_factory.mktemp("store"))
    async with Sink(transport).running() as sink:
        yield sink


@pytest.fixture(scope="module")
async def sandboxed_url(shared_sink: Sink) -> AsyncIterator[str]:
    async with serving(shared_sink, "sandbox") as url:
        yield url


@pytest.fixture
async def sink(shared_sink: Sink, tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport:
        shared_sink.reset(transport)
        yield shared_sink


class TestAgentCore(RuntimeContract):
    url = ""

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        image = next(name for name, agent in IMAGES.items() if agent == target)
        where = {"url": self.url, "image": image, "folder": str(folder)}
        return Spec.of(make_runtime, where)

    @pytest.fixture
    async def sink(self, shared_sink: Sink, tmp_path: Path) -> AsyncIterator[Sink]:
        async with FilesTransport(tmp_path / "store") as transport:
            shared_sink.reset(transport)
            yield shared_sink

    @pytest.fixture
    async def place(self, sink: Sink, sandboxed_url: str, tmp_path: Path) -> AsyncIterator[Place]:
        self.url = sandboxed_url
        async with self.spec(tmp_path).build() as runtime:
            yield Place(runtime, sink.transport, sink)


# --- deploying -------------------------------------------------------------------------------------


@asynccontextmanager
async def opened(folder: Path, **given: Any) -> AsyncIterator[AgentCoreRuntime]:
    table = folder / "sessions.sqlite"
    async with AgentCoreRuntime(options(**given), name="run", session_table=table) as runtime:
        yield runtime


async def versions(url: str) -> list[dict[str, Any]]:
    api = AgentCoreApi(options(url))
    try:
        found = await api.ask("list_agent_runtimes")
        return [
            await api.ask("get_agent_runtime", agentRuntimeId=one["agentRuntimeId"])
            for one in found["agentRuntimes"]
        ]
    finally:
        api.close()


async def test_an_agent_is_created_once_and_updated_where_something_differs(tmp_path: Path) -> None:
    more = {"idle_s": 120, "max_rollout_s": 600, "env": {"MODE": "fast"}}
    async with serving() as url:
        for _ in range(2):
            async with opened(tmp_path, url=url, **more) as runtime:
                await runtime.check()
        [first] = await versions(url)
        vpc = {"subnets": ("subnet-12345678",), "security_groups": ("sg-12345678",)}
        async with opened(tmp_path, url=url, **more, **vpc) as runtime:
            await runtime.check()
            await runtime.check()
        [second] = await versions(url)
    assert (first["agentRuntimeVersion"], second["agentRuntimeVersion"]) == ("1", "2")
    assert first["lifecycleConfiguration"] == {"idleRuntimeSessionTimeout": 120, "maxLifetime": 600}
    assert first["environmentVariables"] == second["environmentVariables"] == {"MODE": "fast"}
    assert second["networkConfiguration"]["networkMode"] == "VPC"


async def test_an_agent_that_exists_is_taken_by_its_arn(sink: Sink, tmp_path: Path) -> None:
    async with serving(sink) as url:
        async with opened(tmp_path, url=url) as runtime:
            await runtime.check()
        [found] = await versions(url)
        there = AgentCoreOptions(arn=found["agentRuntimeArn"], endpoint_url=url)
        async with AgentCoreRuntime(there, name="run", session_table=tmp_path / "other.sqlite") as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            attempt = await place.launch({"do": "reward"})
            assert (await runtime.status(attempt)).phase is Phase.RUNNING
            await runtime.stop(attempt)


async def test_a_row_names_the_image_whose_agent_runtime_runs_it(sink: Sink, tmp_path: Path) -> None:
    async with serving(sink) as url:
        for image in IMAGES:
            async with opened(tmp_path, url=url, image=image) as runtime:
                await runtime.check()
        arns = {one["agentRuntimeName"]: one["agentRuntimeArn"] for one in await versions(url)}
        there = AgentCoreOptions(endpoint_url=url, image_key="image", arns={"task/acting:1": arns["acting"]})
        async with AgentCoreRuntime(there, name="run", session_table=tmp_path / "other.sqlite") as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            attempt = await place.launch({"do": "reward", "image": "task/acting:1"})
            assert (await runtime.status(attempt)).where.endswith(arns["acting"])
            await runtime.stop(attempt)
            for name, row in (("other", {"image": "task/other:1"}), ("none", {})):
                with pytest.raises(TaskFailure, match="add its ARN to agentcore"):
                    await place.launch({"do": "reward", **row}, name)
            await runtime.stop(Attempt("of-another-process", 1))  # asks every agent runtime


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"agent_name": ""}, "needs agent_name: give arn"),
        ({"agent_name": "my-agent"}, "agent_name 'my-agent' must begin with a letter"),
        ({"container_uri": ""}, "needs container_uri"),
        ({"container_uri": "nothing"}, "'nothing' is neither an ECR image URI"),
        ({"subnets": ("subnet-12345678",)}, "subnets and security_groups go together"),
        ({"idle_s": 5}, "idle_s = 5 must be from 60"),
        ({"max_rollout_s": 100_000}, "max_rollout_s = 100000 must be from 60"),
        ({"arn": "acting"}, "arn 'acting' must be of the form"),
        ({"arn": "arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/no-0123456789"}, "is arn right"),
        ({"qualifier": "prod"}, "qualifier the name of one of its endpoints"),
        ({"endpoint_url": "http://127.0.0.1:9"}, "http://127.0.0.1:9 does not answer"),
    ],
)
async def test_impossible_settings_are_reported_before_the_first_launch(
    tmp_path: Path, sandboxed_url: str, given: dict[str, Any], said: str
) -> None:
    async with opened(tmp_path, **{"url": sandboxed_url, **given}) as runtime:
        with pytest.raises(UsageError, match=said):
            await runtime.check()


async def test_an_agent_that_is_not_ready_in_time_is_reported(tmp_path: Path) -> None:
    async with (
        serving(account=Account(ready_s=5.0)) as url,
        opened(tmp_path, url=url, ready_s=0.5) as runtime,
    ):
        with pytest.raises(UsageError, match=r"acting was not READY within ready_s = 0\.5 seconds"):
            await runtime.check()
    (tmp_path / "gone.py").write_text("")
    images = {"acting": AgentImage(script=str(tmp_path / "gone.py"))}
    (tmp_path / "gone.py").unlink()
    async with serving(images=images) as url, opened(tmp_path, url=url) as runtime:
        with pytest.raises(UsageError, match=r"CREATE_FAILED: .*gone\.py"):
            await runtime.check()


async def test_missing_credentials_are_named_with_the_ways_to_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    async with opened(tmp_path, url="", region="us-west-2") as runtime:
        with pytest.raises(UsageError, match=r"AWS_ACCESS_KEY_ID.*AWS_PROFILE.*role"):
            await runtime.check()


# --- refusals ----------------------------------------------------------------------------------------


@asynccontextmanager
async def placed(sink: Sink, folder: Path, *, given: Any = None, **server: Any) -> AsyncIterator[Place]:
    async with serving(sink, **server) as url, opened(folder, url=url, **(given or {})) as runtime:
        await runtime.check()
        yield Place(runtime, sink.transport, sink)


async def test_too_many_starts_and_too_many_sessions_are_throttled_and_leave_nothing(
    sink: Sink, tmp_path: Path
) -> None:
    for n, quotas in enumerate((Quotas(start_rate=0.01), Quotas(sessions=1, start_rate=1000))):
        async with placed(sink, tmp_path / str(n), quotas=quotas) as place:
            first = await place.launch({"do": "beat"}, "first")
            with pytest.raises(RateLimited) as refused:
                await place.launch({"do": "beat"}, "second")
            assert [live.session_id for live in await place.runtime.list()] == [first.session_id]
            # A quota takes longer to free up than a window of a rate.
            assert refused.value.retry_after_s == (None if n == 0 else 5.0)
            await place.runtime.stop(Attempt("second", 1))


async def test_no_more_sessions_are_alive_than_allowed_and_the_next_waits_for_an_end(
    sink: Sink, tmp_path: Path
) -> None:
    async with placed(sink, tmp_path, given={"sessions": 2}) as place:
        first, _ = [await place.launch({"do": "beat"}, name) for name in ("first", "second")]
        async with anyio.create_task_group() as group:
            group.start_soon(place.launch, {"do": "beat"}, "third")
            await anyio.sleep(0.3)
            assert len(await place.runtime.list()) == 2
            await place.runtime.stop(first)
        assert sorted(live.session_id for live in await place.runtime.list()) == ["second.1", "third.1"]


@pytest.mark.parametrize(
    ("status", "kind", "phase"),
    [
        (400, TaskFailure, Phase.STARTING),
        (500, InfrastructureFailure, Phase.STARTING),
        (503, RateLimited, Phase.STARTING),
    ],
)
async def test_what_the_agents_own_server_refuses_is_distinguished(
    tmp_path: Path, sink: Sink, status: int, kind: type[Exception], phase: Phase
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING.replace("STATUS", str(status)))
    images = {"acting": AgentImage(argv=(sys.executable, str(tmp_path / "refusing.py")))}
    async with placed(sink, tmp_path, images=images) as place:
        with pytest.raises(kind, match=f"\\({status}\\)"):
            await place.launch({"do": "reward"})
        # The session is there, until it is stopped.
        assert (await place.runtime.status(Attempt("r", 1))).phase is phase
        await place.runtime.stop(Attempt("r", 1))
        assert await place.runtime.list() == []


async def test_an_image_that_is_no_rollout_app_is_known_from_its_first_answer(
    tmp_path: Path, sink: Sink
) -> None:
    (tmp_path / "other.py").write_text(REFUSING.replace("STATUS", "200"))
    images = {"acting": AgentImage(argv=(sys.executable, str(tmp_path / "other.py")))}
    async with placed(sink, tmp_path, images=images) as place:
        with pytest.raises(TaskFailure, match=r"is not a rollout app: it answered '\{\}'") as raised:
            await place.launch({"do": "reward"})
        assert raised.value.reason is Reason.NO_AGENT
        await place.runtime.stop(Attempt("r", 1))
        assert await place.runtime.list() == []


REFUSING = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Refusing(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        self.answer(STATUS)

    def answer(self, status):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

import os
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Refusing).serve_forever()
"""


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut", InfrastructureFailure),
        ("error", InfrastructureFailure),
        ("agent", InfrastructureFailure),
        ("conflict", RateLimited),
        ("throttle", RateLimited),
        ("quota", RateLimited),
    ],
)
async def test_a_launch_that_goes_wrong_says_whose_fault_it_is_and_leaves_nothing(
    sink: Sink, tmp_path: Path, fault: str, kind: type[Exception]
) -> None:
    async with placed(sink, tmp_path, faults=parse([f"{fault}=1"])) as place:
        with pytest.raises(kind):
            await place.launch({"do": "beat"})
        await place.runtime.stop(Attempt("r", 1))
        assert await place.runtime.list() == []
    await sink.until_quiet("beat")


async def test_a_launch_that_was_throttled_can_be_made_again(sink: Sink, tmp_path: Path) -> None:
    async with placed(sink, tmp_path, faults=parse(["throttle=0.9"]), given={}) as place:
        refused = 0
        while True:
            try:
                attempt = await place.launch({"do": "beat"})
                break
            except RateLimited:
                refused += 1
        await sink.until_told("beat", attempt.session_id)
        assert (await place.runtime.status(attempt)).phase is Phase.RUNNING
    assert refused


async def test_a_stop_that_was_refused_leaves_the_session_in_the_ledger_and_closing_asks_again(
    sink: Sink, tmp_path: Path
) -> None:
    quotas = Quotas(start_rate=1000, stop_rate=2, burst_s=0.5)
    async with placed(sink, tmp_path, given={"stop_rate": 2}, quotas=quotas) as place:
        first, second = [await place.launch({"do": "beat"}, name) for name in ("first", "second")]
        await place.runtime.stop(first)
        with pytest.raises(RateLimited):
            await place.runtime.stop(second)
        assert [live.session_id for live in await place.runtime.list()] == ["second.1"]
    await sink.until_quiet("beat")


async def test_a_session_that_runs_out_of_its_lifetime_is_no_longer_alive(tmp_path: Path) -> None:
    ledger = SessionTable(tmp_path / "sessions.sqlite")
    old = AgentCoreSession(
        session_id="r.1", name="n", arn="a", qualifier="DEFAULT", run="run", since=0.0, until=1.0
    )
    assert ledger.note(old, 1) == old
    young = msgspec.structs.replace(old, session_id="r.2", until=1e12)
    assert ledger.note(young, 1) == young
    assert [entry.session_id for entry in ledger.alive("run")] == ["r.2"]
    ledger.close()


# --- commands ------------------------------------------------------------------------------------------


@pytest.fixture
async def commands(sandboxed_url: str) -> AsyncIterator[AgentCoreSandbox]:
    async with AgentCoreSandbox("", options(sandboxed_url), keep_bytes=1000) as sandbox:
        yield sandbox


async def test_a_command_tells_its_exit_code_and_what_it_printed(commands: AgentCoreSandbox) -> None:
    ran = await commands.exec(
        "cat; echo $WORD; pwd; echo oops >&2; exit 3", cwd="/tmp", env={"WORD": "it's"}, stdin=b"in\n"
    )
    assert ran == ExecResult(exit_code=3, stdout="in\nit's\n/tmp\n", stderr="oops\n")
    assert (await commands.exec(["printf", "%s", "a b; $(c)"])).stdout == "a b; $(c)"
    long = await commands.exec("echo " + "x" * 70_000 + " | wc -c; seq 1 2000")
    assert long.ok and long.truncated and long.stdout.startswith("70001\n") and long.stdout.endswith("2000\n")


async def test_a_command_that_takes_too_long_is_ended(commands: AgentCoreSandbox) -> None:
    ran = await commands.exec("echo begun; sleep 600", timeout=2)
    assert ran.timed_out and ran.exit_code is None and ran.stdout == "begun\n"
    with pytest.raises(UsageError, match="timeout = 7200"):
        await commands.exec("true", timeout=7200)


async def test_files_go_there_and_come_back(commands: AgentCoreSandbox) -> None:
    data = bytes(range(256)) * 300
    there = "/tmp/new folder/file"
    await commands.upload(there, b"old")
    await commands.upload(there, data)
    assert await commands.download(there) == data
    await commands.upload(there, b"")
    assert await commands.download(there) == b""
    with pytest.raises(NotFound, match="nothing"):
        await commands.download("/tmp/nothing")


async def test_files_with_relative_names_are_where_commands_start(commands: AgentCoreSandbox) -> None:
    await commands.upload("folder/-hello", b"hello")
    assert (await commands.exec("cat folder/-hello")).stdout == "hello"
    assert await commands.download("folder/-hello") == b"hello"
    with pytest.raises(UsageError, match="NUL"):
        await commands.upload("a\0b", b"")
    with pytest.raises(InfrastructureFailure, match="folder was not written"):
        await commands.upload("folder", b"hello")
    assert (await commands.exec("ls -A . folder")).stdout.count("hello") == 1


async def test_a_sandbox_is_a_session_of_its_own_and_ends_with_its_block() -> None:
    async with serving() as url:
        async with AgentCoreSandbox("", options(url)) as one, AgentCoreSandbox("", options(url)) as other:
            assert await sessions_at(url) == 2
            assert (await one.exec("echo $$")).ok and (await other.exec("echo $$")).ok
        assert await sessions_at(url) == 0


async def sessions_at(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/_acr/sessions") as answer:
        return len((await answer.json())["sessions"])
