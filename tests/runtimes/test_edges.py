"""Runtimes at their edges: what is left when one closes, what one bad answer may cost, and whose is whose."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_sessions import dead
from tests.orchestrator.test_verifier import half, hand_in, verified
from tests.runtimes.test_agentcore import opened, serving
from tests.runtimes.test_registry import Elsewhere

from afield import factory
from afield.agentcore_local.errors import ServiceError
from afield.agentcore_local.faults import FaultInjector
from afield.agentcore_local.hosts import ProcessHosts, ProgramHosts, SandboxHosts
from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.quotas import CallCounts, Quotas
from afield.agentcore_local.requests import Lifecycle
from afield.agentcore_local.sessions import HostedSession, LocalSessions, Timings
from afield.errors import InfrastructureFailure, Unavailable, UsageError
from afield.interfaces.runtime import Phase
from afield.local_sandbox import fork_server
from afield.orchestrator.state import RunDirectory
from afield.ratelimit import Unlimited
from afield.runtimes.inline import InlineRuntime
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.registry import SessionRegistry, TrackedRuntime
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.environment import Environment
from afield.settings.runtimes import ResourceLimits, SandboxOptions
from afield.settings.train import TrainConfig, build
from afield.settings.values import assigned
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Rollout, Task
from agents.places import ACTING, Place
from agents.sink import Sink
from support.gateways import POLICY
from support.in_process_collection import collection, good
from support.kubernetes import fake_kube, placed
from support.sandboxes import needs_bubblewrap, supervisor_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


# --- agentcore -------------------------------------------------------------------------------------------


async def test_a_launch_that_waits_for_a_slot_starts_nothing_once_the_runtime_closes(
    sink: Sink, tmp_path: Path
) -> None:
    async with serving(sink, pace=Timings(cold_start_s=0.5)) as url:
        async with opened(tmp_path, url=url, sessions=1) as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            await place.launch({"do": "beat"}, "first")
            waiting = asyncio.create_task(place.launch({"do": "beat"}, "second"))
            await asyncio.sleep(0.2)
            waiting.cancel()  # As a runner does that is closed; the launch itself goes on.
        await asyncio.sleep(1.0)
        await sink.until_quiet("beat")
        assert sink.told("beat", "second.1") == []


async def test_a_session_that_comes_up_while_the_runtime_closes_is_ended(sink: Sink, tmp_path: Path) -> None:
    async with serving(sink, pace=Timings(cold_start_s=1.0)) as url:
        async with opened(tmp_path, url=url, cold_start_s=1.0) as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            starting = asyncio.create_task(place.launch({"do": "beat"}))
            await asyncio.sleep(0.3)
            starting.cancel()
        await asyncio.sleep(1.0)
        await sink.until_quiet("beat")


async def test_a_launch_stopped_while_it_waited_for_a_slot_costs_no_session(
    sink: Sink, tmp_path: Path
) -> None:
    async with serving(sink) as url, opened(tmp_path, url=url, sessions=1) as runtime:
        await runtime.check()
        place = Place(runtime, sink.transport, sink)
        first = await place.launch({"do": "beat"}, "first")
        waiting = asyncio.create_task(place.launch({"do": "beat"}, "second"))
        await asyncio.sleep(0.2)
        await runtime.stop(Attempt("second", 1))
        await runtime.stop(first)
        with pytest.raises(InfrastructureFailure, match="stopped before it started"):
            await waiting
        assert (await runtime.status(Attempt("second", 1))).phase is Phase.UNKNOWN


@pytest.mark.parametrize("given", ["rate=0", "stop_rate=-1", "sessions=0", "cold_start_s=-1", "ready_s=0"])
def test_invalid_amounts_are_named_in_the_error(given: str) -> None:
    name = given.partition("=")[0]
    with pytest.raises(UsageError, match=rf"{name} = .* must be"):
        build({"model": "m", **assigned([f"agentcore.{given}"])}, "the command line")


# --- one bad answer ----------------------------------------------------------------------------------------


class Unsure(InlineRuntime):
    """A place that cannot be asked about what an earlier process launched."""

    async def adopt(self, attempt: Attempt) -> bool | None:
        raise Unavailable("the container engine does not answer")


async def test_a_runtime_that_cannot_be_asked_after_a_restart_does_not_end_the_run(tmp_path: Path) -> None:
    async with collection(tmp_path, good) as b:
        b.run_state.begin_attempt(Attempt("r", 1))
        spec = Rollout(id="r", exp_id="exp", group_id="g", task=Task("t0", {"n": 0}))
        async with (
            Unsure(good, deliver=b.transport.deliver) as unsure,
            b.runner(runtime=unsure) as (_, runner),
        ):
            summary = await runner.run(spec)
    assert summary.outcome.reward == 1.0 and summary.outcome.attempt == 2


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_for_which_no_file_is_left_fails_alone(sink: Sink, tmp_path: Path) -> None:
    async with ProcessRuntime(f"{ACTING}:act", fresh=True, log_dir=tmp_path / "logs") as runtime:
        place = Place(runtime, sink.transport, sink)
        with no_more_files(), pytest.raises(InfrastructureFailure, match="Too many open files"):
            await place.launch({"do": "reward"}, "first")
        attempt = await place.launch({"do": "reward"}, "second")
        assert (await place.wait(attempt)).failure is None


@needs_bubblewrap
async def test_a_sandbox_that_could_not_be_made_once_is_tried_again(sink: Sink, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    shutil.copy(ACTING, agent)
    async with SandboxRuntime(f"{agent}:act", SandboxOptions(), log_dir=tmp_path / "logs") as runtime:
        await runtime.check()
        place = Place(runtime, sink.transport, sink)
        first = await place.launch({"do": "beat"}, "first")
        os.kill(supervisor_of(os.getpid()), signal.SIGKILL)
        assert (await place.wait(first)).failure
        agent.rename(tmp_path / "away.py")
        with pytest.raises(InfrastructureFailure):
            await place.launch({"do": "reward"}, "second")
        (tmp_path / "away.py").rename(agent)
        third = await place.launch({"do": "reward"}, "third")
        assert (await place.wait(third)).failure is None


@needs_bubblewrap
async def test_sandbox_without_free_file_descriptors_raises_usage_error(sink: Sink, tmp_path: Path) -> None:
    async with SandboxRuntime(f"{ACTING}:act", SandboxOptions(), log_dir=tmp_path / "logs") as runtime:
        with no_more_files(), pytest.raises(UsageError, match="Too many open files"):
            await runtime.check()
        place = Place(runtime, sink.transport, sink)
        assert (await place.wait(await place.launch({"do": "reward"}))).failure is None


@needs_bubblewrap
@pytest.mark.parametrize("isolation", ["none", pytest.param("sandbox", marks=needs_bubblewrap)])
async def test_a_session_of_the_local_server_for_which_no_file_is_left_fails_alone(
    tmp_path: Path, isolation: str
) -> None:
    hosts = SandboxHosts(tmp_path, ResourceLimits(), allow=(), mounts=(), warm=(), init_s=30)
    places: ProgramHosts = ProcessHosts(tmp_path) if isolation == "none" else hosts
    luck, counts = FaultInjector({}, 0), CallCounts(time.monotonic)
    wanted = HostedSession(
        image=AgentImage(target=f"{ACTING}:act"), version="1", env={}, lifecycle=Lifecycle()
    )
    async with places, LocalSessions(places, Quotas(), Timings(), luck, counts) as sessions:
        with no_more_files(), pytest.raises(ServiceError, match="Too many open files"):
            await sessions.enter(("runtime", "DEFAULT", "first"), wanted)
        second = await sessions.enter(("runtime", "DEFAULT", "second"), wanted)
        assert len(sessions) == 1
        await sessions.stop(second)


@needs_bubblewrap
async def test_closing_kills_a_supervisor_that_hangs(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "CLOSE_S", 0.5)
    async with SandboxRuntime(f"{ACTING}:act", SandboxOptions(), log_dir=tmp_path / "logs") as runtime:
        await Place(runtime, sink.transport, sink).launch({"do": "beat"})
        os.kill(supervisor_of(os.getpid()), signal.SIGSTOP)
    await sink.until_quiet("beat")


async def test_a_cluster_that_refuses_to_be_looked_at_ends_nothing_else(tmp_path: Path, sink: Sink) -> None:
    async with (
        fake_kube(tmp_path / "kube") as kube,
        placed(kube, sink) as first,
        placed(kube, sink) as second,
    ):
        attempt = await first.launch({"do": "beat"})
        kube.down = True
        assert await second.runtime.adopt(attempt) is None
        kube.denied.add(("list", "pods"))
        kube.down = False
        await asyncio.sleep(0.6)  # three searches
        kube.denied.clear()
        assert (await second.runtime.status(attempt)).phase is Phase.RUNNING
        await second.launch({"do": "beat"}, "other")


async def test_verifiers_take_no_turns_of_the_agents(tmp_path: Path) -> None:
    class Counting(Unlimited):
        launches = 0

        @asynccontextmanager
        async def launch_slot(self) -> AsyncIterator[None]:
            self.launches += 1
            async with super().launch_slot():
                yield

    limiter = Counting()
    finished, _ = await verified(tmp_path, hand_in, half, limiter=limiter)
    assert [one.outcome.reward for one in finished] == [0.5, 0.5]
    assert limiter.launches == 2


# --- whose is whose ---------------------------------------------------------------------------------------


def test_verifiers_of_two_runs_are_distinguished(tmp_path: Path) -> None:
    """They may share a cluster, where a reaper of the one finds its own by name."""
    names: set[str] = set()
    config = TrainConfig(
        model="m", agent="a.py:a", verifier="v.py:v", verifier_runtime="ray", runtime="ray=127.0.0.1:6379"
    )
    for run in ("one", "two"):
        carrier = FilesTransport(tmp_path)
        agents: Any = factory.runtime(config, RunDirectory(tmp_path / run), carrier)
        judges: Any = factory.verifier_runtime(config, RunDirectory(tmp_path / run), carrier)
        names |= {agents.runtime._name, judges.runtime._name}
    assert len(names) == 4


async def test_a_run_does_not_continue_elsewhere_while_its_old_place_may_still_run_something(
    tmp_path: Path,
) -> None:
    roster = SessionRegistry(tmp_path / "sessions.sqlite")
    gone = dead()
    roster.add_owner(gone)
    roster.record("r.1", "container", gone, outlives=True, phase=Phase.RUNNING)
    runtime = TrackedRuntime(InlineRuntime(good), roster, "inline")
    with pytest.raises(UsageError, match=r"in container \(r\.1\).*afield cleanup"):
        await runtime.__aenter__()
    assert [entry.session_id for entry in roster.entries()] == ["r.1"]
    roster.remove("r.1")
    async with runtime:
        pass


async def test_a_runtime_that_gets_no_guard_is_closed_again(tmp_path: Path) -> None:
    @asynccontextmanager
    async def none() -> AsyncIterator[None]:
        raise OSError("no process can be started")
        yield

    there: dict[str, Any] = {"r.1": None}
    runtime = TrackedRuntime(
        Elsewhere(there, lingers=True), SessionRegistry(tmp_path / "sessions.sqlite"), "elsewhere", none
    )
    with pytest.raises(OSError, match="no process"):
        await runtime.__aenter__()
    assert there == {}


# --- configuration ----------------------------------------------------------------------------------------


def test_the_settings_of_a_run_are_readable_by_its_owner_only(tmp_path: Path) -> None:
    """`env` of a place may hold a key."""
    from afield.cli.train import save_config

    save_config(run := RunDirectory(tmp_path), TrainConfig(model="m"))
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600


def test_a_resumed_run_takes_what_the_file_and_the_command_say_of_one_place(tmp_path: Path) -> None:
    from afield.cli import train

    told = TrainConfig(model=str(POLICY), runtime="container=agents/math:1")
    train.save_config(run := RunDirectory(tmp_path), told)
    run.write_tasks([Task("t", {})])
    file = tmp_path / "train.toml"
    file.write_text("[train.container]\nnetwork = 'mine'\n")
    args = argparse.Namespace(config=file, resume=None, set=["container.user=me"], role="all")
    config, _ = train.resume(run, args, "train", Environment.read())
    assert (config.container.network, config.container.user) == ("mine", "me")


@pytest.mark.parametrize(
    "given",
    [
        {"runtime": "kubernetes=agents/math:1"},
        {"runtime": "agentcore=arn:aws:bedrock-agentcore:us-west-2:123456789012:runtime/math-0123456789"},
    ],
)
def test_agents_elsewhere_are_not_sent_to_a_gateway_that_only_this_machine_reaches(
    given: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match=r"127\.0\.0\.1.*gateway_url"):
        factory.check_reachable(TrainConfig(model="m", **given))
    ways: tuple[dict[str, Any], ...] = (
        {"gateway": "http://gateway.example:8400"},
        {"gateway_url": "http://me.example:8400", "gateway_port": 8400},
        {"gateway_host": "0.0.0.0"},
    )
    for reached in ways:
        factory.check_reachable(TrainConfig(model="m", **given, **reached))
