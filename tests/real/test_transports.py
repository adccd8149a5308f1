"""The contract of transports on real servers: S3 (moto, SeaweedFS) with SQS (moto), NATS, Redis.

A server that cannot be had here skips with the reason; where `CI` is set it fails.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

import servers
from afield.sdk import s3store
from afield.transports.files import FilesStore
from afield.transports.nats import NatsNotifier
from afield.transports.redis import RedisNotifier
from afield.transports.s3 import S3Outcomes
from afield.transports.sqs import SqsNotifier
from afield.transports.stored import StoreTransport
from contracts.transport_contract import AgentsContract, Backend, TransportContract

pytestmark = [pytest.mark.real, pytest.mark.anyio]
REGION = "us-east-1"
Get = Callable[[str], servers.Server]


class Cloud:
    """A bucket and a queue of their own."""

    def __init__(self, name: str, s3_url: str, sqs_url: str) -> None:
        self.name = name
        self.bucket = f"b-{uuid.uuid4().hex[:12]}"
        self.prefix = f"q-{uuid.uuid4().hex[:12]}"
        self.s3_url = s3_url
        self.sqs_url = sqs_url
        s3store.client("s3", endpoint=s3_url, region=REGION).create_bucket(Bucket=self.bucket)

    def transport(self, *, lease_s: float = 30.0, times: int = 10, few: int = 64) -> StoreTransport:
        store = S3Outcomes(self.bucket, endpoint=self.s3_url, region=REGION)
        queue = SqsNotifier(queue_prefix=self.prefix, endpoint=self.sqs_url, region=REGION, lease_s=lease_s)
        return StoreTransport(store, queue, times=times, few=few)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        def look() -> list[str]:
            sqs = s3store.client("sqs", endpoint=self.sqs_url, region=REGION)
            url = sqs.get_queue_url(QueueName=f"{self.prefix}-{exp_id}-dead")["QueueUrl"]
            said = sqs.receive_message(
                QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=0
            )
            return [json.dumps([one["Body"], one["MessageAttributes"]]) for one in said.get("Messages", [])]

        return await anyio.to_thread.run_sync(look)


class FilesAndQueue:
    """A directory, with hints through a server."""

    def __init__(self, name: str, root: Path, url: str) -> None:
        self.name = name
        self.root = root
        self.url = f"{url}?name=n{uuid.uuid4().hex[:12]}"

    def transport(self, *, lease_s: float = 30.0, times: int = 10, few: int = 64) -> StoreTransport:
        kind = NatsNotifier if self.name == "nats" else RedisNotifier
        return StoreTransport(FilesStore(self.root), kind(self.url, lease_s=lease_s), times=times, few=few)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        notifier = transport.notifier
        if isinstance(notifier, RedisNotifier):
            client = notifier._client
            rows = await client.xrange(notifier.place.stream_key(exp_id, "dead"))
            return [str(fields) for _, fields in rows]
        assert isinstance(notifier, NatsNotifier)
        stream = notifier._connection.jetstream()
        info = await stream.stream_info(f"{notifier.place.name}-dead")
        letters = [
            await stream.get_msg(f"{notifier.place.name}-dead", n + 1) for n in range(info.state.messages)
        ]
        return [f"{one.data.decode()} {one.headers}" for one in letters]


def point_agents(monkeypatch: pytest.MonkeyPatch, s3_url: str, sqs_url: str) -> None:
    for name, value in {
        **servers.KEYS,
        "AWS_ENDPOINT_URL_S3": s3_url,
        "AWS_ENDPOINT_URL_SQS": sqs_url,
    }.items():
        monkeypatch.setenv(name, value)


def make(name: str, server: Get, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Backend:
    if name in {"nats", "redis"}:
        return FilesAndQueue(name, folder / "store", server(f"{name}_server").url)
    s3_url, sqs_url = server(name).url, server("moto").url
    point_agents(monkeypatch, s3_url, sqs_url)
    return Cloud(name, s3_url, sqs_url)


class TestRealServers(TransportContract, AgentsContract):
    @pytest.fixture(params=["moto", "seaweedfs", "nats", "redis"])
    def backend(
        self, request: pytest.FixtureRequest, server: Get, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Backend:
        return make(request.param, server, monkeypatch, tmp_path)
