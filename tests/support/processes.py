"""Start the real commands as a user would, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support.gateways import POLICY
from support.paths import TESTS

AGENTS = TESTS / "agents"


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "afield", *map(str, args)]


def start(cwd: Path, *args: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*args), cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 400) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end in {timeout} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def afield(cwd: Path, *args: object, timeout: float = 400) -> tuple[int, str, str]:
    return finish(start(cwd, *args), timeout)


def summary(out: str) -> dict[str, Any]:
    return json.loads(out.strip().splitlines()[-1])


def write_tasks(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_arguments(cwd: Path, agent: str, rows: list[dict[str, Any]], *more: object) -> list[object]:
    tasks = write_tasks(cwd / "tasks.jsonl", rows)
    return [
        "train",
        f"{AGENTS / agent}:agent",
        "--tasks",
        tasks,
        "--model",
        POLICY,
        "--lr",
        1e-4,
        "--json",
        *more,
    ]


def unlearned(cwd: Path) -> list[object]:
    """For what is not about weights: the model's answers are written down, and neither side loads torch."""
    script = cwd / "script.jsonl"
    script.write_text(json.dumps({"match": "", "one_of": ["Yes.", "Never!!"]}) + "\n")
    return ["--engine", f"scripted={script}", "--freeze-weights"]


def until(ready: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := ready():
            return found
        time.sleep(0.05)
    raise AssertionError(f"never happened within {seconds} s: {what}")


def children(pid: int, *, deep: bool = True) -> dict[int, str]:
    """Processes that `pid` started, and theirs if `deep`, with their command lines."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue
            if parent == pid:
                found[int(entry.name)] = line
    for child in list(found) if deep else ():
        found |= children(child)
    return found


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
