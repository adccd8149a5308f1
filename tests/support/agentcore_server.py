"""The local AgentCore server with real boto3 clients, in the test's own process."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import aiohttp
import anyio
import boto3
from anyio import to_thread
from botocore.config import Config

from afield.agentcore_local.images import AgentImage
from afield.agentcore_local.server import AgentCoreServer, AgentCoreServerOptions
from support.paths import TESTS
from support.processes import alive

T = TypeVar("T")
PROGRAM = TESTS / "agents" / "agentcore_app.py"
ROLE = "arn:aws:iam::123456789012:role/agents"
IMAGES = {"math": AgentImage(script=str(PROGRAM))}
URI = "123456789012.dkr.ecr.us-west-2.amazonaws.com/math:latest"


def session_id() -> str:
    return str(uuid.uuid4())


async def wait_gone(*pids: int) -> None:
    """Killed processes take a moment to go."""
    with anyio.fail_after(60):
        while any(alive(pid) for pid in pids):
            await anyio.sleep(0.01)


def client(service: str, url: str) -> Any:
    config = Config(
        retries={"total_max_attempts": 1},
        max_pool_connections=64,
        read_timeout=60,
        parameter_validation=False,
    )
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    return boto3.client(service, endpoint_url=url, region_name="us-west-2", config=config, **keys)


class AgentCoreClient:
    """What a program that uses AgentCore does, without blocking the server beside it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.control = client("bedrock-agentcore-control", url)
        self.data = client("bedrock-agentcore", url)
        self.arn = ""

    async def call(self, fn: Callable[..., T], **kwargs: Any) -> T:
        return await to_thread.run_sync(partial(fn, **kwargs))

    async def create(self, name: str = "math", **more: Any) -> dict[str, Any]:
        wish: dict[str, Any] = {
            "agentRuntimeName": name,
            "agentRuntimeArtifact": {"containerConfiguration": {"containerUri": URI}},
            "roleArn": ROLE,
            "networkConfiguration": {"networkMode": "PUBLIC"},
            **more,
        }
        made = await self.call(self.control.create_agent_runtime, **wish)
        self.arn = made["agentRuntimeArn"]
        return made

    async def ready(self, name: str = "math", **more: Any) -> str:
        made = await self.create(name, **more)
        return await self.wait_created(made["agentRuntimeId"])

    async def wait_created(self, runtime_id: str) -> str:
        with anyio.fail_after(90):
            while True:
                got = await self.call(self.control.get_agent_runtime, agentRuntimeId=runtime_id)
                if got["status"] not in ("CREATING", "UPDATING"):
                    return got["status"]
                await anyio.sleep(0.02)

    def invoke_now(self, payload: Any, session: str, more: dict[str, Any]) -> dict[str, Any]:
        answer = self.data.invoke_agent_runtime(
            agentRuntimeArn=self.arn,
            runtimeSessionId=session,
            payload=payload if isinstance(payload, bytes) else json.dumps(payload).encode(),
            **more,
        )
        answer["body"] = answer["response"].read()
        return answer

    async def raw(self, payload: Any = None, session: str = "", **more: Any) -> dict[str, Any]:
        return await to_thread.run_sync(self.invoke_now, payload or {}, session or session_id(), more)

    async def invoke(self, payload: Any = None, session: str = "", **more: Any) -> dict[str, Any]:
        return json.loads((await self.raw(payload, session, **more))["body"])

    async def stop(self, session: str) -> dict[str, Any]:
        return await self.call(
            self.data.stop_runtime_session, agentRuntimeArn=self.arn, runtimeSessionId=session
        )

    async def view(self, what: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/_acr/{what}") as answer:
            return await answer.json()

    async def sessions(self) -> list[dict[str, Any]]:
        return (await self.view("sessions"))["sessions"]

    async def wait_sessions(self, n: int, seconds: float = 90) -> list[dict[str, Any]]:
        with anyio.fail_after(seconds):
            while len(found := await self.sessions()) != n:
                await anyio.sleep(0.05)
        return found


@asynccontextmanager
async def agentcore_server(**options: Any) -> AsyncIterator[AgentCoreClient]:
    """`isolation` is none unless a test is about the sandbox."""
    options = {"images": IMAGES, "isolation": "none", **options}
    http = options.pop("http", "auto")
    async with AgentCoreServer(AgentCoreServerOptions(**options), http=http) as server:
        yield AgentCoreClient(server.url)
