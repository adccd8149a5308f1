"""Messages between a Ray actor and its fork server: length-prefixed JSON."""

from __future__ import annotations

import socket
import struct

import msgspec
from msgspec import Raw, Struct

FRAME = struct.Struct("!I")
LOG_BYTES = 256_000


class StartSession(Struct, frozen=True, tag=True):
    session_id: str
    payload: Raw


class StopSession(Struct, frozen=True, tag=True):
    session_id: str


class AgentLoaded(Struct, frozen=True, tag=True):
    """The agent is loaded, or `problem` says why not."""

    problem: str = ""
    threads: tuple[str, ...] = ()


class SessionAccepted(Struct, frozen=True, tag=True):
    """The session has its payload, or `refused` says why not; `busy` if another one may accept it later."""

    session_id: str
    pid: int
    log: str
    refused: str = ""
    busy: bool = False


class SessionExited(Struct, frozen=True, tag=True):
    """The session and all its processes have ended. `died` is empty if the agent returned."""

    session_id: str
    died: str = ""
    log: str = ""


Order = StartSession | StopSession
Event = AgentLoaded | SessionAccepted | SessionExited


def say(link: socket.socket, message: Order | Event) -> None:
    frame = msgspec.json.encode(message)
    link.sendall(FRAME.pack(len(frame)) + frame)
