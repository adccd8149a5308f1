"""`afield ps`, `kill`, `logs` and `cleanup` while controllers run, die and take over."""

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

from afield.cli.main import main
from afield.interfaces.runtime import Phase, SessionStatus
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
    """The runtime of a controller in another process."""
    return TrackedRuntime(RemoteRuntime([url]), SessionRegistry(Path(folder) / "sessions.sqlite"), "served")


def processes(folder: str, target: str) -> TrackedRuntime:
    """The runtime of a controller in another process, with one worker process."""
    runtime = ProcessRuntime(target, log_dir=Path(folder) / "logs", workers=1, poll_s=0.05)
    return TrackedRuntime(runtime, SessionRegistry(Path(folder) / "sessions.sqlite"), "process")


class Runs:
    """A directory of runs, and the processes started for it."""

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
        """A process that launched one attempt of this rollout and runs until it is killed."""
        body = json.dumps(payload(row, invocation(rollout_id)))
        script = [sys.executable, str(AGENTS / "controller.py"), maker, json.dumps(options), rollout_id, body]
        process = subprocess.Popen(script, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout and process.stdout.readline() == b"launched\n"
        return process

    def process_controller(
        self, run: Path, row: dict[str, Any], rollout_id: str = "r"
    ) -> subprocess.Popen[bytes]:
        options = {"folder": str(run), "target": f"{ACTING}:act"}
        return self.controller("tests.cli.test_sessions:processes", options, row, rollout_id)

    def server(self, target: str) -> str:
        script = [sys.executable, "-m", "afield.sdk.serve", target, "--outcome-root", "/"]
        process = subprocess.Popen(script, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout
        return f"http://127.0.0.1:{int(process.stdout.readline())}"

    def cleanup(self, *args: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(command("cleanup", *args), stdin=pipe, stdout=pipe, text=True)
        self.started.append(process)
        return process


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setenv("AFIELD_RUNS", str(tmp_path / "runs"))
    made = Runs(tmp_path / "runs")
    yield made
    for process in made.started:
        process.kill()
        process.wait(20)
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


RunJson = Callable[..., Any]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> RunJson:
    """Function that runs a command with --json and checks its exit code."""

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


def register(
    run: Path, session_id: str, owner: ProcessRef, *, outlives: bool = True, runtime: str = "served"
) -> None:
    registry = SessionRegistry(run / "sessions.sqlite")
    registry.add_owner(owner)
    registry.record(session_id, runtime, owner, outlives=outlives, phase=Phase.RUNNING)
    registry.close()


# --- ps --------------------------------------------------------------------------------------------------


def test_ps_without_sessions_prints_where_it_searched(
    runs: Runs, capsys: pytest.CaptureFixture[str], run_json: RunJson
) -> None:
    assert main(["ps"]) == 0
    assert f"no running sessions in {runs.runs}; AFIELD_RUNS" in capsys.readouterr().out
    runs.run("quiet")
    assert run_json("ps", "quiet") == {"sessions": []}


def test_ps_lists_sessions_of_all_runs_with_their_owners(
    runs: Runs, capsys: pytest.CaptureFixture[str], run_json: RunJson
) -> None:
    first, second = runs.run("first"), runs.run("second", "served=http://127.0.0.1:9")
    us = ProcessRef.of(os.getpid())
    register(first, "a.1", us, runtime="process", outlives=False)
    register(first / "verifiers", "a.1", us, runtime="sandbox", outlives=False)
    register(second, "b.1", dead())
    register(second, "c.1", ProcessRef("another-machine", 7, "1"))
    lines = {(line["run"], line["role"], line["session"]): line for line in run_json("ps")["sessions"]}
    assert set(lines) == {
        ("first", "agent", "a.1"),
        ("first", "verifier", "a.1"),
        ("second", "agent", "b.1"),
        ("second", "agent", "c.1"),
    }
    assert [line["orphan"] for line in lines.values()] == [False, False, True, False]
    assert ids(run_json("ps", "second")) == ["b.1", "c.1"]
    assert main(["ps"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split("\t") == ["run", "session", "runtime", "phase", "where", "age", "owner"]
    assert all(line.count("\t") == 6 for line in shown)
    assert sum("ORPHAN" in line for line in shown) == 1
    assert any("pid 7 on another-machine" in line for line in shown)


def test_ps_omits_sessions_that_ended_with_their_controller(runs: Runs, run_json: RunJson) -> None:
    register(runs.run("first"), "a.1", dead(), runtime="process", outlives=False)
    assert run_json("ps") == {"sessions": []}


def test_ps_prints_no_traceback_when_its_pipe_closes(runs: Runs) -> None:
    run = runs.run("first", "served=http://127.0.0.1:9")
    registry, owner = SessionRegistry(run / "sessions.sqlite"), ProcessRef.of(os.getpid())
    for n in range(2000):
        registry.record(f"a{n}.1", "served", owner, outlives=True, phase=Phase.RUNNING)
    registry.close()
    line = " ".join(command("ps"))
    done = subprocess.run(["sh", "-c", f"{line} | head -1"], capture_output=True, timeout=60, check=False)
    assert done.stdout.startswith(b"run\t")
    assert b"Traceback" not in done.stderr


# --- kill ------------------------------------------------------------------------------------------------


def test_kill_refuses_an_unknown_session_with_the_nearest_ids(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    register(runs.run("first"), "t1-e0-r0.1", ProcessRef.of(os.getpid()), runtime="process")
    assert main(["kill", "t1-e0-r9.1"]) == 2
    assert "did you mean t1-e0-r0.1?" in capsys.readouterr().err
    assert main(["kill"]) == 2
    assert "--orphans" in capsys.readouterr().err
    assert main(["kill", "--run", "frist"]) == 2
    assert "unknown run 'frist'" in capsys.readouterr().err


def test_kill_refuses_a_session_id_that_two_runs_use(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        register(runs.run(name), "train-e0-t0-0.1", ProcessRef.of(os.getpid()), runtime="process")
    assert main(["kill", "train-e0-t0-0.1"]) == 2
    assert "runs in one, two; choose one with --run" in capsys.readouterr().err


def test_kill_ends_the_process_of_a_session_but_not_the_controller(runs: Runs, run_json: RunJson) -> None:
    run = runs.run("first")
    controller = runs.process_controller(run, {"do": "hang"})
    [line] = run_json("ps")["sessions"]
    pid = int(line["where"].split()[1])
    assert alive(pid) and line["owner"] == {**line["owner"], "pid": controller.pid, "alive": True}
    report = run_json("kill", "r.1")
    assert (report["ended"], report["failed"]) == (1, 0)
    until(lambda: not alive(pid), "the worker is gone")
    assert controller.poll() is None


def sleeping_process(runs: Runs) -> subprocess.Popen[Any]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    runs.started.append(process)
    return process


def test_kill_waits_for_the_process_of_a_starting_session(runs: Runs, run_json: RunJson) -> None:
    run, us = runs.run("first"), ProcessRef.of(os.getpid())
    sleeper = sleeping_process(runs)

    def place() -> None:
        registry = SessionRegistry(run / "sessions.sqlite")
        registry.update(SessionStatus(session_id="r.1", phase=Phase.RUNNING, pid=sleeper.pid))
        sleeper.wait(20)
        registry.close()

    registry = SessionRegistry(run / "sessions.sqlite")
    registry.record("r.1", "process", us, outlives=False, phase=Phase.STARTING)
    registry.close()
    placing = threading.Timer(0.5, place)
    placing.start()
    report = run_json("kill", "r.1")
    placing.join()
    assert (report["ended"], report["failed"]) == (1, 0)
    assert sleeper.poll() == -signal.SIGTERM


def test_kill_names_other_sessions_of_the_ended_worker(runs: Runs, run_json: RunJson) -> None:
    run, us = runs.run("first"), ProcessRef.of(os.getpid())
    sleeper = sleeping_process(runs)
    registry = SessionRegistry(run / "sessions.sqlite")
    for session_id in ("a.1", "b.1"):
        registry.record(session_id, "process", us, outlives=False, phase=Phase.RUNNING)
        registry.update(SessionStatus(session_id=session_id, phase=Phase.RUNNING, pid=sleeper.pid))
    registry.close()

    def remove_other() -> None:  # as the controller does when the worker has ended
        sleeper.wait(20)
        registry = SessionRegistry(run / "sessions.sqlite")
        registry.remove("b.1")
        registry.close()

    removing = threading.Thread(target=remove_other)
    removing.start()
    [line] = run_json("kill", "a.1")["sessions"]
    removing.join()
    assert "the sessions that it also served: b.1" in line["message"]


WAITS_FOR_OTHERS = """
import pathlib, signal, sys, time
directory, name, count = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def end(*_):
    (directory / name).touch()
    while len(list(directory.iterdir())) < count:
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(flush=True)
time.sleep(60)
"""


def test_kill_signals_all_sessions_before_it_waits_for_one(
    runs: Runs, run_json: RunJson, tmp_path: Path
) -> None:
    run, us = runs.run("first"), ProcessRef.of(os.getpid())
    (tmp_path / "signalled").mkdir()
    registry = SessionRegistry(run / "sessions.sqlite")
    processes: list[subprocess.Popen[bytes]] = []
    for n in range(1, 4):
        # Each process ends once all have got SIGTERM; otherwise SIGKILL ends it.
        arguments = [sys.executable, "-c", WAITS_FOR_OTHERS, str(tmp_path / "signalled"), str(n), "3"]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
        runs.started.append(process)
        processes.append(process)
        assert process.stdout and process.stdout.readline()
        # A process that is dead but not waited for keeps its pid.
        threading.Thread(target=process.wait, daemon=True).start()
        registry.record(f"r.{n}", "process", us, outlives=False, phase=Phase.RUNNING)
        registry.update(SessionStatus(session_id=f"r.{n}", phase=Phase.RUNNING, pid=process.pid))
    registry.close()
    assert run_json("kill", "--run", "first")["ended"] == 3
    assert [process.wait(20) for process in processes] == [0, 0, 0]


def test_kill_refuses_a_session_that_runs_inside_its_controller(runs: Runs, run_json: RunJson) -> None:
    run = runs.run("first", "inline")
    registry, us = SessionRegistry(run / "sessions.sqlite"), ProcessRef.of(os.getpid())
    registry.record("r.1", "inline", us, outlives=False, phase=Phase.RUNNING)
    registry.update(SessionStatus(session_id="r.1", phase=Phase.RUNNING, pid=os.getpid()))
    registry.close()
    report = run_json("kill", "r.1", code=1)
    assert f"stop pid {os.getpid()}" in report["sessions"][0]["message"]


def test_kill_spares_a_process_that_reuses_the_pid(runs: Runs, run_json: RunJson) -> None:
    run = runs.run("first")
    controller = runs.process_controller(run, {"do": "hang"})
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    runs.started.append(bystander)
    owner = ProcessRef.of(bystander.pid)
    earlier = ProcessRef(owner.host, owner.pid, "1")
    with contextlib.closing(sqlite3.connect(run / "sessions.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE sessions SET process = ?", (str(earlier),))
    run_json("kill", "--run", "first")
    assert bystander.poll() is None
    assert controller.poll() is None


def agent_server(runs: Runs) -> tuple[Path, str, Path]:
    url = runs.server(f"{ACTING}:nap")
    return runs.run("far", f"served={url}"), url, runs.runs / "mark"


def test_kill_stops_a_session_on_an_agent_server(runs: Runs, run_json: RunJson) -> None:
    run, url, mark = agent_server(runs)
    options = {"folder": str(run), "url": url}
    runs.controller("tests.cli.test_sessions:served", options, {"seconds": 600, "mark": str(mark)})
    until(mark.exists, "the agent runs")
    assert run_json("kill", "r.1", "--run", "far")["ended"] == 1
    until(lambda: mark.read_text() == "cancelled", "the agent was cancelled")


# --- cleanup ---------------------------------------------------------------------------------------------


def test_cleanup_ends_only_orphaned_sessions(runs: Runs, run_json: RunJson) -> None:
    run, url, mark = agent_server(runs)
    options = {"folder": str(run), "url": url}
    row = {"seconds": 600, "mark": str(mark)}
    controller = runs.controller("tests.cli.test_sessions:served", options, row)
    until(mark.exists, "the agent runs")
    assert run_json("cleanup")["sessions"] == []
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    assert [line["orphan"] for line in run_json("ps")["sessions"]] == [True]
    report = run_json("cleanup", "far")
    assert (ids(report), report["failed"]) == (["r.1"], 0)
    until(lambda: mark.read_text() == "cancelled", "the agent was cancelled")
    assert run_json("ps") == {"sessions": []} and run_json("cleanup")["sessions"] == []


def test_cleanup_keeps_sessions_of_an_unreachable_runtime_and_fails(runs: Runs, run_json: RunJson) -> None:
    run = runs.run("far", "agentcore=not-an-arn")
    register(run, "r.1", dead(), runtime="agentcore")
    report = run_json("cleanup", "far", code=1)
    assert report["failed"] == 1 and report["sessions"][0]["message"]
    assert ids(run_json("ps")) == ["r.1"]


def test_cleanup_when_stdin_ends_waits_for_the_controller_to_die(runs: Runs, run_json: RunJson) -> None:
    run, url, mark = agent_server(runs)
    options = {"folder": str(run), "url": url}
    controller = runs.controller(
        "tests.cli.test_sessions:served", options, {"seconds": 600, "mark": str(mark)}
    )
    guard = runs.cleanup(run, "--when-stdin-ends", "--grace-s", 1, "--json")
    until(mark.exists, "the agent runs")
    assert guard.poll() is None
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    assert guard.stdin and guard.stdout
    guard.stdin.close()
    until(lambda: mark.read_text() == "cancelled", "the guard ended it")
    assert guard.wait(60) == 0
    assert ids(json.loads(guard.stdout.read())) == ["r.1"]


def test_cleanup_when_stdin_ends_spares_sessions_of_a_new_controller(runs: Runs, run_json: RunJson) -> None:
    run, url, mark = agent_server(runs)
    options = {"folder": str(run), "url": url}
    row = {"seconds": 600, "mark": str(mark)}
    controller = runs.controller("tests.cli.test_sessions:served", options, row)
    until(mark.exists, "the agent runs")
    controller.send_signal(signal.SIGKILL)
    controller.wait(20)
    guard = runs.cleanup(run, "--when-stdin-ends", "--grace-s", 30, "--json")
    assert guard.stdin and guard.stdout
    guard.stdin.close()
    runs.controller("tests.cli.test_sessions:served", options, row)
    assert guard.wait(60) == 0
    assert json.loads(guard.stdout.read())["sessions"] == []
    assert mark.read_text() == ""
    assert [line["orphan"] for line in run_json("ps")["sessions"]] == [False]


# --- logs ------------------------------------------------------------------------------------------------


def test_logs_prints_the_log_of_a_session_without_keys(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.run("first")
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


def test_logs_prints_the_log_of_the_worker_of_a_running_session(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.run("first")
    runs.process_controller(run, {"do": "hang", "say": "good morning"})
    log = until(lambda: next((run / "logs").glob("worker-*.log"), None), "there is a log")
    until(lambda: "good morning" in log.read_text(), "the agent spoke")
    assert main(["logs", "r.1"]) == 0
    assert "good morning" in capsys.readouterr().out


def test_logs_prints_the_section_of_an_ended_session_in_its_workers_log(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.run("first")

    async def main_loop() -> None:
        async with ProcessRuntime(f"{ACTING}:act", log_dir=run / "logs", workers=1) as runtime:
            for number, words in enumerate(("good morning", "", "good night"), 1):
                attempt = Attempt("r", number)
                row = {"do": "nothing", "say": words} if words else {"do": "nothing"}
                request = invocation("r", number, outcome_url=f"file://{run}/outcomes")
                await runtime.launch(attempt, payload(row, request))
                await runtime.wait(attempt)

    asyncio.run(main_loop())
    assert main(["logs", "r.1"]) == 0
    out, err = capsys.readouterr()
    assert out == "good morning\n" and "session r.1 has ended; this part of its worker's log" in err
    assert main(["logs", "r.3"]) == 0
    assert capsys.readouterr().out == "good night\n"
    assert main(["logs", "r.2"]) == 2
    assert "unknown session 'r.2'; did you mean" in capsys.readouterr().err


def test_logs_follow_ends_with_the_session(runs: Runs) -> None:
    run = runs.run("first")
    (run / "logs").mkdir()
    log = run / "logs" / "r.1.log"
    log.write_text("one\n")
    register(run, "r.1", ProcessRef.of(os.getpid()), runtime="process", outlives=False)
    process = subprocess.Popen(command("logs", "r.1", "--follow"), stdout=subprocess.PIPE, text=True)
    runs.started.append(process)
    assert process.stdout and process.stdout.readline() == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    assert process.stdout.readline() == "two\n"
    time.sleep(0.5)
    assert process.poll() is None
    registry = SessionRegistry(run / "sessions.sqlite")
    registry.remove(Attempt("r", 1).session_id)
    registry.close()
    assert process.wait(60) == 0
