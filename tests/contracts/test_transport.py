"""The contract of transports on what needs no server: memory, and files with SQLite beside them."""

import asyncio
import contextlib
import json
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.transport_contract import AgentsContract, Backend, TransportContract, waiting

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.interfaces.transport import Fence
from afield.sdk.deliver import deliver, file_root
from afield.sdk.stores import HINTS, deliver_to_store, open_hints
from afield.transports.notifiers.base import read_message
from afield.transports.notifiers.sqs import queue_name
from afield.transports.spec import from_spec
from afield.transports.stores.files import FilesStore, FilesTransport, SqliteNotifier
from afield.transports.stores.memory import MemoryNotifier, MemoryStore
from afield.transports.stores.s3 import S3CollectorStore
from afield.transports.transport import StoreTransport
from afield.types import Attempt
from agents.invoking import EXP, invocation, record
from support.small_s3 import Refusal, SmallS3, small_s3

pytestmark = pytest.mark.anyio


class Memory:
    name = "memory"

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.notifier = MemoryNotifier()

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport:
        self.notifier.lease_s = lease_s
        return StoreTransport(
            self.store, self.notifier, max_deliveries=max_deliveries, single_reads=single_reads
        )

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        return [f"{one.body.decode()}: {reason}" for one, reason in self.notifier.dead_letters]


class Files:
    name = "files"

    def __init__(self, root: Path) -> None:
        self.root = root

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport:
        notifier = SqliteNotifier(self.root, lease_s=lease_s)
        return StoreTransport(
            FilesStore(self.root), notifier, max_deliveries=max_deliveries, single_reads=single_reads
        )

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        with contextlib.closing(open_hints(self.root)) as db:
            rows = db.execute("SELECT body, reason FROM dead WHERE exp_id = ?", (exp_id,)).fetchall()
        return [f"{body}: {reason}" for body, reason in rows]


