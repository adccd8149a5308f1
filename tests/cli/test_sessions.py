"""`afield ps`, `kill`, `logs` and `cleanup`, as an operator meets them: controllers live, die, take over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from afield.cli.cleanup import TERM_S
from afield.cli.main import main
from afield.interfaces.runtime import Phase
from afield.runtimes.process import ProcessRuntime
from afield.runtimes.registry import ProcessRef, SessionRegistry, TrackedRuntime
from afield.runtimes.remote import RemoteRuntime
from afield.settings.train import TrainConfig
from afield.types import Attempt
from agents.invoking import invocation, payload
from agents.places import ACTING, AGENTS, alive
from support.processes import command, until

KEY = "afk-r.1~run~0123abcd~deadbeef"


def served(folder: str, url: str) -> TrackedRuntime:
    """For a controller in a process of its own."""
    return TrackedRuntime(RemoteRuntime([url]), SessionRegistry(Path(folder) / "sessions.sqlite"), "served")


class Field:
    """A folder of runs, and what was started for it."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.started: list[subprocess.Popen[Any]] = []

    def run(self, name: str, runtime: str = "process", **settings: Any) -> Path:
        path = self.runs / name
        path.mkdir(parents=True)
        config = TrainConfig(model="m", agent=f"{ACTING}:act", runtime=runtime, **settings)
        (path / "run.json").write_bytes(msgspec.json.encode(config))
        return path

    def controller(
        self, maker: str, options: dict[str, Any], row: dict[str, Any], rollout_id: str = "r"
    ) -> subprocess.Popen[bytes]:
        """A process that launched one attempt of this rollout, and goes on until it is killed."""
        told = json.dumps(payload(row, invocation(rollout_id)))
        script = [sys.executable, str(AGENTS / "controller.py"), maker, json.dumps(options), rollout_id, told]
        process = subprocess.Popen(script, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout and process.stdout.readline() == b"launched\n"
        return process

    def processes(self, run: Path, row: dict[str, Any], rollout_id: str = "r") -> subprocess.Popen[bytes]:
        options = {"folder": str(run), "target": f"{ACTING}:act"}
        return self.controller("tests.runtimes.test_registry:rostered", options, row, rollout_id)

    def serving(self, target: str) -> str:
        script = [sys.executable, "-m", "afield.sdk.serve", target, "--outcome-root", "/"]
        process = subprocess.Popen(script, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    def reaper(self, *args: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command("cleanup", *args), stdin=pipe, stdout=pipe, text=True)
        self.started.append(process)
        return process


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Field]:
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "runs"))
    made = Field(tmp_path / "runs")
    yield made
    for process in made.started:
        process.kill()
        process.wait(20)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


