"""`afield ps`, `logs`, `kill` and `cleanup` on sessions of a cluster, which outlive their controllers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.contracts.runtime_contract import controller
from tests.runtimes.test_kubernetes_contract import made

from afield.runtimes.registry import SessionRegistry, TrackedRuntime
from afield.settings.runtimes import KubernetesOptions, ResourceLimits
from afield.settings.train import TrainConfig
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt
from agents.places import ACTING, Place, Spec
from agents.sink import Sink
from support.fake_kube import NAMESPACE
from support.kubernetes import FakeKube, fake_kube, image_of, jobs, runtime_on, until
from support.processes import command

pytestmark = pytest.mark.anyio
ONE = Attempt("r", 1)


def rostered(run: str, **where: str) -> TrackedRuntime:
    """For a controller in a process of its own."""
    return TrackedRuntime(made(**where), SessionRegistry(Path(run) / "sessions.sqlite"), "kubernetes")


class Cluster:
    def __init__(self, kube: FakeKube, sink: Sink, runs: Path) -> None:
        self.kube = kube
        self.sink = sink
        self.runs = runs
        self.run = runs / "the run"
        options = KubernetesOptions(
            image=image_of(kube, f"{ACTING}:act"),
            namespace=NAMESPACE,
            kubeconfig=str(kube.kubeconfig),
            limits=ResourceLimits(cpus=0.5, memory_mb=300),
        )
        self.run.mkdir(parents=True)
        config = TrainConfig(model="m", runtime="kubernetes", kubernetes=options)
        (self.run / "run.json").write_bytes(msgspec.json.encode(config))
        where = {"kubeconfig": options.kubeconfig, "image": options.image, "log_dir": str(self.run / "kept")}
        self.spec = Spec.of(rostered, {"run": str(self.run), **where})

    async def killed_controller(self, row: dict[str, Any]) -> None:
        place = Place(runtime_on(self.kube, "the run"), self.sink.transport, self.sink)
        async with controller(self.spec, place, row, ONE):
            await self.sink.until_told("beat")
        await self.sink.until_told("beat")

    async def says(self, *args: str, code: int = 0) -> str:
        """In a process of its own, as the cluster is in this one."""
        done = await anyio.run_process(
            command(*args), check=False, env={**self.kube.nodes.env, "AFIELD_RUNS": str(self.runs)}
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout.decode()

    async def told(self, *args: str, code: int = 0) -> list[dict[str, Any]]:
        return json.loads(await self.says(*args, "--json", code=code))["sessions"]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with (
        FilesTransport(tmp_path / "store") as transport,
        Sink(transport).running() as sink,
        fake_kube(tmp_path / "kube") as kube,
    ):
        yield Cluster(kube, sink, tmp_path / "runs")


async def test_what_a_killed_controller_left_is_seen_read_and_reaped(cluster: Cluster) -> None:
    await cluster.killed_controller({"do": "beat", "say": "good morning"})
    [line] = await cluster.told("ps")
    assert (line["session"], line["orphan"], line["where"]) == ("r.1", True, "")
    [line] = await cluster.told("ps", "--all")
    assert line["orphan"] is True and line["where"].startswith(f"{NAMESPACE}/")
    assert "good morning" in await cluster.says("logs", "r.1")
    assert [(one["session"], one["ended"]) for one in await cluster.told("cleanup")] == [("r.1", True)]
    await cluster.sink.until_quiet("beat")
    assert await cluster.told("ps", "--all") == await cluster.told("cleanup") == []
    await until(lambda: jobs(cluster.kube) == [])


async def test_a_session_that_is_in_no_roster_is_found_in_its_place_and_reaped(cluster: Cluster) -> None:
    await cluster.killed_controller({"do": "beat"})
    with contextlib.closing(SessionRegistry(cluster.run / "sessions.sqlite")) as roster:
        roster.remove("r.1")
    assert await cluster.told("ps") == []
    [line] = await cluster.told("ps", "--all")
    assert (line["session"], line["owner"]) == ("r.1", None)
    assert "not in the roster" in await cluster.says("ps", "--all")
    assert [one["session"] for one in await cluster.told("cleanup", "the run")] == ["r.1"]
    await cluster.sink.until_quiet("beat")


async def test_what_a_living_controller_has_is_not_reaped_but_can_be_killed(cluster: Cluster) -> None:
    place = Place(cluster.spec.build(), cluster.sink.transport, cluster.sink)
    async with place.runtime:
        await place.launch({"do": "beat"})
        await cluster.sink.until_told("beat")
        assert await cluster.told("cleanup") == []
        assert await cluster.told("kill", "--orphans") == []
        await cluster.sink.until_told("beat", times=3)
        assert [one["ended"] for one in await cluster.told("kill", "r.1")] == [True]
        await cluster.sink.until_quiet("beat")
        assert (await place.wait(ONE)).failure is not None
