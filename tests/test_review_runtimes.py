"""Runtimes at their edges: what is left when one closes, what one bad answer may cost, and whose is whose."""

from __future__ import annotations

import asyncio
import os
import resource
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from afield import wiring
from afield.acr.sessions import Pace as Cold
from afield.cli.main import main
from afield.config import TrainConfig, assigned, build
from afield.errors import InfrastructureFailure, Unavailable, UsageError
from afield.rundir import RunDir
from afield.runtimes.inline import InlineRuntime
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.roster import Owner, Roster, Rostered
from afield.seams.runtime import Phase
from afield.transports.files import FilesTransport
from afield.types import Attempt, Rollout, Task
from agents.places import ACTING, Place
from agents.sink import Sink
from collecting import bench, good
from test_agentcore_runtime import opened, serving
from test_sessions_cli import dead, note

pytestmark = pytest.mark.anyio


@pytest.fixture
async def sink(tmp_path: Path) -> AsyncIterator[Sink]:
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink:
        yield sink


# --- agentcore -------------------------------------------------------------------------------------------


async def test_a_launch_that_waits_for_a_place_starts_nothing_once_the_runtime_closes(
    sink: Sink, tmp_path: Path
) -> None:
    async with serving(sink, pace=Cold(cold_start_s=0.5)) as url:
        async with opened(tmp_path, url=url, sessions=1) as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            await place.launch({"do": "beat"}, "first")
            waiting = asyncio.create_task(place.launch({"do": "beat"}, "second"))
            await asyncio.sleep(0.2)
            waiting.cancel()  # As a conductor does that is closed; the launch itself goes on.
        await asyncio.sleep(1.0)
        await sink.until_quiet("beat")
        assert sink.told("beat", "second.1") == []


async def test_a_session_that_comes_up_while_the_runtime_closes_is_ended(sink: Sink, tmp_path: Path) -> None:
    async with serving(sink, pace=Cold(cold_start_s=1.0)) as url:
        async with opened(tmp_path, url=url, cold_start_s=1.0) as runtime:
            await runtime.check()
            place = Place(runtime, sink.transport, sink)
            starting = asyncio.create_task(place.launch({"do": "beat"}))
            await asyncio.sleep(0.3)
            starting.cancel()
        await asyncio.sleep(1.0)
        await sink.until_quiet("beat")


async def test_a_launch_that_was_stopped_while_it_waited_for_a_place_costs_no_session(
    sink: Sink, tmp_path: Path
) -> None:
    async with serving(sink) as url, opened(tmp_path, url=url, sessions=1) as runtime:
        await runtime.check()
        place = Place(runtime, sink.transport, sink)
        first = await place.launch({"do": "beat"}, "first")
        waiting = asyncio.create_task(place.launch({"do": "beat"}, "second"))
        await asyncio.sleep(0.2)
        await runtime.stop(Attempt("second", 1))
        await runtime.stop(first)
        with pytest.raises(InfrastructureFailure, match="stopped before it started"):
            await waiting
        assert (await runtime.status(Attempt("second", 1))).phase is Phase.UNKNOWN


@pytest.mark.parametrize("given", ["rate=0", "stop_rate=-1", "sessions=0", "cold_start_s=-1", "ready_s=0"])
def test_amounts_that_make_no_sense_are_said_with_their_names(given: str) -> None:
    name = given.partition("=")[0]
    with pytest.raises(UsageError, match=rf"{name} = .* must be"):
        build({"model": "m", **assigned([f"agentcore.{given}"])}, "the command line")


# --- one bad answer ----------------------------------------------------------------------------------------


class Unsure(InlineRuntime):
    """A place that cannot be asked about what an earlier process launched."""

    async def adopt(self, attempt: Attempt) -> bool | None:
        raise Unavailable("the container engine does not answer")


async def test_a_place_that_cannot_be_asked_after_a_restart_does_not_end_the_run(tmp_path: Path) -> None:
    async with bench(tmp_path, good) as b:
        b.ledger.begin(Attempt("r", 1))
        wish = Rollout(id="r", exp_id="exp", group_id="g", task=Task("t0", {"n": 0}))
        async with (
            Unsure(good, deliver=b.transport.deliver) as unsure,
            b.conducting(runtime=unsure) as (_, conductor),
        ):
            note = await conductor.run(wish)
    assert note.outcome.reward == 1.0 and note.outcome.attempt == 2


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_for_which_no_file_is_left_fails_alone(sink: Sink, tmp_path: Path) -> None:
    async with ProcessRuntime(f"{ACTING}:act", fresh=True, log_dir=tmp_path / "logs") as runtime:
        place = Place(runtime, sink.transport, sink)
        with no_more_files(), pytest.raises(InfrastructureFailure, match="Too many open files"):
            await place.launch({"do": "reward"}, "first")
        attempt = await place.launch({"do": "reward"}, "second")
        assert (await place.wait(attempt)).failure is None


# --- whose is whose ---------------------------------------------------------------------------------------


def test_verifiers_of_two_runs_are_told_apart(tmp_path: Path) -> None:
    """They may share a cluster, where a reaper of the one finds its own by name."""
    names: set[str] = set()
    config = TrainConfig(
        model="m", agent="a.py:a", verifier="v.py:v", verifier_runtime="ray", runtime="ray=127.0.0.1:6379"
    )
    for run in ("one", "two"):
        carrier = FilesTransport(tmp_path)
        agents: Any = wiring.runtime(config, RunDir(tmp_path / run), carrier)
        judges: Any = wiring.verifiers(config, RunDir(tmp_path / run), carrier)
        names |= {agents.runtime._name, judges.runtime._name}
    assert len(names) == 4


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "runs"))
    for name in ("one", "two"):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "run.json").write_bytes(
            msgspec.json.encode(TrainConfig(model="m", agent=f"{ACTING}:act", runtime="process"))
        )
    return tmp_path / "runs"


def test_a_session_that_two_runs_have_is_not_killed_until_it_is_said_whose(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        note(runs / name, "train-e0-t0-0.1", Owner.of(os.getpid()), runtime="process")
    assert main(["kill", "train-e0-t0-0.1"]) == 2
    assert "one, two" in (said := capsys.readouterr().err) and "--run" in said


async def test_a_run_does_not_go_on_elsewhere_while_its_old_place_may_still_run_something(
    tmp_path: Path,
) -> None:
    roster = Roster(tmp_path / "sessions.sqlite")
    gone = dead()
    roster.enter(gone)
    roster.note("r.1", "container", gone, outlives=True, phase=Phase.RUNNING)
    runtime = Rostered(InlineRuntime(good), roster, "inline")
    with pytest.raises(UsageError, match=r"in container \(r\.1\).*afield reap"):
        await runtime.__aenter__()
    assert [entry.session_id for entry in roster.entries()] == ["r.1"]
    roster.strike("r.1")
    async with runtime:
        pass


# --- configuration ----------------------------------------------------------------------------------------


def test_what_a_run_was_told_is_for_its_owner_alone(tmp_path: Path) -> None:
    """`env` of a place may hold a key."""
    from afield.cli.train import save_config

    save_config(run := RunDir(tmp_path), TrainConfig(model="m"))
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