Told = Callable[..., Any]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """What a command says as JSON; it has to end as expected."""

    def run(*args: object, code: int = 0) -> Any:
        assert main([*map(str, args), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


def ids(listed: dict[str, Any]) -> list[str]:
    return [line["session"] for line in listed["sessions"]]


def dead() -> ProcessRef:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = ProcessRef.of(child.pid)
    child.kill()
    child.wait()
    return owner


def note(
    run: Path, session_id: str, owner: ProcessRef, *, outlives: bool = True, runtime: str = "served"
) -> None:
    roster = SessionRegistry(run / "sessions.sqlite")
    roster.add_owner(owner)
    roster.record(session_id, runtime, owner, outlives=outlives, phase=Phase.RUNNING)
    roster.close()


# --- ps --------------------------------------------------------------------------------------------------


def test_where_nothing_runs_ps_says_so(field: Field, capsys: pytest.CaptureFixture[str], told: Told) -> None:
    assert main(["ps"]) == 0
    assert "no session runs" in capsys.readouterr().out
    field.run("quiet")
    assert told("ps", "quiet") == {"sessions": []}


def test_ps_names_every_session_of_every_run_and_whose_it_is(
    field: Field, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    first, second = field.run("first"), field.run("second", "served=http://127.0.0.1:9")
    us = ProcessRef.of(os.getpid())
    note(first, "a.1", us, runtime="process", outlives=False)
    note(first / "verifiers", "a.1", us, runtime="sandbox", outlives=False)
    note(second, "b.1", dead())
    note(second, "c.1", ProcessRef("another-machine", 7, "1"))
    lines = {(line["run"], line["role"], line["session"]): line for line in told("ps")["sessions"]}
    assert set(lines) == {
        ("first", "agent", "a.1"),
        ("first", "verifier", "a.1"),
        ("second", "agent", "b.1"),
        ("second", "agent", "c.1"),
    }
    assert [line["orphan"] for line in lines.values()] == [False, False, True, False]
    assert ids(told("ps", "second")) == ["b.1", "c.1"]
    assert main(["ps"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["RUN", "SESSION", "RUNTIME", "PHASE", "WHERE", "AGE", "OWNER"]
    assert sum("ORPHAN" in line for line in shown) == 1
    assert any("pid 7 on another-machine" in line for line in shown)


def test_sessions_that_ended_with_their_controller_are_not_shown(field: Field, told: Told) -> None:
    note(field.run("first"), "a.1", dead(), runtime="process", outlives=False)
    assert told("ps") == {"sessions": []}


def test_ps_works_in_a_pipe_that_closes_early(field: Field) -> None:
    run = field.run("first", "served=http://127.0.0.1:9")
    roster, owner = SessionRegistry(run / "sessions.sqlite"), ProcessRef.of(os.getpid())
    for n in range(2000):
        roster.record(f"a{n}.1", "served", owner, outlives=True, phase=Phase.RUNNING)
    roster.close()
    line = " ".join(command("ps"))
    done = subprocess.run(["sh", "-c", f"{line} | head -1"], capture_output=True, timeout=60, check=False)
    assert done.stdout.startswith(b"RUN")
    assert b"Traceback" not in done.stderr


# --- kill ------------------------------------------------------------------------------------------------


def test_an_unknown_session_is_refused_with_near_ones(
    field: Field, capsys: pytest.CaptureFixture[str]
) -> None:
    note(field.run("first"), "t1-e0-r0.1", ProcessRef.of(os.getpid()), runtime="process")
    assert main(["kill", "t1-e0-r9.1"]) == 2
    assert "did you mean t1-e0-r0.1?" in capsys.readouterr().err
    assert main(["kill"]) == 2
    assert "--orphans" in capsys.readouterr().err
    assert main(["kill", "--run", "frist"]) == 2
    assert "unknown run 'frist'" in capsys.readouterr().err


def test_kill_ends_the_process_of_a_session_and_leaves_the_controller(field: Field, told: Told) -> None:
    run = field.run("first")
    controller = field.processes(run, {"do": "hang"})
    [line] = told("ps")["sessions"]
    pid = int(line["where"].split()[1])
    assert alive(pid) and line["owner"] == {**line["owner"], "pid": controller.pid, "alive": True}
    said = told("kill", "r.1")
    assert (said["ended"], said["failed"]) == (1, 0)
    until(lambda: not alive(pid), "the worker is gone")
    assert controller.poll() is None


def a_sleeper(field: Field) -> subprocess.Popen[Any]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    field.started.append(process)
    return process


def test_what_is_still_starting_is_killed_as_soon_as_it_has_a_process(field: Field, told: Told) -> None:
    run, us = field.run("first"), ProcessRef.of(os.getpid())
    sleeper = a_sleeper(field)

    def place() -> None:
        roster = SessionRegistry(run / "sessions.sqlite")
        roster.update("r.1", Phase.RUNNING, f"pid {sleeper.pid}")
        sleeper.wait(20)
        roster.close()

    roster = SessionRegistry(run / "sessions.sqlite")
    roster.record("r.1", "process", us, outlives=False, phase=Phase.STARTING)
    roster.close()
    placing = threading.Timer(0.5, place)
    placing.start()
    said = told("kill", "r.1")
    placing.join()
    assert (said["ended"], said["failed"]) == (1, 0)
    assert sleeper.poll() == -signal.SIGTERM


def test_what_a_killed_worker_served_beside_is_told(field: Field, told: Told) -> None:
    run, us = field.run("first"), ProcessRef.of(os.getpid())
    sleeper = a_sleeper(field)
    roster = SessionRegistry(run / "sessions.sqlite")
    for session_id in ("a.1", "b.1"):
        roster.record(session_id, "process", us, outlives=False, phase=Phase.RUNNING)
        roster.update(session_id, Phase.RUNNING, f"pid {sleeper.pid}")
    roster.close()

    def hear() -> None:  # as its collector does: what ended with the worker is struck at once
        sleeper.wait(20)
        heard = SessionRegistry(run / "sessions.sqlite")
        heard.remove("b.1")
        heard.close()

    hearing = threading.Thread(target=hear)
    hearing.start()
    [line] = told("kill", "a.1")["sessions"]
    hearing.join()
    assert "and with it what it served beside: b.1" in line["said"]


def test_sessions_that_take_long_to_end_are_ended_at_the_same_time(field: Field, told: Told) -> None:
    run, us = field.run("first"), ProcessRef.of(os.getpid())
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    roster = SessionRegistry(run / "sessions.sqlite")
    for n in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{deaf}; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE
        )
        field.started.append(process)
        assert process.stdout and process.stdout.readline()
        # Nobody waits for it but us, and what is dead and not waited for still has its number.
        threading.Thread(target=process.wait, daemon=True).start()
        roster.record(f"r.{n + 1}", "process", us, outlives=False, phase=Phase.RUNNING)
        roster.update(f"r.{n + 1}", Phase.RUNNING, f"pid {process.pid}")
    roster.close()
    began = time.monotonic()
    assert told("kill", "--run", "first")["ended"] == 4
    assert time.monotonic() - began < 3 * TERM_S


def test_what_runs_inside_its_controller_is_not_killed_with_it(field: Field, told: Told) -> None:
    run = field.run("first", "inline")
    roster, us = SessionRegistry(run / "sessions.sqlite"), ProcessRef.of(os.getpid())
    roster.record("r.1", "inline", us, outlives=False, phase=Phase.RUNNING)
    roster.update("r.1", Phase.RUNNING, f"pid {os.getpid()}")
    roster.close()
    said = told("kill", "r.1", code=1)
    assert f"stop that, pid {os.getpid()}" in said["sessions"][0]["said"]


def test_a_number_that_now_belongs_to_another_process_is_left_alone(field: Field, told: Told) -> None:
    run = field.run("first")
    controller = field.processes(run, {"do": "hang"})
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    field.started.append(bystander)
    owner = ProcessRef.of(bystander.pid)
    earlier = ProcessRef(owner.host, owner.pid, "1")
    with contextlib.closing(sqlite3.connect(run / "sessions.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE sessions SET process = ?", (str(earlier),))
    told("kill", "--run", "first")
    assert bystander.poll() is None
    assert controller.poll() is None


def nap_of(field: Field) -> tuple[Path, str, Path]:
    url = field.serving(f"{ACTING}:nap")
    return field.run("far", f"served={url}"), url, field.runs / "mark"


def test_kill_reaches_what_runs_elsewhere(field: Field, told: Told) -> None:
    run, url, mark = nap_of(field)
    options = {"folder": str(run), "url": url}
    field.controller("tests.cli.test_sessions:served", options, {"seconds": 600, "mark": str(mark)})
    until(mark.exists, "the agent naps")
    assert told("kill", "r.1", "--run", "far")["ended"] == 1
    until(lambda: mark.read_text() == "cancelled", "the agent was cancelled")


# --- reap ------------------------------------------------------------------------------------------------


def test_reap_ends_what_a_dead_controller_left_and_nothing_else(field: Field, told: Told) -> None:
    run, url, mark = nap_of(field)
    options = {"folder": str(run), "url": url}
    row = {"seconds": 600, "mark": str(mark)}
    controller = field.controller("tests.cli.test_sessions:served", options, row)
    until(mark.exists, "the agent naps")
    assert told("cleanup")["sessions"] == []
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    assert [line["orphan"] for line in told("ps")["sessions"]] == [True]
    said = told("cleanup", "far")
    assert (ids(said), said["failed"]) == (["r.1"], 0)
    until(lambda: mark.read_text() == "cancelled", "the agent was cancelled")
    assert told("ps") == {"sessions": []} and told("cleanup")["sessions"] == []


def test_a_place_that_cannot_be_reached_is_told_and_its_sessions_stay(field: Field, told: Told) -> None:
    run = field.run("far", "agentcore=not-an-arn")
    note(run, "r.1", dead(), runtime="agentcore")
    said = told("cleanup", "far", code=1)
    assert said["failed"] == 1 and said["sessions"][0]["said"]
    assert ids(told("ps")) == ["r.1"]


def test_the_guard_waits_for_its_controller_to_be_gone(field: Field, told: Told) -> None:
    run, url, mark = nap_of(field)
    options = {"folder": str(run), "url": url}
    controller = field.controller(
        "tests.cli.test_sessions:served", options, {"seconds": 600, "mark": str(mark)}
    )
    guard = field.reaper(run, "--when-stdin-ends", "--grace-s", 1, "--json")
    until(mark.exists, "the agent naps")
    assert guard.poll() is None
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    assert guard.stdin and guard.stdout
    guard.stdin.close()
    until(lambda: mark.read_text() == "cancelled", "the guard ended it")
    assert guard.wait(60) == 0
    assert ids(json.loads(guard.stdout.read())) == ["r.1"]


def test_a_controller_that_takes_over_keeps_its_sessions(field: Field, told: Told) -> None:
    run, url, mark = nap_of(field)
    options = {"folder": str(run), "url": url}
    row = {"seconds": 600, "mark": str(mark)}
    controller = field.controller("tests.cli.test_sessions:served", options, row)
    until(mark.exists, "the agent naps")
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    guard = field.reaper(run, "--when-stdin-ends", "--grace-s", 30, "--json")
    assert guard.stdin and guard.stdout
    guard.stdin.close()
    field.controller("tests.cli.test_sessions:served", options, row)
    assert guard.wait(60) == 0
    assert json.loads(guard.stdout.read())["sessions"] == []
    assert mark.read_text() == ""
    assert [line["orphan"] for line in told("ps")["sessions"]] == [False]


# --- logs ------------------------------------------------------------------------------------------------


def test_logs_are_those_of_the_session_without_keys(field: Field, capsys: pytest.CaptureFixture[str]) -> None:
    run = field.run("first")
    (run / "logs").mkdir()
    lines = [f"line {n}" for n in range(10)]
    (run / "logs" / "r.1.log").write_text("\n".join([f"key {KEY}", *lines]) + "\n")
    assert main(["logs", "r.1"]) == 0
    out = capsys.readouterr().out
    assert "afk-r.1~..." in out and "deadbeef" not in out and out.endswith("line 9\n")
    assert main(["logs", "r.1", "--tail", "2"]) == 0
    assert capsys.readouterr().out == "line 8\nline 9\n"
    assert main(["logs", "r.1", "--tail", "0"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["logs", "r.2"]) == 2
    assert "did you mean r.1?" in capsys.readouterr().err


def test_the_log_of_a_warm_worker_is_found_while_the_session_runs(
    field: Field, capsys: pytest.CaptureFixture[str]
) -> None:
    run = field.run("first")
    field.processes(run, {"do": "hang", "say": "good morning"})
    log = until(lambda: next((run / "logs").glob("worker-*.log"), None), "there is a log")
    until(lambda: "good morning" in log.read_text(), "the agent spoke")
    assert main(["logs", "r.1"]) == 0
    assert "good morning" in capsys.readouterr().out


def test_what_an_ended_session_printed_is_found_in_the_log_of_its_warm_worker(
    field: Field, capsys: pytest.CaptureFixture[str]
) -> None:
    run = field.run("first")

    async def main_loop() -> None:
        async with ProcessRuntime(f"{ACTING}:act", log_dir=run / "logs", workers=1) as runtime:
            for number, words in enumerate(("good morning", "", "good night"), 1):
                attempt = Attempt("r", number)
                row = {"do": "nothing", "say": words} if words else {"do": "nothing"}
                told = invocation("r", number, outcome_url=f"file://{run}/outcomes")
                await runtime.launch(attempt, payload(row, told))
                await runtime.wait(attempt)

    asyncio.run(main_loop())
    assert main(["logs", "r.1"]) == 0
    out, err = capsys.readouterr()
    assert out == "good morning\n" and "r.1 has ended; what its process printed meanwhile" in err
    assert main(["logs", "r.3"]) == 0
    assert capsys.readouterr().out == "good night\n"
    assert main(["logs", "r.2"]) == 2
    assert "unknown session 'r.2'; did you mean" in capsys.readouterr().err


def test_following_ends_with_the_session(field: Field) -> None:
    run = field.run("first")
    (run / "logs").mkdir()
    log = run / "logs" / "r.1.log"
    log.write_text("one\n")
    note(run, "r.1", ProcessRef.of(os.getpid()), runtime="process", outlives=False)
    process = subprocess.Popen(command("logs", "r.1", "--follow"), stdout=subprocess.PIPE, text=True)
    field.started.append(process)
    assert process.stdout and process.stdout.readline() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    time.sleep(0.5)
    assert process.poll() is None
    roster = SessionRegistry(run / "sessions.sqlite")
    roster.remove(Attempt("r", 1).session_id)
    roster.close()
    assert process.wait(60) == 0
