"""Signs of life: while an agent runs, its session is told so every few seconds.

One daemon thread does it for all sessions of the process, over a few connections per gateway. Nothing here
ever disturbs an agent: a gateway that does not answer is asked again later, and whoever does not know the
route (a server that is no afield gateway) is left alone after its first answer. A session that the
gateway gave up is logged once.
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

log = logging.getLogger("afield.sdk")
FIRST_S = 1.0  # sessions that are over sooner cost nothing
EVERY_S = 3.0
TIMEOUT_S = 2.0
AT_ONCE = 16
Place = tuple[str, str]  # scheme and host


class _Watched:
    def __init__(self, invocation: Invocation, due: float) -> None:
        parts = urlsplit(invocation.base_url)
        self.session_id = invocation.session_id
        self.gateway = (parts.scheme, parts.netloc)
        self.path = f"{parts.path.rstrip('/')}/alive"
        self.headers = {"Authorization": f"Bearer {invocation.api_key}", "Content-Type": "application/json"}
        self.due = due


class Heartbeat:
    """`keep` and `drop` may be called from any thread; dropping what is not kept is harmless."""

    def __init__(self, *, first_s: float = FIRST_S, every_s: float = EVERY_S) -> None:
        self._first_s = first_s
        self._every_s = every_s
        self._changed = threading.Condition()
        self._kept: dict[str, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._links: dict[Place, list[http.client.HTTPConnection]] = {}

    def keep(self, invocation: Invocation) -> None:
        with self._changed:
            watched = _Watched(invocation, time.monotonic() + self._first_s)
            self._kept[watched.session_id] = watched
            self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._post_all, name="alive", daemon=True)
                self._thread.start()

    def drop(self, session_id: str) -> None:
        """No sign of life is sent for it from now on."""
        with self._changed:
            self._kept.pop(session_id, None)

    def _post_all(self) -> None:
        while True:
            due = sorted(self._take_due(), key=attrgetter("gateway"))
            for gateway, group in groupby(due, key=attrgetter("gateway")):
                try:
                    self._post_group(gateway, list(group))
                except (OSError, http.client.HTTPException):
                    self._hang_up(gateway)  # it does not answer; all of them are due again soon

    def _post_group(self, gateway: Place, group: list[_Watched]) -> None:
        """Several are asked before the first answer is awaited, so that a far gateway is no slow one."""
        for start in range(0, len(group), AT_ONCE):
            kept = [w for w in group[start : start + AT_ONCE] if self._kept.get(w.session_id) is w]
            links = self._links.setdefault(gateway, [])
            fresh = len(kept) - len(links)
            links += [_link(gateway) for _ in range(fresh)]
            asked = [(w, link, _ask(w, link)) for w, link in zip(kept, links, strict=False)]
            for n, (watched, link, sent) in enumerate(asked):
                answer = _answer(link) if sent else None
                if answer is None:  # the connection was closed while nobody used it
                    link.close()
                    links[n] = link = _link(gateway)
                    link.request("POST", watched.path, b"{}", watched.headers)
                    response = link.getresponse()
                    answer = response.status, response.read()
                self._heard(watched, *answer)

    def _take_due(self) -> list[_Watched]:
        """Waits until some are due."""
        with self._changed:
            while True:
                now = time.monotonic()
                if due := [watched for watched in self._kept.values() if watched.due <= now]:
                    for watched in due:
                        watched.due = now + self._every_s
                    return due
                dues = [watched.due for watched in self._kept.values()]
                self._changed.wait(min(dues) - now if dues else None)

    def _hang_up(self, gateway: Place) -> None:
        for link in self._links.pop(gateway, ()):
            link.close()

    def _heard(self, watched: _Watched, status: int, body: bytes) -> None:
        if status == 200:
            phase = _phase(body)
            if phase == "aborted":
                log.warning("%s was given up; its outcome comes too late", watched.session_id)
            if phase in ("open", "completed"):
                return
        elif status >= 500 or status in (408, 429):
            return
        with self._changed:
            if self._kept.get(watched.session_id) is watched:
                del self._kept[watched.session_id]


PROCESS = Heartbeat()


def _link(gateway: Place) -> http.client.HTTPConnection:
    scheme, place = gateway
    made = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return made(place, timeout=TIMEOUT_S)


def _ask(watched: _Watched, link: http.client.HTTPConnection) -> bool:
    """Whether it went out; not so over a connection that was closed meanwhile. Raises if nobody is there."""
    new = link.sock is None
    try:
        link.request("POST", watched.path, b"{}", watched.headers)
    except (OSError, http.client.HTTPException):
        if new:
            raise
        return False
    return True


def _answer(link: http.client.HTTPConnection) -> tuple[int, bytes] | None:
    try:
        response = link.getresponse()
        return response.status, response.read()
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException):
        return None


def _phase(body: bytes) -> str:
    """Empty where the answer is not a gateway's."""
    try:
        told: Any = json.decode(body)
    except DecodeError:
        return ""
    return str(told.get("phase", "")) if isinstance(told, dict) else ""
