"""Agents in sandboxes: the contract of runtimes, and what is the sandbox's own."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.runtime_contract import RuntimeContract

from afield.errors import InfrastructureFailure, TaskFailure, UsageError
from afield.interfaces.runtime import Phase
from afield.local_sandbox import cgroups
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.runtimes import ResourceLimits, SandboxOptions
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Reason
from agents.invoking import invocation, payload
from agents.places import ACTING, Place, Spec
from agents.sink import Sink
from support.sandboxes import needs_bubblewrap, supervisor_of, write_program

pytestmark = pytest.mark.anyio


def made(target: str, folder: str) -> SandboxRuntime:
    """For the contract: also called by a controller in a process of its own."""
    options = SandboxOptions(limits=ResourceLimits(memory_mb=256))
    return SandboxRuntime(target, options, log_dir=Path(folder) / "logs")


@needs_bubblewrap
class TestSandbox(RuntimeContract):
    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        return Spec.of(made, {"target": target, "folder": str(folder)})


def sandboxed(folder: Path, target: str = f"{ACTING}:act", **options: Any) -> SandboxRuntime:
    return SandboxRuntime(target, SandboxOptions(**options), log_dir=folder / "logs")


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


@needs_bubblewrap
async def test_an_outcome_that_goes_to_a_directory_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with FilesTransport(tmp_path / "store") as transport, sandboxed(tmp_path) as runtime:
        with pytest.raises(TaskFailure, match='deliver = "gateway"'):
            await Place(runtime, transport).launch({"do": "reward"})


@needs_bubblewrap
async def test_a_bucket_that_was_not_allowed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with sandboxed(tmp_path) as runtime:
        one = invocation(s3_bucket="bucket", outcome_url=None)
        with pytest.raises(TaskFailure, match='deliver = "gateway"'):
            await runtime.launch(Attempt("r", 1), payload({"do": "reward"}, one))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import no_such_module\n", "no_such_module"),
        ("agent = 3\n", "an agent must be a function"),
        ("import sys\nsys.exit(4)\n", "4"),
    ],
)
async def test_an_agent_that_cannot_be_started_fails_the_check(
    tmp_path: Path, source: str, said: str
) -> None:
    script = write_program(tmp_path / "agent", source)
    async with sandboxed(tmp_path, f"{script}:agent") as runtime:
        with pytest.raises(UsageError, match=said):
            await runtime.check()
        with pytest.raises(InfrastructureFailure, match=said):
            await runtime.launch(Attempt("r", 1), payload({}, invocation()))


async def test_the_check_says_how_to_get_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with sandboxed(tmp_path) as runtime:
        with pytest.raises(UsageError, match="apt-get install bubblewrap"):
            await runtime.check()


@pytest.mark.parametrize("allow", ["example.org", "example.org:http", ":80", "example.org:0", "a:70000"])
def test_an_invalid_address_is_refused_at_once(tmp_path: Path, allow: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        sandboxed(tmp_path, allow=(allow,))


@needs_bubblewrap
async def test_a_fork_server_that_died_is_replaced_by_the_next_launch(tmp_path: Path, sink: Sink) -> None:
    async with sandboxed(tmp_path) as runtime:
        place = Place(runtime, sink.transport, sink)
        first = await place.launch({"do": "beat"}, "first")
        await sink.until_told("beat")
        os.kill(supervisor_of(os.getpid()), signal.SIGKILL)
        ended = await place.wait(first)
        assert ended.failure and ended.failure.reason is Reason.DIED
        second = await place.launch({"do": "reward"}, "second")
        assert (await place.wait(second)).failure is None


@needs_bubblewrap
async def test_an_agent_does_not_see_the_runs_that_lie_beside_it(tmp_path: Path, sink: Sink) -> None:
    source = """
import afield
from pathlib import Path

@afield.agent
def agent(task):
    return float(sum(1 for found in Path(__file__).parent.rglob("key")))
"""
    script = write_program(tmp_path, source)
    write_program(tmp_path / "runs" / "earlier", "secret", "key")
    runtime = SandboxRuntime(f"{script}:agent", SandboxOptions(), log_dir=tmp_path / "runs" / "now" / "logs")
    async with runtime:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.0


@needs_bubblewrap
async def test_a_gateway_may_have_the_port_that_agents_serve(tmp_path: Path) -> None:
    address = "http://127.0.0.1:8080/s/r.1"
    one = invocation(base_url=address, outcome_url=f"{address}/outcome")
    async with sandboxed(tmp_path) as runtime:
        await runtime.launch(Attempt("r", 1), payload({"do": "hang"}, one))
        assert (await runtime.status(Attempt("r", 1))).phase is Phase.RUNNING


@needs_bubblewrap
async def test_too_many_processes_are_logged_and_the_rollout_continues(tmp_path: Path, sink: Sink) -> None:
    source = """
import afield, os, time

@afield.agent
def agent(task):
    try:
        while True:
            if os.fork() == 0:
                time.sleep(600)
    except OSError:
        return 0.5
"""
    script = write_program(tmp_path / "agent", source)
    async with sandboxed(tmp_path, f"{script}:agent", limits=ResourceLimits(pids=32)) as runtime:
        place = Place(runtime, sink.transport, sink)
        attempt = await place.launch({})
        assert (await place.wait(attempt)).failure is None
        assert await place.reward(attempt) == 0.5
        if "pids" in cgroups.find_groups().kinds:
            assert "limit pids reached" in await runtime.logs(attempt)
