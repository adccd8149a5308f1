"""The contract of runtimes on a Ray cluster of two nodes on this machine, and what is Ray's alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
from ray.cluster_utils import Cluster
from tests.contracts.runtime_contract import RuntimeContract, controller

from afield.engines.scripted import ScriptedEngine
from afield.errors import InfrastructureFailure, UsageError
from afield.interfaces.runtime import Phase
from afield.orchestrator.groups import GroupRunner, GroupSpec
from afield.orchestrator.state import RunState
from afield.runtimes.ray.pool import UNAVAILABLE_TIMEOUT_S
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, FailureKind, Reason, Task
from agents.places import ACTING, AGENTS, BOUND_S, Place, Spec, alive, until
from agents.sink import Sink
from support.gateways import running
from support.in_process_collection import YES, Collection
from support.ray_env import made

pytestmark = [pytest.mark.real, pytest.mark.anyio]
NODE = {"object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **NODE})
    made.add_node(num_cpus=1, **NODE)
    try:
        yield made
    finally:
        made.shutdown()


@contextlib.asynccontextmanager
async def sinking(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


class TestRay(RuntimeContract):
    address = ""

    @pytest.fixture(autouse=True)
    def joined(self, cluster: Cluster) -> None:
        self.address = cluster.address

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        options = {"target": target, "folder": str(folder), "address": self.address}
        return Spec.of(made, {**options, "memory_mb": 256})

    async def test_a_daemon_ends_when_its_session_does(self, place: Place, sink: Sink) -> None:
        attempt = await place.launch({"do": "daemon"})
        assert (await place.wait(attempt)).failure is None
        told = len(sink.told("daemon"))
        await anyio.sleep(1.0)
        assert len(sink.told("daemon")) <= told + 1, "one may have been under way"

    async def test_every_session_has_a_process_of_its_own(self, place: Place, sink: Sink) -> None:
        for i in range(5):
            assert (await place.wait(await place.launch({"do": "reward"}, f"r{i}"))).failure is None
        assert len({mark.pid for mark in sink.told("began")}) == 5

    async def test_another_process_can_see_and_stop_a_session(
        self, place: Place, sink: Sink, tmp_path: Path
    ) -> None:
        attempt = Attempt("other", 1)
        async with controller(self.spec(tmp_path), place, {"do": "beat", "say": "good evening"}, attempt):
            await sink.until_told("beat")
            assert [live.session_id for live in await place.runtime.list()] == ["other.1"]
            assert (await place.runtime.status(attempt)).phase is Phase.RUNNING
            assert "good evening" in await place.runtime.logs(attempt)
            assert await place.runtime.adopt(attempt) is True
            await place.runtime.stop(attempt)
            await sink.until_quiet("beat")
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.CANCELLED

    async def test_a_run_does_not_see_the_sessions_of_another(
        self, place: Place, sink: Sink, tmp_path: Path
    ) -> None:
        other = Spec.of(made, {**self.spec(tmp_path).options, "name": "run-2"})
        attempt = Attempt("other", 1)
        async with controller(other, place, {"do": "beat"}, attempt):
            await sink.until_told("beat")
            assert await place.runtime.list() == []
            await place.runtime.stop(attempt)
            await sink.until_told("beat", times=5)

    async def test_what_a_dead_nest_had_is_known_at_once(self, place: Place, sink: Sink) -> None:
        attempt = await place.launch({"do": "daemon", "stay": True})
        await sink.until_told("daemon", times=2)
        where = (await place.runtime.status(attempt)).where
        os.kill(int(where.partition("worker ")[2].partition(",")[0]), signal.SIGKILL)
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.DIED
        await sink.until_quiet("daemon")
        await sink.until_quiet("beat")
        assert (await place.wait(await place.launch({"do": "reward"}, n=2))).failure is None

    async def test_what_a_killed_parent_leaves_is_ended_too(self, place: Place, sink: Sink) -> None:
        attempt = await place.launch({"do": "daemon", "stay": True})
        await sink.until_told("daemon", times=2)
        session = int((await place.runtime.status(attempt)).where.rpartition("pid ")[2])
        os.kill(_parent(session), signal.SIGKILL)
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.DIED
        assert "signal 9" in ended.failure.message
        await sink.until_quiet("daemon")
        assert (await place.wait(await place.launch({"do": "reward"}, n=2))).failure is None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- nodes ---------------------------------------------------------------------------------------


async def test_a_lost_node_fails_its_attempts_within_seconds(cluster: Cluster, tmp_path: Path) -> None:
    doomed = cluster.add_node(num_cpus=1, resources={"doomed": 1}, **NODE)
    options = {"address": cluster.address, "resources": {"doomed": 0.5}}
    async with sinking(tmp_path) as sink, made(f"{ACTING}:act", str(tmp_path), **options) as runtime:
        place = Place(runtime, sink.transport, sink)
        attempts = [await place.launch({"do": "brood"}, f"r{i}") for i in range(2)]
        for attempt in attempts:
            await sink.until_told("beat", attempt.session_id)
        before = time.monotonic()
        cluster.remove_node(doomed, allow_graceful=False)
        for attempt in attempts:
            failure = (await place.wait(attempt)).failure
            assert failure and failure.kind is FailureKind.INFRASTRUCTURE
            assert failure.reason is Reason.DIED
            assert "node" in failure.message
        assert time.monotonic() - before < UNAVAILABLE_TIMEOUT_S, (
            "and not because their nests were out of reach so long"
        )
        for what in ("beat", "child"):
            await sink.until_quiet(what)


async def test_rollouts_of_a_lost_node_finish_on_the_other(cluster: Cluster, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    target = f"{AGENTS / 'leaving_marks.py'}:agent"
    runtime = made(target, str(tmp_path), address=cluster.address, cpus=0.25)
    transport = FilesTransport(tmp_path / "outcomes")
    engine = ScriptedEngine(lambda _: YES)
    async with running(engine, tmp_path / "gateway") as up, transport, runtime:
        with RunState(tmp_path / "run_state.sqlite") as run_state:
            bench = Collection(tmp_path, up, transport, run_state, runtime)
            lost_one = tmp_path / "lost"
            task = Task("t", {"marks": str(marks), "until": str(lost_one)})
            async with (
                bench.runner(rollouts=8, launch_timeout_s=300.0) as (plan, runner),
                anyio.create_task_group() as group,
            ):
                group.start_soon(_lose_one, cluster, marks, bench, lost_one)
                collector = GroupRunner(plan, runner, bench.rollout_store)
                (grouped,) = await collector.collect([GroupSpec("exp-e0-t", task, 0)])
    assert [f.outcome.reward for f in grouped.finished] == [1.0] * 8
    lost = [outcome.failure for outcome, retried in bench.seen.ended if outcome.failure and retried]
    assert len(lost) == 4
    assert all(f.kind is FailureKind.INFRASTRUCTURE and f.reason is Reason.DIED for f in lost)
    assert len(marks.read_text().split()) == 12
    cluster.add_node(num_cpus=1, **NODE)


async def _lose_one(cluster: Cluster, marks: Path, bench: Collection, lost_one: Path) -> None:
    """One of the two, as soon as all rollouts run; the others end when those there are known to be lost."""
    await until(lambda: marks.exists() and len(marks.read_text().split()) == 8)
    (node,) = cluster.worker_nodes
    await anyio.to_thread.run_sync(lambda: cluster.remove_node(node, allow_graceful=False))
    await until(lambda: sum(retried for _, retried in bench.seen.ended) == 4)
    await anyio.Path(lost_one).touch()


# --- nests ---------------------------------------------------------------------------------------


async def test_idle_nests_are_given_back(cluster: Cluster, tmp_path: Path) -> None:
    async with sinking(tmp_path) as sink:
        options = {"address": cluster.address, "idle_s": 0.5}
        async with made(f"{ACTING}:act", str(tmp_path), **options) as runtime:
            place = Place(runtime, sink.transport, sink)
            assert (await place.wait(await place.launch({"do": "reward"}))).failure is None
            with anyio.fail_after(BOUND_S):
                while ray.available_resources().get("CPU", 0) < 2:
                    await anyio.sleep(0.1)
            assert (await place.wait(await place.launch({"do": "reward"}, n=2))).failure is None


LATE = """
import sys

