"""The contract of transports on what needs no server: memory, and files with SQLite beside them."""

import contextlib
import json
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transport_contract import AgentsContract, Backend, TransportContract, waiting

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.sdk import filestore, outcomes
from afield.sdk.deliver import file_root
from afield.seams.transport import Fence
from afield.transports.files import FilesStore, FilesTransport, SqliteNotifier
from afield.transports.memory import MemoryNotifier
from afield.transports.store import MemoryStore
from afield.transports.stored import StoreTransport
from afield.types import Attempt
from agents.invoking import EXP, invocation, record

pytestmark = pytest.mark.anyio


class Memory:
    name = "memory"

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.notifier = MemoryNotifier()

    def transport(self, *, lease_s: float = 30.0, times: int = 10, few: int = 64) -> StoreTransport:
        self.notifier.lease_s = lease_s
        return StoreTransport(self.store, self.notifier, times=times, few=few)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        return [f"{one.body.decode()}: {reason}" for one, reason in self.notifier.dead_letters]


class Files:
    name = "files"

    def __init__(self, root: Path) -> None:
        self.root = root

    def transport(self, *, lease_s: float = 30.0, times: int = 10, few: int = 64) -> StoreTransport:
        notifier = SqliteNotifier(self.root, lease_s=lease_s)
        return StoreTransport(FilesStore(self.root), notifier, times=times, few=few)

    async def dead_letters(self, transport: StoreTransport, exp_id: str) -> list[str]:
        with contextlib.closing(filestore.open_hints(self.root)) as db:
            rows = db.execute("SELECT body, reason FROM dead WHERE exp_id = ?", (exp_id,)).fetchall()
        return [f"{body}: {reason}" for body, reason in rows]


class TestMemoryAndFiles(TransportContract):
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
            if outcomes.deliver(store, one, record(one, reward)):
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
        assert won in ([said], [])


async def test_what_is_half_written_is_not_there(files: FilesTransport) -> None:
    folder = root_of(files) / EXP / "commits"
    folder.mkdir(parents=True)
    (folder / "abandoned.tmp").write_bytes(b'{"v": 1, "sess')
    assert files.store.list(f"{EXP}/") == []


async def test_losing_the_hints_loses_no_outcome(
    files: FilesTransport, caplog: pytest.LogCaptureFixture
) -> None:
    for path in root_of(files).glob(f"{filestore.HINTS}*"):
        path.write_bytes(b"not a database" * 1000)
    one = invocation()
    assert await files.deliver(one, record(one))
    assert await files.hints(EXP, 0) == []
    assert await files.sweep([waiting()]) == [Attempt("r", 1)]
    assert "found by a sweep" in caplog.text


async def test_a_busy_hint_file_is_asked_again(files: FilesTransport) -> None:
    one = invocation()
    await files.deliver(one, record(one))
    with contextlib.closing(sqlite3.connect(root_of(files) / filestore.HINTS)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await files.hints(EXP, 0.2) == []
        other.rollback()
    assert await files.hints(EXP, 5) == [Attempt("r", 1)]


async def test_an_unknown_format_version_is_refused(files: FilesTransport) -> None:
    root = root_of(files)
    one = invocation()
    await files.deliver(one, record(one))
    document = json.loads((root / one.data_key).read_bytes())
    (root / one.data_key).write_text(json.dumps({**document, "v": 9}))
    with pytest.raises(WireError, match="format version 9"):
        await files.decision(waiting())


async def test_a_place_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(UsageError, match=r"file.*choose a writable directory"):
        await FilesTransport(blocked).__aenter__()
    async with FilesTransport(tmp_path / "store") as files:
        (tmp_path / "store" / EXP).write_text("in the way")
        one = invocation()
        with pytest.raises(Unavailable, match=r"cannot write exp/t/r\.1\.json under"):
            await files.deliver(one, record(one))


async def test_a_transport_outside_its_block_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="async with"):
        await FilesTransport(tmp_path).decision(waiting())


async def test_a_relative_file_address_is_refused() -> None:
    with pytest.raises(UsageError, match="file:///absolute/path"):
        file_root("file:relative/path")