class TestMemoryAndFiles(TransportContract):
    lease_s = 0.25

    @pytest.fixture(params=["memory", "files"])
    def backend(self, request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
        return Memory() if request.param == "memory" else Files(tmp_path / "store")


class TestFilesForAgents(AgentsContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return Files(tmp_path / "a store with spaces")


# --- files: what an agent writes, the transport reads ---------------------------------------------


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FilesTransport]:
    async with FilesTransport(tmp_path / "a store with spaces") as transport:
        yield transport


def root_of(files: FilesTransport) -> Path:
    return file_root(files.address(EXP)["outcome_url"])


async def test_threads_that_commit_and_fence_at_once_agree(files: FilesTransport) -> None:
    store = files.store
    for i in range(30):
        one = invocation(f"race-{i}")
        won: list[str] = []
        barrier = threading.Barrier(4)

        def commit(reward: float, one=one, won=won, barrier=barrier) -> None:
            barrier.wait(10)
            if deliver_to_store(store, one, record(one, reward)):
                won.append(f"reward {reward}")

        def fence(one=one, won=won, barrier=barrier) -> None:
            barrier.wait(10)
            fenced = wire.CommitRecord(session_id=one.session_id, fenced="raced")
            if store.put_if_absent(one.commit_key, wire.encode(fenced)):
                won.append("fence")

        threads = [threading.Thread(target=commit, args=(float(k),)) for k in range(3)]
        threads.append(threading.Thread(target=fence))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        standing = await files.decision(waiting(f"race-{i}"))
        said = "fence" if isinstance(standing, Fence) else f"reward {standing.outcome.reward}"  # type: ignore[union-attr]
        assert won == [said]


async def test_half_written_files_are_invisible(files: FilesTransport) -> None:
    folder = root_of(files) / EXP / "commits"
    folder.mkdir(parents=True)
    (folder / "abandoned.tmp").write_bytes(b'{"v": 1, "sess')
    assert files.store.list(f"{EXP}/") == []


async def test_losing_the_hints_loses_no_outcome(
    files: FilesTransport, caplog: pytest.LogCaptureFixture
) -> None:
    for path in root_of(files).glob(f"{HINTS}*"):
        path.write_bytes(b"not a database" * 1000)
    one = invocation()
    assert await files.deliver(one, record(one))
    assert await files.hints(EXP, 0) == []
    assert await files.sweep([waiting()]) == [Attempt("r", 1)]
    assert "polling finds the outcome" in caplog.text


async def test_hints_that_a_killed_collector_had_leased_go_with_the_attempts_decision(tmp_path: Path) -> None:
    one = invocation()
    async with FilesTransport(tmp_path) as killed, FilesTransport(tmp_path) as next_one:
        await killed.deliver(one, record(one))
        assert await killed.hints(EXP, 1.0) == [Attempt("r", 1)]
        await next_one.fence(waiting(), "restarted")
        with contextlib.closing(open_hints(tmp_path)) as db:
            assert db.execute("SELECT count(*) FROM notices").fetchone() == (0,)


async def test_a_refused_outcome_gives_no_hint(files: FilesTransport) -> None:
    one = invocation()
    await files.fence(waiting(), "deadline")
    assert not await files.deliver(one, record(one))
    assert not deliver(
        wire.convert(wire.to_builtins(one) | files.address(EXP), wire.Invocation, "it"), record(one)
    )
    with contextlib.closing(open_hints(file_root(files.address(EXP)["outcome_url"]))) as db:
        assert db.execute("SELECT count(*) FROM notices").fetchone() == (0,)


async def test_a_busy_hint_file_is_asked_again(files: FilesTransport) -> None:
    one = invocation()
    await files.deliver(one, record(one))
    with contextlib.closing(sqlite3.connect(root_of(files) / HINTS)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await files.hints(EXP, 0.2) == []
        other.rollback()
    assert await files.hints(EXP, 5) == [Attempt("r", 1)]


async def test_short_locks_of_hint_writers_are_waited_for_silently(
    files: FilesTransport, caplog: pytest.LogCaptureFixture
) -> None:
    one = invocation()
    with contextlib.closing(sqlite3.connect(root_of(files) / HINTS)) as other:

        async def meanwhile(work: Coroutine[Any, Any, object]) -> None:
            other.execute("BEGIN IMMEDIATE")
            doing = asyncio.create_task(work)
            await asyncio.sleep(0.3)
            assert not doing.done()
            other.rollback()
            await doing

        await meanwhile(files.deliver(one, record(one)))
        assert await files.hints(EXP, 5) == [Attempt("r", 1)]
        await meanwhile(files.acknowledge(EXP, [Attempt("r", 1)]))
        assert other.execute("SELECT count(*) FROM notices").fetchone() == (0,)
    assert not caplog.text


async def test_an_unknown_format_version_is_refused(files: FilesTransport) -> None:
    root = root_of(files)
    one = invocation()
    await files.deliver(one, record(one))
    document = json.loads((root / one.data_key).read_bytes())
    (root / one.data_key).write_text(json.dumps({**document, "v": 9}))
    with pytest.raises(WireError, match="format version 9"):
        await files.decision(waiting())


async def test_a_location_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(UsageError, match=r"file.*choose a writable directory"):
        await FilesTransport(blocked).__aenter__()
    async with FilesTransport(tmp_path / "store") as files:
        (tmp_path / "store" / EXP).write_text("in the way")
        one = invocation()
        with pytest.raises(Unavailable, match=r"cannot write exp/t/r\.1\.json under"):
            await files.deliver(one, record(one))


async def test_transport_used_outside_async_with_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="async with"):
        await FilesTransport(tmp_path).decision(waiting())


async def test_a_relative_file_address_is_refused() -> None:
    with pytest.raises(UsageError, match="file:///absolute/path"):
        file_root("file:relative/path")


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: what is larger cannot be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_reported_and_nothing_is_lost(files: FilesTransport) -> None:
    before, one = invocation("before"), invocation()
    big = record(one, payload={"text": "x" * 1_000_000})
    await files.deliver(before, record(before))
    with files_of_at_most(500_000):
        with pytest.raises(Unavailable, match=r"cannot write exp/t/r\.1\.json under .*have space left"):
            await files.deliver(one, big)
        assert await files.decision(waiting()) is None
    assert not list(root_of(files).rglob("*.tmp"))
    assert await files.deliver(one, big)
    assert await files.decision(waiting()) == big
    assert await files.decision(waiting("before")) == record(before)


async def test_an_agent_waits_for_a_full_disk(files: FilesTransport) -> None:
    one = invocation(**files.address(EXP))
    big = record(one, payload={"text": "x" * 1_000_000})
    with contextlib.ExitStack() as full:
        full.enter_context(files_of_at_most(500_000))
        assert deliver(one, big, sleep=lambda _: full.close())
    assert await files.decision(waiting()) == big


# --- S3: what needs no real server ------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallS3]:
    for name, value in {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    with small_s3() as server:
        yield server


def on(s3: SmallS3, single_reads: int = 64) -> StoreTransport:
    return StoreTransport(
        S3CollectorStore("bucket", endpoint=s3.url, region="us-east-1"),
        MemoryNotifier(),
        single_reads=single_reads,
    )


class Bucket:
    name = "s3"

    def __init__(self, s3: SmallS3) -> None:
        self.s3 = s3
        self.notifier = MemoryNotifier()

    def transport(
        self, *, lease_s: float = 30.0, max_deliveries: int = 10, single_reads: int = 64
    ) -> StoreTransport:
        self.notifier.lease_s = lease_s
        store = S3CollectorStore("bucket", endpoint=self.s3.url, region="us-east-1")
        return StoreTransport(store, self.notifier, max_deliveries=max_deliveries, single_reads=single_reads)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        return [f"{one.body.decode()}: {reason}" for one, reason in self.notifier.dead_letters]


class TestS3(TransportContract):
    lease_s = 0.25

    @pytest.fixture
    def backend(self, s3: SmallS3) -> Backend:
        return Bucket(s3)


@pytest.mark.parametrize(
    ("operation", "action"), [("PutObject", "s3:PutObject"), ("GetObject", "s3:GetObject")]
)
async def test_a_permission_that_is_missing_is_named_at_the_start(
    s3: SmallS3, operation: str, action: str
) -> None:
    s3.refuse = lambda asked, key: (403, "AccessDenied") if asked == operation else None
    with pytest.raises(Unavailable, match=rf"bucket.*allow {action}"):
        await on(s3).__aenter__()


async def test_without_permission_to_list_sweeps_ask_for_single_keys(
    s3: SmallS3, caplog: pytest.LogCaptureFixture
) -> None:
    # Without it S3 says 403 of what is not there, too.
    def refuse(asked: str, key: str) -> Refusal:
        missing = asked == "GetObject" and key not in s3.objects
        return (403, "AccessDenied") if missing or asked == "ListObjectsV2" else None

    s3.refuse = refuse
    async with on(s3, single_reads=1) as transport:
        assert "s3:ListBucket" in caplog.text
        one = invocation()
        assert await transport.decision(waiting()) is None
        assert await transport.deliver(one, record(one))
        assert await transport.sweep([waiting(n=n) for n in (1, 2, 3)]) == [Attempt("r", 1)]
        with pytest.raises(Unavailable, match="s3:ListBucket"):
            await transport.late(EXP)


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
async def test_credentials_that_went_bad_are_not_taken_for_no_outcome(s3: SmallS3, code: str) -> None:
    async with on(s3) as transport:
        s3.refuse = lambda asked, key: (403, code)
        with pytest.raises(Unavailable, match=code):
            await transport.decision(waiting())


async def test_a_store_that_refuses_for_a_while_loses_nothing(s3: SmallS3) -> None:
    one = invocation()
    async with on(s3) as transport:
        s3.refuse = lambda asked, key: (507, "InsufficientStorage")
        with pytest.raises(Unavailable, match=r"cannot write exp/t/r\.1\.json to bucket 'bucket'"):
            await transport.deliver(one, record(one))
        with pytest.raises(Unavailable, match=s3.url):
            await transport.sweep([waiting()])
        s3.refuse = lambda asked, key: None
        assert await transport.deliver(one, record(one))
        assert await transport.decision(waiting()) == record(one)


async def test_few_are_asked_for_one_by_one_and_many_are_listed_in_pages(s3: SmallS3) -> None:
    for i in range(2000):
        commit = wire.CommitRecord(session_id=f"r{i}.1", fenced="old")
        s3.objects[wire.commit_key(EXP, f"r{i}.1")] = wire.encode(commit)
    async with on(s3) as transport:
        s3.asked.clear()
        assert await transport.sweep([waiting(f"r{i}") for i in range(1990, 2010)]) == [
            Attempt(f"r{i}", 1) for i in range(1990, 2000)
        ]
        assert {operation for operation, _ in s3.asked} == {"GetObject"}
        s3.asked.clear()
        every = [waiting(f"r{i}") for i in range(2500)]
        assert await transport.sweep(every) == [Attempt(f"r{i}", 1) for i in range(2000)]
        assert s3.asked == [("ListObjectsV2", f"{EXP}/")] * 2


async def test_a_result_a_stranger_puts_after_the_fence_is_late(s3: SmallS3) -> None:
    async with on(s3) as transport:
        await transport.fence(waiting(input_id="a b"), "deadline")
        await transport.fence(waiting(n=2, input_id="a b"), "deadline")
        s3.objects[f"{EXP}/a b/r.1.json"] = b'{"status_code": 200, "rewards": 1.0}'
        assert await transport.late(EXP) == [Attempt("r", 1)]


# --- messages, and transports from a line of text -----------------------------------------------------


def event(*keys: str) -> dict[str, Any]:
    return {"Records": [{"eventName": "ObjectCreated:Put", "s3": {"object": {"key": key}}} for key in keys]}


@pytest.mark.parametrize(
    ("message", "about"),
    [
        ({"exp_id": "e", "session_id": "r.1"}, [("e", Attempt("r", 1))]),
        (
            event("e/commits/r.1.json", "e/a+%C3%BC%2Fb/r.2.json"),
            [("e", Attempt("r", 1)), ("e", Attempt("r", 2))],
        ),
        (event("e/late/r.1.json", "e/adopted/r.1.json", "e/fenced/r.1.json", "afield.probe", "x/y.txt"), []),
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"}, []),
        (
            {"Type": "Notification", "Message": json.dumps(event("e/commits/r.3.json"))},
            [("e", Attempt("r", 3))],
        ),
        ({"Type": "Notification", "Message": json.dumps({"Event": "s3:TestEvent"})}, []),
    ],
)
def test_messages_of_every_shape_are_understood(message: dict[str, Any], about: list[Any]) -> None:
    assert read_message(json.dumps(message).encode()) == about


@pytest.mark.parametrize(
    "message",
    [b"", b"[]", b"{}", b'{"Records": 5}', b'{"Records": [{}]}', b'{"exp_id": "e", "session_id": "r"}'],
)
def test_messages_of_no_known_shape_are_refused(message: bytes) -> None:
    with pytest.raises(WireError, match="a message"):
        read_message(message)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("sq", r"unknown transport 'sq'; choose one of: memory, files"),
        ("files://host/dir", "files:///absolute/path"),
        ("s3://bucket/below", "without a path"),
        ("s3://bucket?sqs=u&notify=nats://h", "has both notify= and sqs="),
        ("s3://bucket?sqs=u&queues=p", "give one of them"),
        ("s3://bucket?endpont=u", r"unknown option 'endpont'.*did you mean 'endpoint'"),
        ("s3://bucket?sqs=", "'sqs'.*is empty"),
        ("s3://bucket?threads=none", "threads=none"),
        ("files:///dir?notify=kafka://h", "nats://HOST:PORT or redis://"),
        ("files:///dir?notify=nats://h?nme=x", "unknown option 'nme'"),
    ],
)
def test_a_line_that_names_no_transport_is_refused_with_the_remedy(
    spec: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        from_spec(spec, tmp_path)


async def test_a_transport_is_made_from_a_line_of_text(s3: SmallS3, tmp_path: Path) -> None:
    named = [
        "memory",
        "files",
        f"files://{tmp_path}/a%20folder",
        f"s3://bucket?endpoint={s3.url}&region=us-east-1&threads=4",
    ]
    for spec in named:
        one = invocation()
        async with from_spec(spec, tmp_path / "root") as transport:
            assert await transport.deliver(one, record(one))
            assert await transport.decision(waiting()) == record(one)
    assert (tmp_path / "root" / EXP).is_dir() and (tmp_path / "a folder" / EXP).is_dir()
    assert s3.objects.keys() >= {f"{EXP}/commits/r.1.json"}


def test_queues_have_names_that_sqs_takes() -> None:
    assert queue_name("afield", "exp-1") == "afield-exp-1"
    names = {queue_name("afield", exp_id) for exp_id in ("a.b", "a_b", "x" * 128, "x" * 127)}
    assert len(names) == 4 and all(len(name) <= 75 for name in names)