import afield

COUNT = []


@afield.agent
def act(task):
    known = "wave" in sys.modules
    import wave

    COUNT.append(1)
    return known + 10 * len(COUNT)
"""


async def test_sessions_share_what_libraries_import_and_nothing_else(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "late.py").write_text(LATE)
    target = f"{tmp_path / 'agent' / 'late.py'}:act"
    async with sinking(tmp_path) as sink, made(target, str(tmp_path), address=cluster.address) as runtime:
        place = Place(runtime, sink.transport, sink)
        rewards = []
        for i in range(3):
            attempt = await place.launch({}, f"r{i}")
            assert (await place.wait(attempt)).failure is None
            rewards.append(await place.reward(attempt))
    assert rewards == [11.0, 11.0, 11.0]


async def test_attempts_wait_until_there_is_room(cluster: Cluster, tmp_path: Path) -> None:
    async with sinking(tmp_path) as sink:
        options = {"address": cluster.address, "cpus": 1.0}
        async with made(f"{ACTING}:act", str(tmp_path), **options) as runtime:
            place = Place(runtime, sink.transport, sink)
            first = [await place.launch({"do": "beat"}, f"r{i}") for i in range(2)]
            async with anyio.create_task_group() as group:
                group.start_soon(place.launch, {"do": "reward", "value": 0.5}, "late")
                await anyio.sleep(1.0)
                late = Attempt("late", 1)
                assert (await runtime.status(late)).phase is Phase.STARTING
                await runtime.stop(first[0])
            assert (await place.wait(late)).failure is None
            assert await place.reward(late) == 0.5


async def test_one_that_is_stopped_while_it_waits_never_starts(cluster: Cluster, tmp_path: Path) -> None:
    async with sinking(tmp_path) as sink:
        options = {"address": cluster.address, "cpus": 1.0}
        async with made(f"{ACTING}:act", str(tmp_path), **options) as runtime:
            place = Place(runtime, sink.transport, sink)
            for i in range(2):
                await place.launch({"do": "beat"}, f"r{i}")
            launching = asyncio.create_task(place.launch({"do": "reward"}, "late"))
            await anyio.sleep(0.5)
            await runtime.stop(Attempt("late", 1))
            with pytest.raises(InfrastructureFailure, match="stopped"):
                await launching
            assert not sink.told("began", "late.1")


# --- what is refused before the first rollout ----------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpus": 64.0}, "CPU 64"),
        ({"resources": {"unicorn": 1.0}}, "unicorn"),
        ({"cpus": 1.5}, "whole number"),
        ({"memory_mb": 0}, "memory_mb"),
    ],
)
async def test_what_no_node_has_is_refused(
    cluster: Cluster, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    async with made(f"{ACTING}:act", str(tmp_path), address=cluster.address, **options) as runtime:
        with pytest.raises(UsageError, match=said):
            await runtime.check()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "host:port"])
async def test_a_cluster_that_does_not_answer_is_refused(tmp_path: Path, address: str) -> None:
    with anyio.fail_after(BOUND_S), pytest.raises(UsageError, match=address):
        async with made(f"{ACTING}:act", str(tmp_path), address=address):
            pass


@pytest.mark.parametrize(("body", "said"), [("import unheard_of", "unheard_of"), ("x = 1", "has no 'act'")])
async def test_an_agent_that_cannot_be_loaded_is_refused(
    cluster: Cluster, tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "broken.py").write_text(body)
    target = f"{tmp_path / 'agent' / 'broken.py'}:act"
    async with made(target, str(tmp_path), address=cluster.address) as runtime:
        with pytest.raises(UsageError, match=said):
            await runtime.check()
        with pytest.raises(InfrastructureFailure, match=said), anyio.fail_after(BOUND_S):
            await runtime.launch(Attempt("r", 1), {})


async def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"afield\[ray\]"):
        async with made(f"{ACTING}:act", str(tmp_path)):
            pass


# --- a cluster of this process -------------------------------------------------------------------
# Last: Ray asks for tokens there, and then in this process for good; the cluster of the tests above has none.


async def test_without_an_address_a_cluster_is_started_and_ended(tmp_path: Path) -> None:
    async with sinking(tmp_path) as sink:
        async with made(f"{ACTING}:act", str(tmp_path)) as runtime:
            assert not runtime.capabilities.reaches and not runtime.capabilities.lists
            place = Place(runtime, sink.transport, sink)
            attempt = await place.launch({"do": "beat"})
            await sink.until_told("beat")
        assert not ray.is_initialized()
        ended = await place.wait(attempt)
        assert ended.failure and ended.failure.reason is Reason.CANCELLED
        await sink.until_quiet("beat")


async def test_a_killed_controller_takes_its_cluster_with_it(tmp_path: Path) -> None:
    async with sinking(tmp_path) as sink:
        spec = Spec.of(made, {"target": f"{ACTING}:act", "folder": str(tmp_path)})
        place = Place(spec.build(), sink.transport, sink)
        async with controller(spec, place, {"do": "daemon", "stay": True}, Attempt("r", 1)) as process:
            await sink.until_told("daemon", times=2)
            # Two agents of Ray's own notice the end of their node within a minute or so, and end then.
            started = [pid for pid in _descendants(process.pid) if "Agent" not in _named(pid)]
            assert any("fork_server" in _named(pid) for pid in started)
            assert any("raylet" in _named(pid) for pid in started)
        for what in ("beat", "daemon"):
            await sink.until_quiet(what)
        await until(lambda: not any(alive(pid) for pid in started))


def _named(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _descendants(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        with contextlib.suppress(FileNotFoundError):
            for task in Path(f"/proc/{one}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return found
