"""Heartbeats: POSTs that keep sessions alive at their gateway.

One daemon thread serves all sessions of the process over a few connections per gateway. Errors never reach an
agent: an unavailable gateway is retried later, and a server without the route gets no further heartbeats. An
aborted session is logged once.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from itertools import groupby
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from msgspec import DecodeError, json

from afield.wire import Invocation

log = logging.getLogger(__name__)
FIRST_S = 1.0  # shorter sessions send none
EVERY_S = 3.0
TIMEOUT_S = 2.0
CONNECTIONS = 16  # per gateway
GatewayAddress = tuple[str, str]  # scheme and host


class _Session:
    def __init__(self, invocation: Invocation, due: float) -> None:
        parts = urlsplit(invocation.base_url)
        self.session_id = invocation.session_id
        self.gateway = (parts.scheme, parts.netloc)
        self.path = f"{parts.path.rstrip('/')}/alive"
        self.headers = {"Authorization": f"Bearer {invocation.api_key}", "Content-Type": "application/json"}
        self.due = due


class Heartbeat:
    """Heartbeats of a process's sessions. `keep` and `drop` may be called from any thread."""

    def __init__(self, *, first_s: float = FIRST_S, every_s: float = EVERY_S) -> None:
        self._first_s = first_s
        self._every_s = every_s
        self._changed = threading.Condition()
        self._kept: dict[str, _Session] = {}
        self._thread: threading.Thread | None = None
        self._connections: dict[GatewayAddress, list[http.client.HTTPConnection]] = {}

    def keep(self, invocation: Invocation) -> None:
        """Send heartbeats for a session until it is dropped."""
        with self._changed:
            watched = _Session(invocation, time.monotonic() + self._first_s)
            self._kept[watched.session_id] = watched
            self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._post_all, name="alive", daemon=True)
                self._thread.start()

    def drop(self, session_id: str) -> None:
        """Stop the heartbeats of a session; an unknown one is ignored."""
        with self._changed:
            self._kept.pop(session_id, None)

    def _post_all(self) -> None:
        while True:
            due = sorted(self._take_due(), key=attrgetter("gateway"))
            for gateway, group in groupby(due, key=attrgetter("gateway")):
                try:
                    self._post_group(gateway, list(group))
                except (OSError, http.client.HTTPException):
                    self._close_connections(gateway)  # unavailable; its sessions are due again soon

    def _post_group(self, gateway: GatewayAddress, group: list[_Session]) -> None:
        """Send several requests before reading the first response, so that latency does not add up."""
        for start in range(0, len(group), CONNECTIONS):
            kept = [w for w in group[start : start + CONNECTIONS] if self._kept.get(w.session_id) is w]
            connections = self._connections.setdefault(gateway, [])
            missing = len(kept) - len(connections)
            connections += [_connect(gateway) for _ in range(missing)]
            requests = [
                (w, connection, _send(w, connection))
                for w, connection in zip(kept, connections, strict=False)
            ]
            for n, (watched, connection, sent) in enumerate(requests):
                reply = _read_response(connection) if sent else None
                if reply is None:  # the idle connection was closed
                    connection.close()
                    connections[n] = connection = _connect(gateway)
                    connection.request("POST", watched.path, b"{}", watched.headers)
                    response = connection.getresponse()
                    reply = response.status, response.read()
                self._handle_response(watched, *reply)

    def _take_due(self) -> list[_Session]:
        """Wait until sessions are due, and return them."""
        with self._changed:
            while True:
                now = time.monotonic()
                if due := [watched for watched in self._kept.values() if watched.due <= now]:
                    for watched in due:
                        watched.due = now + self._every_s
                    return due
                dues = [watched.due for watched in self._kept.values()]
                self._changed.wait(min(dues) - now if dues else None)

    def _close_connections(self, gateway: GatewayAddress) -> None:
        for connection in self._connections.pop(gateway, ()):
            connection.close()

    def _handle_response(self, watched: _Session, status: int, body: bytes) -> None:
        if status == 200:
            phase = _phase(body)
            if phase == "aborted":
                log.warning(
                    "heartbeat: %s aborted by the gateway, its outcome comes too late", watched.session_id
                )
            if phase in ("open", "completed"):
                return
        elif status >= 500 or status in (408, 429):
            return
        with self._changed:
            if self._kept.get(watched.session_id) is watched:
                del self._kept[watched.session_id]


PROCESS_HEARTBEAT = Heartbeat()


def _connect(gateway: GatewayAddress) -> http.client.HTTPConnection:
    scheme, host = gateway
    connection = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return connection(host, timeout=TIMEOUT_S)


def _send(watched: _Session, connection: http.client.HTTPConnection) -> bool:
    """Send a heartbeat; False if the idle connection was closed. Raises if the gateway is unreachable."""
    new = connection.sock is None
    try:
        connection.request("POST", watched.path, b"{}", watched.headers)
    except (OSError, http.client.HTTPException):
        if new:
            raise
        return False
    return True


def _read_response(connection: http.client.HTTPConnection) -> tuple[int, bytes] | None:
    try:
        response = connection.getresponse()
        return response.status, response.read()
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException):
        return None


def _phase(body: bytes) -> str:
    """The session's phase; empty if the response is not a gateway's."""
    try:
        response: Any = json.decode(body)
    except DecodeError:
        return ""
    return str(response.get("phase", "")) if isinstance(response, dict) else ""
