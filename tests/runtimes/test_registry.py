"""The roster: what runs is noted before it runs, and struck off when it has ended; owners are told apart."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
from tests.contracts.test_runtime import process

from afield.errors import DamagedFile, InfrastructureFailure, RateLimited
from afield.interfaces.runtime import Capabilities, Exit, Phase, SessionStatus
from afield.runtimes.base import AttemptTable, failed_exit
from afield.runtimes.registry import ProcessRef, SessionRegistry, TrackedRuntime
from afield.transports.stores.files import FilesTransport
from afield.types import Attempt, Reason
from agents.places import Place, until

pytestmark = pytest.mark.anyio
ONE = Attempt("r", 1)


class Elsewhere:
    """A place that outlives whoever launched there: what runs is in `running`, shared by all doors to it."""

    def __init__(self, running: dict[str, Exit | None], **capabilities: Any) -> None:
        self.running = running
        self.can = Capabilities(isolation="machine", outlives=True, reaches=True, **capabilities)
        self.refuse: BaseException | None = None
        self.noted: list[str] = []
        self.roster: SessionRegistry | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self.can

    async def __aenter__(self) -> Self:
        self.attempts = AttemptTable()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.running.clear()

    async def check(self) -> None: ...

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if self.roster:
            self.noted = [e.session_id for e in self.roster.entries() if e.phase is Phase.STARTING]
        if self.refuse:
            raise self.refuse
        self.attempts.begin(attempt.session_id)
        self.running[attempt.session_id] = None

    async def adopt(self, attempt: Attempt) -> bool | None:
        return attempt.session_id in self.running and self.attempts.begin(attempt.session_id)

    async def wait(self, attempt: Attempt) -> Exit:
        return await self.attempts.wait(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        self.running.pop(attempt.session_id, None)
        self.attempts.record_exit(attempt.session_id, failed_exit("stopped", Reason.CANCELLED))

    async def status(self, attempt: Attempt) -> SessionStatus:
        raise AssertionError("asking a place that others can reach costs a call for each launch")

    async def list(self) -> list[SessionStatus]:
        return [SessionStatus(session_id=s, phase=Phase.RUNNING) for s in self.running]

    async def logs(self, attempt: Attempt) -> str:
        return ""


def dead_owner() -> ProcessRef:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = ProcessRef.of(child.pid)
    assert owner.alive
    child.kill()
    child.wait()
    return owner


@pytest.fixture
async def roster(tmp_path: Path) -> AsyncIterator[SessionRegistry]:
    roster = SessionRegistry(tmp_path / "sessions.sqlite")
    yield roster
    roster.close()


def ids(roster: SessionRegistry) -> list[str]:
    return [entry.session_id for entry in roster.entries()]


# --- owners ----------------------------------------------------------------------------------------------


async def test_a_process_is_distinguished_from_a_later_one_with_its_number() -> None:
    us = ProcessRef.of(os.getpid())
    assert us.alive and us.here
    assert ProcessRef.parse(str(us)) == us
    assert ProcessRef(us.host, us.pid, "1").alive is False
    assert ProcessRef("another-machine", us.pid, us.started).alive is None
    assert dead_owner().alive is False


# --- what is kept ----------------------------------------------------------------------------------------


async def test_a_session_is_noted_before_it_is_launched(roster: SessionRegistry, tmp_path: Path) -> None:
    place = Elsewhere({})
    place.roster = SessionRegistry(roster.path)
    async with TrackedRuntime(place, SessionRegistry(roster.path), "elsewhere") as runtime:
        await runtime.launch(ONE, {})
        assert place.noted == ["r.1"]
        [entry] = roster.entries()
        assert (entry.runtime, entry.phase, entry.owner.pid) == ("elsewhere", Phase.RUNNING, os.getpid())
        assert entry.outlives and not entry.orphan
        assert abs(entry.since - time.time()) < 60
        await runtime.stop(ONE)
        await runtime.stop(ONE)
        assert ids(roster) == []
    place.roster.close()


@pytest.mark.parametrize("refusal", [InfrastructureFailure("no", Reason.LAUNCH), RateLimited("later")])
async def test_a_launch_that_failed_is_not_in_the_roster(roster: SessionRegistry, refusal: Exception) -> None:
    place = Elsewhere({})
    place.refuse = refusal
    async with TrackedRuntime(place, SessionRegistry(roster.path), "elsewhere") as runtime:
        with pytest.raises(type(refusal)):
            await runtime.launch(ONE, {})
        assert ids(roster) == []


async def test_an_abandoned_launch_is_kept_until_it_is_stopped(roster: SessionRegistry) -> None:
    place = Elsewhere({})
    place.refuse = anyio.get_cancelled_exc_class()()
    async with TrackedRuntime(place, SessionRegistry(roster.path), "elsewhere") as runtime:
        with contextlib.suppress(anyio.get_cancelled_exc_class()):
            await runtime.launch(ONE, {})
        assert ids(roster) == ["r.1"]
        await runtime.stop(ONE)
        assert ids(roster) == []


@pytest.mark.parametrize("lingers", [False, True])
async def test_what_has_ended_is_struck_off_unless_its_place_lingers(
    roster: SessionRegistry, lingers: bool
) -> None:
    place = Elsewhere({})
    async with TrackedRuntime(place, SessionRegistry(roster.path), "elsewhere") as runtime:
        await runtime.launch(ONE, {})
        place.attempts.record_exit("r.1", Exit(lingers=lingers))
        assert (await runtime.wait(ONE)).lingers is lingers
        assert ids(roster) == (["r.1"] if lingers else [])
        await runtime.stop(ONE)
        assert ids(roster) == []


async def test_adopting_a_session_makes_the_adopter_its_owner(roster: SessionRegistry) -> None:
    dead = dead_owner()
    roster.record("r.1", "elsewhere", dead, outlives=True, phase=Phase.RUNNING)
    roster.record("gone.1", "elsewhere", dead, outlives=True, phase=Phase.RUNNING)
    assert all(entry.orphan for entry in roster.entries())
    async with TrackedRuntime(Elsewhere({"r.1": None}), SessionRegistry(roster.path), "elsewhere") as runtime:
        assert await runtime.adopt(ONE) is True
        assert await runtime.adopt(Attempt("gone", 1)) is False
        [entry] = roster.entries()
        assert entry.session_id == "r.1" and entry.owner == ProcessRef.of(os.getpid())


async def test_a_controller_that_ends_in_order_leaves_no_row(roster: SessionRegistry) -> None:
    roster.record(
        "theirs.1", "elsewhere", ProcessRef("another-machine", 1, "1"), outlives=True, phase=Phase.RUNNING
    )
    async with TrackedRuntime(Elsewhere({}), SessionRegistry(roster.path), "elsewhere") as runtime:
        await runtime.launch(ONE, {})
        assert roster.owners() == [ProcessRef.of(os.getpid())]
    assert ids(roster) == ["theirs.1"]
    assert roster.owners() == []


async def test_the_next_controller_strikes_off_what_could_not_outlive_the_last(
    roster: SessionRegistry,
) -> None:
    dead = dead_owner()
    roster.add_owner(dead)
    roster.record("gone.1", "process", dead, outlives=False, phase=Phase.RUNNING)
    roster.record("left.1", "elsewhere", dead, outlives=True, phase=Phase.RUNNING)
    async with TrackedRuntime(Elsewhere({}), SessionRegistry(roster.path), "elsewhere"):
        assert ids(roster) == ["left.1"]
        assert roster.owners() == [ProcessRef.of(os.getpid())]


async def test_a_process_worker_is_named_with_its_process(roster: SessionRegistry, tmp_path: Path) -> None:
    async with (
        FilesTransport(tmp_path / "store") as transport,
        TrackedRuntime(process(tmp_path), SessionRegistry(roster.path), "process") as runtime,
    ):
        place = Place(runtime, transport)
        attempt = await place.launch({"do": "hang"})
        [entry] = roster.entries()
        assert entry.process and entry.process.alive and not entry.outlives
        assert entry.where.startswith(f"pid {entry.process.pid} (worker-")
        assert (await runtime.status(attempt)).where == entry.where
        await runtime.stop(attempt)
        await until(lambda: not (entry.process and entry.process.alive))
        assert ids(roster) == []


def test_a_killed_controller_leaves_its_rows(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from afield.runtimes.registry import ProcessRef, SessionRegistry\n"
        "from afield.interfaces.runtime import Phase\n"
        "registry = SessionRegistry(Path(sys.argv[1]))\nowner = ProcessRef.of(os.getpid())\n"
        "registry.add_owner(owner)\n"
        "registry.record('r.1', 'elsewhere', owner, outlives=True, phase=Phase.STARTING)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "sessions.sqlite"
    done = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with contextlib.closing(SessionRegistry(path)) as roster:
        [entry] = roster.entries()
        assert entry.orphan and entry.phase is Phase.STARTING
        assert [owner.alive for owner in roster.owners()] == [False]


async def test_unreadable_session_registry_raises_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with (
        contextlib.closing(SessionRegistry(path)) as roster,
        pytest.raises(DamagedFile, match=r"sessions\.sqlite"),
    ):
        roster.entries()


async def test_ended_sessions_do_not_accumulate_in_the_registry_file(roster: SessionRegistry) -> None:
    place = Elsewhere({})
    async with TrackedRuntime(place, SessionRegistry(roster.path), "elsewhere") as runtime:
        for n in range(500):
            await runtime.launch(Attempt(f"r{n}", 1), {})
            await runtime.stop(Attempt(f"r{n}", 1))
    assert roster.path.stat().st_size < 200_000
    with contextlib.closing(sqlite3.connect(roster.path)) as db:
        assert db.execute("SELECT count(*) FROM sessions").fetchone() == (0,)
