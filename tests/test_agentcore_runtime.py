"""The contract on AgentCore, spoken by real boto3 clients with a compatible server on this machine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from afield.acr.images import Image
from afield.acr.quotas import Quotas
from afield.acr.server import AcrOptions, AcrServer
from afield.errors import InfrastructureFailure, TaskFailure, Throttled, UsageError
from afield.options import AgentCoreOptions
from afield.runtimes.agentcore import AgentCoreRuntime
from afield.seams.runtime import Phase
from afield.transports.files import FilesTransport
from afield.types import Attempt
from agents.places import ACTING, AGENTS, Place, Spec
from agents.sink import Sink
from contracts.runtime_contract import RuntimeContract

pytestmark = pytest.mark.anyio

ROLE = "arn:aws:iam::123456789012:role/agents"
IMAGES = {"acting": f"{ACTING}:act", "slow": f"{AGENTS / 'slow_start.py'}:act"}


def options(url: str, image: str = "acting", **more: Any) -> AgentCoreOptions:
    return AgentCoreOptions(
        **{"endpoint_url": url, "agent_name": image, "container_uri": image, "role_arn": ROLE, **more}
    )


def made(url: str, image: str, folder: str) -> AgentCoreRuntime:
    """For the contract: also called by a controller in a process of its own."""
    return AgentCoreRuntime(options(url, image), name="run", ledger=Path(folder) / "sessions.sqlite")


@asynccontextmanager
async def serving(sink: Sink | None = None, isolation: Any = "none", **more: Any) -> AsyncIterator[str]:
    """A server with the agents of these tests; sandboxed ones reach the sink and nothing else."""
    port = int(sink.url.rpartition(":")[2]) if sink else 0
    values = {
        "images": {name: Image(target=target) for name, target in IMAGES.items()},
        "isolation": isolation,
        "allow": (("127.0.0.1", port),) if sink else (),
        "quotas": Quotas(start_rate=1000, stop_rate=1000, invoke_rate=1000),
        **more,
    }
    async with AcrServer(AcrOptions(**values)) as server:
        yield server.url


class TestAgentCore(RuntimeContract):
    url = ""

    def spec(self, folder: Path, target: str = f"{ACTING}:act") -> Spec:
        image = next(name for name, agent in IMAGES.items() if agent == target)
        where = {"url": self.url, "image": image, "folder": str(folder)}
        return Spec("test_agentcore_runtime:made", where)

    @pytest.fixture
    async def place(self, sink: Sink, tmp_path: Path) -> AsyncIterator[Place]:
        async with serving(sink, "none") as self.url:
            for image in IMAGES:
                async with made(self.url, image, str(tmp_path)) as runtime:
                    await runtime.check()
            async with self.spec(tmp_path).build() as runtime:
                yield Place(runtime, sink.transport, sink)
