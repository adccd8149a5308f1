"""The warm parent of Ray's sessions, without Ray: what a session says makes it import nothing, nor end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from afield import wire
from afield.runtimes.ray.messages import (
    FRAME,
    AgentLoaded,
    Event,
    SessionAccepted,
    SessionExited,
    StartSession,
)
from agents.invoking import invocation, payload

AGENT = """
import os
import stat
import sys

import afield


@afield.agent
def act(task):
    had = float(task["had"] in sys.modules)
    if task.get("never"):
        import wave
    if task.get("pipes"):
        return float(sum(map(is_pipe, range(3, 64))))
    for fd in range(3, 64):
        try:
            os.write(fd, task.get("write", "").encode())
        except OSError:
            pass
    return had


def is_pipe(fd):
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False
"""
events = msgspec.json.Decoder(Event)


class Parent:
    def __init__(self, link: socket.socket, store: Path) -> None:
        self._link, self._store = link, store

    def hear(self) -> Any:
        (size,) = FRAME.unpack(self._read(FRAME.size))
        return events.decode(self._read(size))

    def run(self, name: str, row: dict[str, Any]) -> SessionExited:
        told = payload(row, invocation(name, outcome_url=self._store.as_uri()))
        order = msgspec.json.encode(StartSession(f"{name}.1", Raw(wire.encode(told))))
        self._link.sendall(FRAME.pack(len(order)) + order)
        while not isinstance(event := self.hear(), SessionExited):
            assert isinstance(event, SessionAccepted)
        return event

    def reward(self, name: str) -> float:
        (path,) = [p for p in self._store.rglob(f"{name}.1.json") if "commits" not in p.parts]
        return msgspec.json.decode(path.read_bytes())["outcome"]["reward"]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._link.recv(size - len(data))
            assert piece, "the warm parent has ended"
            data += piece
        return data


@contextmanager
def parent_of(tmp_path: Path) -> Iterator[Parent]:
    (tmp_path / "agent.py").write_text(AGENT)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "afield.runtimes.ray.fork_server", f"{tmp_path / 'agent.py'}:act"]
    command.append(str(theirs.fileno()))
    # The parent ends when its socket does, and is waited for then, whatever the test did.
    with theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=os.environ), ours:
        theirs.close()
        ours.settimeout(60)
        parent = Parent(ours, tmp_path / "store")
        ready = parent.hear()
        assert isinstance(ready, AgentLoaded) and not ready.problem
        yield parent


def test_modules_that_the_agent_names_are_there_and_those_that_a_session_names_are_not(
    tmp_path: Path,
) -> None:
    with parent_of(tmp_path) as parent:
        parent.run("a", {"had": "wave", "write": '\n["sched"]\n'})
        parent.run("b", {"had": "sched"})
        assert (parent.reward("a"), parent.reward("b")) == (1.0, 0.0)


def test_an_agent_has_no_pipe_to_the_parent_that_it_could_write_to_before_the_session_is_taken(
    tmp_path: Path,
) -> None:
    with parent_of(tmp_path) as parent:
        parent.run("a", {"had": "x", "pipes": True})
        assert parent.reward("a") == 0.0


@pytest.mark.parametrize("written", ["nonsense\n" * 100, '{"session_id": "other.1"}\n'])
def test_a_session_that_writes_to_its_parent_ends_alone(written: str, tmp_path: Path) -> None:
    with parent_of(tmp_path) as parent:
        parent.run("a", {"had": "x", "write": written})
        assert not parent.run("b", {"had": "x"}).died
