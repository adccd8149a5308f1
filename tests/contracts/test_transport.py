"""What every transport promises. A backend is done when it passes this."""

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from afield import wire
from afield.errors import Unavailable, UsageError, WireError
from afield.sdk import filestore
from afield.sdk.deliver import deliver, file_root
from afield.seams.transport import Fence, Transport
from afield.transports.files import FilesTransport
from afield.transports.memory import MemoryTransport
from afield.types import Attempt
from afield.wire import OutcomeRecord
from agents.invoking import EXP, invocation, record

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "files"])
async def transport(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Transport]:
    made = MemoryTransport() if request.param == "memory" else FilesTransport(tmp_path / "store")
    async with made:
        yield made


async def test_an_attempt_is_open_until_it_is_decided(transport: Transport) -> None:
    one = invocation()
    assert await transport.decision(EXP, Attempt("r", 1)) is None
    assert await transport.deliver(one, record(one, 0.5))
    standing = await transport.decision(EXP, Attempt("r", 1))
    assert isinstance(standing, OutcomeRecord) and standing == record(one, 0.5)


async def test_the_first_outcome_wins(transport: Transport) -> None:
    one = invocation()
    assert await transport.deliver(one, record(one, 1.0))
    assert not await transport.deliver(one, record(one, 0.0))
    assert not await transport.deliver(one, record(one, 1.0))
    standing = await transport.decision(EXP, Attempt("r", 1))
    assert isinstance(standing, OutcomeRecord) and standing.outcome.reward == 1.0


async def test_a_fenced_attempt_takes_no_outcome(transport: Transport) -> None:
    one = invocation()
    assert await transport.fence(EXP, Attempt("r", 1), "deadline") == Fence("deadline")
    assert not await transport.deliver(one, record(one))
    assert await transport.decision(EXP, Attempt("r", 1)) == Fence("deadline")
    assert await transport.fence(EXP, Attempt("r", 1), "another reason") == Fence("deadline")


async def test_a_fence_that_comes_late_answers_with_the_outcome(transport: Transport) -> None:
    one = invocation()
    await transport.deliver(one, record(one, 0.25))
    standing = await transport.fence(EXP, Attempt("r", 1), "deadline")
    assert isinstance(standing, OutcomeRecord) and standing.outcome.reward == 0.25


async def test_a_fence_fences_one_attempt_only(transport: Transport) -> None:
    await transport.fence(EXP, Attempt("r", 1), "deadline")
    two = invocation(n=2)
    assert await transport.deliver(two, record(two))
    assert await transport.decision("other", Attempt("r", 1)) is None


async def test_an_attempt_is_committed_or_fenced_and_never_both(transport: Transport) -> None:
    for i in range(40):
        one = invocation(f"race-{i}")
        attempt = Attempt(f"race-{i}", 1)
        answers: dict[str, object] = {}

        async def commit(one=one, answers=answers) -> None:
            answers["won"] = await transport.deliver(one, record(one))

        async def fence(attempt=attempt, answers=answers) -> None:
            answers["stands"] = await transport.fence(EXP, attempt, "raced")

        async with anyio.create_task_group() as group:
            for work in (commit, fence) if i % 2 else (fence, commit):
                group.start_soon(work)
        standing = await transport.decision(EXP, attempt)
        assert standing == answers["stands"]
        assert answers["won"] is isinstance(standing, OutcomeRecord)


async def test_of_several_committers_one_wins_and_its_record_stands(transport: Transport) -> None:
    for i in range(20):
        one = invocation(f"race-{i}")
        won: list[float] = []

        async def commit(reward: float, one=one, won=won) -> None:
            if await transport.deliver(one, record(one, reward)):
                won.append(reward)

        async with anyio.create_task_group() as group:
            for reward in range(4):
                group.start_soon(commit, float(reward))
        standing = await transport.decision(EXP, Attempt(f"race-{i}", 1))
        assert isinstance(standing, OutcomeRecord)
        assert won in ([standing.outcome.reward], [])


async def test_a_delivery_gives_a_hint(transport: Transport) -> None:
    one = invocation()
    assert await transport.hints(EXP, 0) == []
    await transport.deliver(one, record(one))
    assert await transport.hints("other", 0) == []
    assert await transport.hints(EXP, 5) == [Attempt("r", 1)]
    assert await transport.hints(EXP, 0) == []


async def test_waiting_for_hints_ends_when_one_comes(transport: Transport) -> None:
    one = invocation()
    got: list[Attempt] = []

    async def wait() -> None:
        got.extend(await transport.hints(EXP, 60))

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.05)
            await transport.deliver(one, record(one))
    assert got == [Attempt("r", 1)]


async def test_a_sweep_finds_what_no_hint_told(transport: Transport) -> None:
    for n in (1, 2):
        one = invocation(n=n)
        await transport.deliver(one, record(one))
    await transport.fence(EXP, Attempt("r", 3), "deadline")
    await transport.hints(EXP, 0)
    found = await transport.sweep(EXP)
    assert set(found) == {Attempt("r", n) for n in (1, 2, 3)} and len(found) == 3
    assert await transport.sweep("other") == []


