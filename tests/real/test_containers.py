"""The container runtime against a real engine: Podman, started here, with an image built here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import anyio
import pytest
from aiohttp import web

import containers
from afield.errors import InfrastructureFailure, Unavailable, UsageError
from afield.options import Limits
from afield.runtimes.container_spec import name_of
from afield.seams.runtime import Phase
from afield.transports.files import FilesTransport
from afield.types import Attempt, Reason
from agents.places import BOUND_S, Place, Spec
from agents.sink import Sink
from contracts.runtime_contract import RuntimeContract, controller

pytestmark = [pytest.mark.real, pytest.mark.anyio]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[containers.Podman]:
    try:
        with containers.podman(tmp_path_factory.mktemp("podman")) as podman:
            yield podman
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.fixture
def run(engine: containers.Podman) -> Iterator[str]:
    """The name of a run; nothing of it is left after the test, however that went."""
    name = f"test-{uuid4().hex[:8]}"
    yield name
    engine.remove_all(name)


class TestContainer(RuntimeContract):
    @pytest.fixture(autouse=True)
    def _engine(self, engine: containers.Podman, run: str) -> None:
        self.engine, self.run = engine, run

    def spec(self, folder: Path, target: str = "acting.py:act") -> Spec:
        given = {"socket": self.engine.socket, "image": self.engine.image}
        where = {"folder": str(folder), "run": self.run, "target": Path(target).name}
        return Spec("containers:runtime", {**given, **where})

    @pytest.fixture
    async def sink(self, tmp_path: Path) -> AsyncIterator[Sink]:
        """At an address that containers reach also when nobody relays to our loopback."""
        async with FilesTransport(tmp_path / "store") as transport:
            async with Sink(transport).running("0.0.0.0", "host.containers.internal") as sink:
                yield sink


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink
