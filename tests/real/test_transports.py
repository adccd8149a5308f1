"""The contract of transports on real servers: S3 (moto, SeaweedFS) with SQS (moto), NATS, Redis.

A server that cannot be had here skips with the reason; where `CI` is set it fails.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from tests.contracts.transport_contract import (
    AgentsContract,
    Backend,
    TransportContract,
    every_hint,
    hint,
    waiting,
)

from afield import wire
from afield.errors import Unavailable
from afield.interfaces.transport import PendingAttempt
from afield.sdk.deliver import deliver
from afield.sdk.stores import aws_client
from afield.transports.notifiers.nats import NatsNotifier
from afield.transports.notifiers.redis import RedisNotifier
from afield.transports.notifiers.sqs import SqsNotifier
from afield.transports.stores.files import FilesStore
from afield.transports.stores.s3 import S3CollectorStore
from afield.transports.transport import StoreTransport
from afield.types import Attempt
from agents.invoking import EXP, invocation, record
from support import servers
from support.ports import free_ports

pytestmark = [pytest.mark.real, pytest.mark.anyio]
REGION = "us-east-1"
T = TypeVar("T")
Get = Callable[[str], servers.Server]


class Cloud:
    """A bucket and a queue of their own."""

    def __init__(self, name: str, s3_url: str, sqs_url: str) -> None:
        self.name = name
        self.bucket = f"b-{uuid.uuid4().hex[:12]}"
        self.prefix = f"q-{uuid.uuid4().hex[:12]}"
        self.s3_url = s3_url
        self.sqs_url = sqs_url
        aws_client("s3", endpoint=s3_url, region=REGION).create_bucket(Bucket=self.bucket)

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport:
        store = S3CollectorStore(self.bucket, endpoint=self.s3_url, region=REGION)
        queue = SqsNotifier(queue_prefix=self.prefix, endpoint=self.sqs_url, region=REGION, lease_s=lease_s)
        return StoreTransport(store, queue, max_deliveries=max_deliveries, single_reads=single_reads)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        def look() -> list[str]:
            sqs = aws_client("sqs", endpoint=self.sqs_url, region=REGION)
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

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport:
        kind = NatsNotifier if self.name == "nats" else RedisNotifier
        return StoreTransport(
            FilesStore(self.root),
            kind(self.url, lease_s=lease_s),
            max_deliveries=max_deliveries,
            single_reads=single_reads,
        )

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        notifier = transport.notifier
        if isinstance(notifier, RedisNotifier):
            client = notifier._client
            rows = await client.xrange(notifier.server.stream_key(exp_id, "dead"))
            return [str(fields) for _, fields in rows]
        assert isinstance(notifier, NatsNotifier)
        stream = notifier._connection.jetstream()
        info = await stream.stream_info(f"{notifier.server.name}-dead")
        letters = [
            await stream.get_msg(f"{notifier.server.name}-dead", n + 1) for n in range(info.state.messages)
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


# --- S3 and SQS: what only they have ------------------------------------------------------------------


@pytest.fixture
def cloud(server: Get, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    url = server("moto").url
    point_agents(monkeypatch, url, url)
    return Cloud("moto", url, url)


def queue(cloud: Cloud, name: str) -> str:
    sqs = aws_client("sqs", endpoint=cloud.sqs_url, region=REGION)
    return sqs.create_queue(QueueName=f"{cloud.prefix}-{name}")["QueueUrl"]


def on_queue(cloud: Cloud, url: str, **rest: Any) -> StoreTransport:
    notifier = SqsNotifier(url, endpoint=cloud.sqs_url, region=REGION, lease_s=1, **rest)
    return StoreTransport(S3CollectorStore(cloud.bucket, endpoint=cloud.s3_url, region=REGION), notifier)


async def test_events_of_the_bucket_are_hints(cloud: Cloud) -> None:
    """The agent sends no message: the bucket does, for its data and for its commit."""
    url = queue(cloud, "events")
    s3 = aws_client("s3", endpoint=cloud.s3_url, region=REGION)
    arn = f"arn:aws:sqs:{REGION}:123456789012:{cloud.prefix}-events"
    events = {"QueueConfigurations": [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"]}]}
    s3.put_bucket_notification_configuration(Bucket=cloud.bucket, NotificationConfiguration=events)
    async with on_queue(cloud, url) as transport:
        one = invocation(outcome_url=None, s3_bucket=cloud.bucket, input_id="a b/ü+c")
        assert await anyio.to_thread.run_sync(deliver, one, record(one))
        assert await every_hint(transport, 1) == {Attempt("r", 1)}
        assert await transport.decision(waiting(input_id="a b/ü+c")) == record(one)
        await transport.acknowledge(EXP, [Attempt("r", 1)])
        assert await transport.hints(EXP, 2.5) == []


async def test_a_shared_queue_leaves_each_experiment_its_own(cloud: Cloud) -> None:
    url = queue(cloud, "shared")
    async with on_queue(cloud, url) as here, on_queue(cloud, url) as there:
        await here.notifier.send("theirs", hint("r.1", "theirs"))
        await here.notifier.send(EXP, hint("r.2"))
        found = await every_hint(here, 1)
        assert found == {Attempt("r", 2)}
        await here.acknowledge(EXP, list(found))
        assert await here.hints(EXP, 1) == []
        with anyio.fail_after(90):
            while not (theirs := await there.hints("theirs", 1)):
                pass
        assert theirs == [Attempt("r", 1)]


@pytest.mark.parametrize("how", ["told", "redrive"])
async def test_dead_letters_go_where_the_queue_says(cloud: Cloud, how: str) -> None:
    url, dead = queue(cloud, "live"), queue(cloud, "dead")
    sqs = aws_client("sqs", endpoint=cloud.sqs_url, region=REGION)
    if how == "redrive":
        arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 50})
        sqs.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    async with on_queue(cloud, url, dead_url=dead if how == "told" else None) as transport:
        await transport.notifier.send(EXP, b"gibberish")
        letters: list[Any] = []
        with anyio.fail_after(90):
            while not letters:
                assert await transport.hints(EXP, 0.5) == []
                said = sqs.receive_message(QueueUrl=dead, MessageAttributeNames=["All"])
                letters += said.get("Messages", [])
    [letter] = letters
    assert letter["Body"] == "gibberish" and "reason" in letter["MessageAttributes"]


async def test_dead_letter_without_a_queue_stays_and_does_not_block_other_messages(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_queue(cloud, queue(cloud, "bare")) as transport:
        await transport.notifier.send(EXP, b"gibberish")
        await transport.notifier.send(EXP, hint("r.1"))
        assert await every_hint(transport, 1) == {Attempt("r", 1)}
    assert "give it a redrive policy" in caplog.text


@pytest.mark.parametrize("name", ["moto", "seaweedfs"])
async def test_thousands_of_attempts_are_listed_in_pages(
    name: str, server: Get, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = make(name, server, monkeypatch, tmp_path)
    every = [waiting(f"r{i}") for i in range(2100)]
    async with backend.transport() as transport:

        def put(one: PendingAttempt) -> None:
            commit = wire.CommitRecord(session_id=one.attempt.session_id, fenced="old")
            transport.store.put_if_absent(wire.commit_key(EXP, one.attempt.session_id), wire.encode(commit))

        with ThreadPoolExecutor(16) as pool:
            await anyio.to_thread.run_sync(lambda: list(pool.map(put, every[:2050])))
        assert await transport.sweep(every) == [one.attempt for one in every[:2050]]


# --- servers that go away ------------------------------------------------------------------------------


async def patiently(call: Callable[[], Awaitable[T]], seconds: float = 150) -> T:
    """As a collector does: tried again until the store is back."""
    with anyio.fail_after(seconds):
        while True:
            try:
                return await call()
            except Unavailable:
                await anyio.sleep(0.5)


async def test_a_stopped_store_raises_unavailable_with_its_url_until_it_restarts(
    server: Get, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = make("seaweedfs", server, monkeypatch, tmp_path)
    one, two = invocation(), invocation(n=2)
    async with backend.transport() as transport:
        assert await transport.deliver(one, record(one))
        server("seaweedfs").stop()
        try:
            for call in (
                lambda: transport.decision(waiting()),
                lambda: transport.deliver(two, record(two)),
                lambda: transport.fence(waiting(n=3), "late"),
                lambda: transport.sweep([waiting()]),
            ):
                with pytest.raises(
                    Unavailable, match=f"{server('seaweedfs').url}.*check the endpoint and the credentials"
                ):
                    await call()
        finally:
            server("seaweedfs").start()
        assert await patiently(lambda: transport.deliver(two, record(two)))
        assert await patiently(lambda: transport.decision(waiting())) == record(one)
        assert await transport.decision(waiting(n=2)) == record(two)
        assert await transport.decision(waiting(n=3)) is None


@pytest.mark.parametrize("name", ["nats", "redis"])
async def test_a_queue_that_becomes_unavailable_costs_hints_and_no_outcome(
    name: str,
    server: Get,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = make(name, server, monkeypatch, tmp_path)
    one = invocation()
    async with backend.transport() as transport:
        assert await transport.hints(EXP, 0) == []
        server(f"{name}_server").stop()
        try:
            assert await transport.deliver(one, record(one))
            assert await transport.hints(EXP, 1) == []
            assert await transport.sweep([waiting()]) == [Attempt("r", 1)]
            assert await transport.decision(waiting()) == record(one)
        finally:
            server(f"{name}_server").start()
        assert "polling finds the outcome" in caplog.text and "queue unavailable" in caplog.text
        # Until it is connected again, deliveries go without hints.
        with anyio.fail_after(90):
            for n in itertools.count(2):
                later = invocation(n=n)
                assert await transport.deliver(later, record(later))
                if Attempt("r", n) in await every_hint(transport, n - 1, seconds=2):
                    break


async def test_a_queue_that_was_lost_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, server: Get
) -> None:
    """moto forgets its queues when it stops."""
    server("moto")
    with servers.moto(tmp_path / "moto") as moto:
        point_agents(monkeypatch, moto.url, moto.url)
        queues = SqsNotifier(queue_prefix="lost", endpoint=moto.url, region=REGION, lease_s=1)
        one, two = invocation(), invocation(n=2)
        async with StoreTransport(FilesStore(tmp_path / "store"), queues) as transport:
            where = transport.address(EXP)
            moto.stop()
            try:
                assert await transport.deliver(one, record(one))
                assert await transport.hints(EXP, 1) == []
            finally:
                moto.start()
            assert "polling finds the outcome" in caplog.text and "queue unavailable" in caplog.text
            assert await transport.hints(EXP, 1) == []
            assert transport.address(EXP) == where
            assert await transport.deliver(two, record(two))
            assert await every_hint(transport, 1) == {Attempt("r", 2)}


async def test_opening_a_transport_names_the_url_of_an_unreachable_queue(tmp_path: Path) -> None:
    [port] = free_ports(1)
    for notifier in (NatsNotifier(f"nats://127.0.0.1:{port}"), RedisNotifier(f"redis://127.0.0.1:{port}")):
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}.*start (nats|redis)-server there"):
            await StoreTransport(FilesStore(tmp_path), notifier).__aenter__()
