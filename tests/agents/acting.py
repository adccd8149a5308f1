"""An agent that does what its task says: the tests' way to make one fail in a chosen manner.

One file that needs nothing but afield, so that it can be put anywhere. As a program it tells the sink that it
lives, ten times a second, until nobody answers: `python acting.py URL SESSION WHAT [--daemon]`.
"""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import afield

BEAT_S = 0.1
MOST_MB = 4096


@afield.agent
def act(task: dict, rollout: afield.Context) -> float:
    _begin(task, rollout.session_id)
    if task["do"] in FATAL:
        FATAL[task["do"]](task)
    match task["do"]:
        case "raise":
            raise RuntimeError("the agent broke")
        case "sleep":
            _rest(task)
        case "beat":
            beat(task["tell"], rollout.session_id)
        case "brood":
            _start(task["tell"], rollout.session_id, "child")
            if task.get("daemon"):
                _start_daemon(task["tell"], rollout.session_id)
            beat(task["tell"], rollout.session_id)
        case "daemon":
            _start_daemon(task["tell"], rollout.session_id)
            if task.get("stay"):
                beat(task["tell"], rollout.session_id)
        case "environment":
            return float(os.environ.get(task["name"], "-1"))
    return task.get("value", 1.0)


@afield.agent
async def act_async(task: dict, rollout: afield.Context) -> float:
    return act(task, rollout)


@afield.agent
async def nap(task: dict) -> float:
    """Sleeps, and writes down whether it was let."""
    _note(task, "")
    try:
        await asyncio.sleep(task["seconds"])
    except asyncio.CancelledError:
        _note(task, "cancelled")
        raise
    _note(task, "rested")
    return 1.0


def tell(url: str, session_id: str, what: str) -> bool:
    """Report to the sink; returns whether it answered."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)) as connection:
        return _report(connection, url, session_id, what)


def beat(url: str, session_id: str, what: str = "beat") -> None:
    """Report every BEAT_S seconds, over one connection that closes with this process.

    Ends after five failures in a row.
    """
    missed = 0
    with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)) as connection:
        while missed < 5:
            missed = 0 if _report(connection, url, session_id, what) else missed + 1
            time.sleep(BEAT_S)


def _report(connection: http.client.HTTPConnection, url: str, session_id: str, what: str) -> bool:
    body = json.dumps({"session_id": session_id, "what": what, "pid": os.getpid()})
    try:
        connection.request("POST", urlsplit(url).path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        connection.close()
        return False


def _rest(task: dict) -> None:
    """So long, or until there is a file."""
    time.sleep(task.get("seconds", 0.0))
    while "until" in task and not Path(task["until"]).exists():
        time.sleep(0.05)


# --- what it does not come back from -------------------------------------------------------------


def _leave(task: dict) -> None:
    sys.stderr.write("about to leave\n")
    sys.stderr.flush()
    os._exit(3)


def _kill(task: dict) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(task: dict) -> None:
    while True:
        time.sleep(0.05)


def _spin(task: dict) -> None:
    while True:
        pass


def _lock(task: dict) -> None:
    time.sleep(0.5)  # until the answer to the launch is out
    # Backtracks for ever without letting go of the interpreter's lock.
    re.match(r"(a+)+$", "a" * 80 + "b")


def _eat(task: dict) -> None:
    eaten = [b"\1" * 2**20 for _ in range(MOST_MB)]
    raise RuntimeError(f"nobody minds {len(eaten)} MB")


def _sit(task: dict) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Path(task["pids"]).open("a") as file:
        file.write(f"{child.pid}\n")
    child.wait()


FATAL = {
    "exit": _leave,
    "kill": _kill,
    "hang": _hang,
    "spin": _spin,
    "lock": _lock,
    "eat": _eat,
    "child": _sit,
}


def _begin(task: dict, session_id: str) -> None:
    if mark := task.get("mark"):
        with Path(mark).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if line := task.get("say"):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    if url := task.get("tell"):
        tell(url, session_id, "began")


def _note(task: dict, what: str) -> None:
    Path(task["mark"]).write_text(what)


def _start(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *argv])


def _start_daemon(url: str, session_id: str) -> None:
    """Returns when it has told for the first time."""
    argv = [sys.executable, __file__, url, session_id, "daemon", "--daemon"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()


def _daemonise() -> None:
    """As daemons do: out of the group, out of the session, nobody's child."""
    for leave in (os.setsid, lambda: None):
        if os.fork():
            os._exit(0)
        leave()


if __name__ == "__main__":
    if "--daemon" in sys.argv:
        _daemonise()
        tell(*sys.argv[1:4])
        sys.stdout.write("told\n")
        sys.stdout.flush()
    beat(*sys.argv[1:4])
