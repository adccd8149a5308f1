"""Messages between a Ray actor and its fork server: length-prefixed JSON."""

from __future__ import annotations

import socket
import struct

import msgspec
from msgspec import Raw, Struct

FRAME = struct.Struct("!I")
LOG_BYTES = 256_000


class StartSession(Struct, frozen=True, tag=True):
    """Actor to fork server: start a session."""

    session_id: str
    """Id of the attempt's session."""
    payload: Raw
    """Payload of the invocation, as JSON."""


class StopSession(Struct, frozen=True, tag=True):
    """Actor to fork server: kill a session."""

    session_id: str
    """Id of the attempt's session."""


class AgentLoaded(Struct, frozen=True, tag=True):
    """Fork server to actor: the agent is loaded, or failed to load."""

    problem: str = ""
    """Why the agent failed to load; empty on success."""
    threads: tuple[str, ...] = ()
    """Names of threads that the agent's module starts at import."""


class SessionAccepted(Struct, frozen=True, tag=True):
    """Fork server to actor: the session accepted or refused its payload."""

    session_id: str
    """Id of the attempt's session."""
    pid: int
    """Process id of the session."""
    log: str
    """Path of the session's log on the node."""
    refused: str = ""
    """Why the session refused the payload; empty if it accepted."""
    busy: bool = False
    """Whether a later launch may be accepted."""


class SessionExited(Struct, frozen=True, tag=True):
    """Fork server to actor: the session and all its processes have ended."""

    session_id: str
    """Id of the attempt's session."""
    died: str = ""
    """Why the session died; empty if the agent returned."""
    log: str = ""
    """Tail of the session's log."""


Order = StartSession | StopSession
Event = AgentLoaded | SessionAccepted | SessionExited


def say(link: socket.socket, message: Order | Event) -> None:
    frame = msgspec.json.encode(message)
    link.sendall(FRAME.pack(len(frame)) + frame)
