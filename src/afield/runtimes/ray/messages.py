"""What a nest and its warm parent say to each other: JSON in frames that begin with their length."""

from __future__ import annotations

import socket
import struct

import msgspec
from msgspec import Raw, Struct

FRAME = struct.Struct("!I")
LOG_BYTES = 256_000


class Start(Struct, frozen=True, tag=True):
    session_id: str
    payload: Raw


class Stop(Struct, frozen=True, tag=True):
    session_id: str


class Ready(Struct, frozen=True, tag=True):
    """The agent is loaded, or `problem` says why it is not."""

    problem: str = ""
    threads: tuple[str, ...] = ()


class Taken(Struct, frozen=True, tag=True):
    """A session has its payload, or `refused` says why not; `busy` where another may take it later."""

    session_id: str
    pid: int
    log: str
    refused: str = ""
    busy: bool = False


class Ended(Struct, frozen=True, tag=True):
    """Nothing is left of a session. `died` is empty where its agent came to its end."""

    session_id: str
    died: str = ""
    log: str = ""


Order = Start | Stop
Event = Ready | Taken | Ended


def say(link: socket.socket, message: Order | Event) -> None:
    frame = msgspec.json.encode(message)
    link.sendall(FRAME.pack(len(frame)) + frame)