@pytest.mark.parametrize("input_id", ["a/b c", "..", ".", "commits", "ü" * 300, "x%2Fy", "../../../etc"])
async def test_a_task_may_have_any_id(transport: Transport, input_id: str) -> None:
    one = invocation(input_id=input_id)
    assert await transport.deliver(one, record(one))
    assert not await transport.deliver(one, record(one, 0.0))
    assert await transport.decision(EXP, Attempt("r", 1)) == record(one)
    assert await transport.sweep(EXP) == [Attempt("r", 1)]


async def test_its_address_is_one_an_agent_can_be_given(transport: Transport) -> None:
    assert invocation(**transport.address()).outcome_url


# --- files: what an agent writes, the transport reads ---------------------------------------------


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FilesTransport]:
    async with FilesTransport(tmp_path / "a store with spaces") as transport:
        yield transport


async def test_what_the_sdk_delivers_comes_back_through_the_transport(files: FilesTransport) -> None:
    one = invocation(**files.address())
    assert await anyio.to_thread.run_sync(deliver, one, record(one, 0.75))
    assert await files.hints(EXP, 5) == [Attempt("r", 1)]
    assert await files.decision(EXP, Attempt("r", 1)) == record(one, 0.75)
    assert not await anyio.to_thread.run_sync(deliver, one, record(one, 0.0))


async def test_threads_that_commit_and_fence_at_once_agree(files: FilesTransport) -> None:
    root = file_root(files.address()["outcome_url"])
    for i in range(30):
        one = invocation(f"race-{i}")
        won: list[str] = []
        barrier = threading.Barrier(4)

        def commit(reward: float, one=one, won=won, barrier=barrier) -> None:
            barrier.wait(10)
            if filestore.deliver(root, one, record(one, reward)):
                won.append(f"reward {reward}")

        def fence(one=one, won=won, barrier=barrier) -> None:
            barrier.wait(10)
            if filestore.put_commit(root, EXP, wire.CommitRecord(session_id=one.session_id, fenced="raced")):
                won.append("fence")

        threads = [threading.Thread(target=commit, args=(float(k),)) for k in range(3)]
        threads.append(threading.Thread(target=fence))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        standing = await files.decision(EXP, Attempt(f"race-{i}", 1))
        said = "fence" if isinstance(standing, Fence) else f"reward {standing.outcome.reward}"  # type: ignore[union-attr]
        assert won in ([said], [])


async def test_a_reader_never_sees_half_a_record(files: FilesTransport) -> None:
    root = file_root(files.address()["outcome_url"])
    big = {"text": "x" * 2_000_000}
    one = invocation()
    done = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not done.is_set():
            commit = filestore.read_commit(root, EXP, "r.1")
            if commit is not None:
                seen.append(filestore.read_record(root, commit).payload == big)
                return

    reader = threading.Thread(target=read)
    reader.start()
    await files.deliver(one, record(one, payload=big))
    reader.join(20)
    done.set()
    assert seen == [True]


async def test_a_writer_that_died_before_its_commit_leaves_the_attempt_open(files: FilesTransport) -> None:
    root = file_root(files.address()["outcome_url"])
    one = invocation()
    filestore.put_if_absent(root / EXP / "t" / "r.1.json", wire.encode(record(one)))
    (root / EXP / "commits").mkdir()
    (root / EXP / "commits" / "abandoned.tmp").write_bytes(b'{"v": 1, "sess')
    assert await files.decision(EXP, Attempt("r", 1)) is None
    assert await files.sweep(EXP) == []
    assert await files.deliver(one, record(one))


async def test_losing_the_hints_loses_no_outcome(
    files: FilesTransport, caplog: pytest.LogCaptureFixture
) -> None:
    root = file_root(files.address()["outcome_url"])
    for path in root.glob(f"{filestore.HINTS}*"):
        path.write_bytes(b"not a database" * 1000)
    one = invocation()
    assert await files.deliver(one, record(one))
    assert await files.hints(EXP, 0) == []
    assert await files.sweep(EXP) == [Attempt("r", 1)]
    assert "found by a sweep" in caplog.text


async def test_an_unknown_format_version_is_refused(files: FilesTransport) -> None:
    root = file_root(files.address()["outcome_url"])
    one = invocation()
    await files.deliver(one, record(one))
    document = json.loads((root / one.data_key).read_bytes())
    (root / one.data_key).write_text(json.dumps({**document, "v": 9}))
    with pytest.raises(WireError, match="format version 9"):
        await files.decision(EXP, Attempt("r", 1))


async def test_a_place_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(UsageError, match=r"file.*choose a writable directory"):
        await FilesTransport(blocked).__aenter__()
    async with FilesTransport(tmp_path / "store") as files:
        (tmp_path / "store" / EXP).write_text("in the way")
        one = invocation()
        with pytest.raises(Unavailable, match=r"cannot write the outcome of r\.1 under"):
            await files.deliver(one, record(one))


async def test_a_relative_file_address_is_refused() -> None:
    with pytest.raises(UsageError, match="file:///absolute/path"):
        file_root("file:relative/path")
