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

from afield.cli.main import main
from afield.runtimes.registry import SessionRegistry, TrackedRuntime
from afield.settings.runtimes import KubernetesOptions, ResourceLimits
from afield.settings.train import TrainConfig
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt
from agents.places import ACTING, Place, Spec
from agents.sink import Sink
from support.fake_kube import NAMESPACE
from support.kubernetes import FakeKube, fake_kube, image_of, jobs, runtime_on, until

pytestmark = pytest.mark.anyio
ONE = Attempt("r", 1)


def tracked(run: str, **where: str) -> TrackedRuntime:
    """The runtime of a controller in another process."""
    return TrackedRuntime(made(**where), SessionRegistry(Path(run) / "sessions.sqlite"), "kubernetes")


class Cluster:
    def __init__(self, kube: FakeKube, sink: Sink, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
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
        self.spec = Spec.of(tracked, {"run": str(self.run), **where})

    async def killed_controller(self, row: dict[str, Any]) -> None:
        place = Place(runtime_on(self.kube, "the run"), self.sink.transport, self.sink)
        async with controller(self.spec, place, row, ONE):
            await self.sink.until_told("beat")
        await self.sink.until_told("beat")

    async def output(self, *args: str) -> str:
        """Output of a command, which runs in a thread because the cluster needs this event loop."""
        code = await anyio.to_thread.run_sync(main, list(args))
        out, err = self.capsys.readouterr()
        assert code == 0, (out, err)
        return out

    async def sessions(self, *args: str) -> list[dict[str, Any]]:
        return json.loads(await self.output(*args, "--json"))["sessions"]


@pytest.fixture
async def cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[Cluster]:
    async with (
        FilesTransport(tmp_path / "store") as transport,
        Sink(transport).running() as sink,
        fake_kube(tmp_path / "kube") as kube,
    ):
        for name, value in {**kube.nodes.env, "AFIELD_RUNS": str(tmp_path / "runs")}.items():
            monkeypatch.setenv(name, value)
        yield Cluster(kube, sink, tmp_path / "runs", capsys)


async def test_sessions_of_a_killed_controller_are_listed_read_and_ended(cluster: Cluster) -> None:
    await cluster.killed_controller({"do": "beat", "say": "good morning"})
    [line] = await cluster.sessions("ps")
    assert (line["session"], line["orphan"], line["where"]) == ("r.1", True, "")
    [line] = await cluster.sessions("ps", "--all")
    assert line["orphan"] is True and line["where"].startswith(f"{NAMESPACE}/")
    assert "good morning" in await cluster.output("logs", "r.1")
    assert [(one["session"], one["ended"]) for one in await cluster.sessions("cleanup")] == [("r.1", True)]
    await cluster.sink.until_quiet("beat")
    assert await cluster.sessions("ps", "--all") == await cluster.sessions("cleanup") == []
    await until(lambda: jobs(cluster.kube) == [])


async def test_a_session_that_is_not_registered_is_found_by_its_runtime_and_ended(cluster: Cluster) -> None:
    await cluster.killed_controller({"do": "beat"})
    with contextlib.closing(SessionRegistry(cluster.run / "sessions.sqlite")) as registry:
        registry.remove("r.1")
    assert await cluster.sessions("ps") == []
    [line] = await cluster.sessions("ps", "--all")
    assert (line["session"], line["owner"]) == ("r.1", None)
    assert "not registered" in await cluster.output("ps", "--all")
    assert [one["session"] for one in await cluster.sessions("cleanup", "the run")] == ["r.1"]
    await cluster.sink.until_quiet("beat")


async def test_cleanup_spares_sessions_of_a_live_controller_and_kill_ends_them(cluster: Cluster) -> None:
    place = Place(cluster.spec.build(), cluster.sink.transport, cluster.sink)
    async with place.runtime:
        await place.launch({"do": "beat"})
        await cluster.sink.until_told("beat")
        assert await cluster.sessions("cleanup") == []
        assert await cluster.sessions("kill", "--orphans") == []
        await cluster.sink.until_told("beat", times=3)
        assert [one["ended"] for one in await cluster.sessions("kill", "r.1")] == [True]
        await cluster.sink.until_quiet("beat")
        assert (await place.wait(ONE)).failure is not None
