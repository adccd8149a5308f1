"""An agent that does what its task says: the tests' way to make one fail in a chosen manner."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import afield


@afield.agent
def act(task: dict) -> float:  # noqa: C901
    if mark := task.get("mark"):
        with Path(mark).open("a") as file:
            file.write(f"{os.getpid()}\n")
    match task["do"]:
        case "raise":
            raise RuntimeError("the agent broke")
        case "exit":
            sys.stderr.write("about to leave\n")
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(task["seconds"])
        case "hang":
            while True:
                time.sleep(0.05)
        case "spin":
            while True:
                pass
        case "lock":
            # Backtracks for ever without letting go of the interpreter's lock.
            re.match(r"(a+)+$", "a" * 80 + "b")
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with Path(task["pids"]).open("a") as file:
                file.write(f"{child.pid}\n")
            child.wait()
        case "environment":
            return float(os.environ.get(task["name"], "-1"))
    return task.get("value", 1.0)


@afield.agent
async def act_async(task: dict, rollout: afield.Context) -> float:
    return act(task)


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


def _note(task: dict, what: str) -> None:
    Path(task["mark"]).write_text(what)
