"""HTTP client of the gateway's admin API (`interfaces.Gateway`).

All operations are idempotent: connection errors and 5xx are retried for `unavailable_timeout_s`, then
raise Unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from msgspec import Struct

from afield.chat import ModelIdentity
from afield.errors import Conflict, NotFound, Unavailable, UsageError
from afield.gateway.header_keys import HeaderKeyCredentials, HeaderKeySpec
from afield.interfaces import SessionCredentials, SessionRecord, SessionSpec, SessionState
from afield.types import Policy
from afield.wire import Submission

T = TypeVar("T")
TIMEOUT_S = 120.0
"""Timeout of a request, in seconds."""
HEALTH_S = 10.0
"""Timeout of a health request, in seconds."""
MANY = 5_000
"""Session states per request."""
PAGE = 1_000
"""Sessions per page."""
WAIT_S = 60.0
"""Longest wait of one request for the end of a session, in seconds; below TIMEOUT_S."""
LOADING_S = 1800.0
"""Timeout for publishing weights, in seconds; large weights take long to load."""


class _States(Struct):
    """Response to `POST /sessions/states`."""

    sessions: dict[str, SessionState]
    """State by session id."""


class _Listed(Struct):
    """Response to `GET /sessions`."""

    sessions: list[SessionState]
    """States by id, one page."""


class _Health(Struct):
    """Fields read from the health response."""

    outcomes: bool = True
    """Whether the gateway forwards outcomes."""
    context: int | None = None
    """Context length in tokens; None if unknown."""
    dtype: str = ""
    """Dtype of the engines' weights; empty if unknown."""


class ServedPolicy(Struct, frozen=True):
    """Response to `GET /policy`."""

    version: int
    """Version of the loaded weights."""
    model: ModelIdentity | None = None
    """Model directory of the gateway; None if it does not say."""


class HttpGateway:
    """Implements `interfaces.Gateway` over HTTP.

    With `delivers`, agents send their outcomes to the gateway; entering fails if it does not forward
    them.
    """

    def __init__(
        self, url: str, admin_key: str, *, unavailable_timeout_s: float = 10.0, delivers: bool = False
    ) -> None:
        self._url = url.rstrip("/")
        self._admin_key = admin_key
        self._unavailable_timeout_s = unavailable_timeout_s
        self._delivers = delivers

    async def __aenter__(self) -> Self:
        # Below the server's keepalive, so that no request uses a connection that is being closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)
        self._http = aiohttp.ClientSession(
            connector=connector,
            headers={"authorization": f"Bearer {self._admin_key}"},
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        if self._delivers and not await self._passes_on():
            await self._http.close()
            raise UsageError(
                f"agents of this run send their outcomes to the gateway at {self._url}, which does not"
                " forward outcomes: start it with --outcomes SPEC and give the same SPEC as transport, such"
                " as files:///DIR"
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def _passes_on(self) -> bool:
        """Returns True if the gateway does not answer: the next request raises the error."""
        return (await self._health()).outcomes

    async def context(self) -> int | None:
        """Returns the context length of the engines in tokens; None if unknown."""
        return (await self._health()).context

    async def engine_dtype(self) -> str:
        """Returns the dtype of the engines' weights; empty if unknown."""
        return (await self._health()).dtype

    async def answers(self, timeout_s: float) -> bool:
        """Returns whether the gateway answers a health request, with or without a ready engine."""
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with self._http.get(f"{self._url}/health", timeout=limit):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _health(self) -> _Health:
        try:
            limit = aiohttp.ClientTimeout(total=HEALTH_S)
            async with self._http.get(f"{self._url}/health", timeout=limit) as response:
                return msgspec.json.decode(await response.read(), type=_Health)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return _Health()

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        return await self._ask("POST", "/sessions", SessionCredentials, spec)

    async def create_key(self, spec: HeaderKeySpec) -> HeaderKeyCredentials:
        """Creates a header key, which opens a session per header value. Idempotent per id and spec."""
        return await self._ask("POST", "/keys", HeaderKeyCredentials, spec)

    async def delete_key(self, key_id: str) -> None:
        """Deletes a header key and completes its open sessions. Idempotent."""
        await self._ask("DELETE", f"/keys/{key_id}", dict[str, Any])

    async def sessions(self, *, key_id: str = "", phase: str = "") -> list[SessionState]:
        """Lists sessions by id, filtered by header key and phase."""
        listed: list[SessionState] = []
        while True:
            params = {"limit": PAGE, "after": listed[-1].id if listed else "", "key": key_id, "phase": phase}
            query = urlencode({name: value for name, value in params.items() if value})
            page = (await self._ask("GET", f"/sessions?{query}", _Listed)).sessions
            listed += page
            if len(page) < PAGE:
                return listed

    async def state(self, session_id: str) -> SessionState:
        return await self._ask("GET", f"/sessions/{session_id}", SessionState)

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        states: dict[str, SessionState] = {}
        for start in range(0, len(session_ids), MANY):
            body = {"ids": session_ids[start : start + MANY]}
            states |= (await self._ask("POST", "/sessions/states", _States, body)).sessions
        return states

    async def version(self) -> int:
        return (await self.served_policy()).version

    async def served_policy(self) -> ServedPolicy:
        """Returns the version of the loaded weights and the model of the gateway."""
        return await self._ask("GET", "/policy", ServedPolicy)

    async def reward(
        self, session_id: str, reward: float, *, name: str | None = None, turn: str | int | None = None
    ) -> SessionState:
        """Records a reward of a session, or of a turn: its id, its response's id, or its number from 0.

        Repeating is harmless; another value for the same raises Conflict.
        """
        body = {"reward": reward, "name": name, "turn": None if turn is None else str(turn)}
        return await self._ask("POST", f"/sessions/{session_id}/reward", SessionState, _without_none(body))

    async def complete(
        self, session_id: str, *, reward: float | None = None, metrics: Mapping[str, float] | None = None
    ) -> SessionState:
        """Ends a session: it gets no new model calls, and running ones finish. Idempotent."""
        body = {"reward": reward, "metrics": metrics}
        return await self._ask("POST", f"/sessions/{session_id}/complete", SessionState, _without_none(body))

    async def wait(self, session_id: str, timeout_s: float = 30.0) -> SessionState:
        """Returns the state of a session once it is no longer open, or after the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            path = f"/sessions/{session_id}/wait?timeout_s={min(left, WAIT_S):.3f}"
            state = await self._ask("GET", path, SessionState)
            if state.phase != "open" or left <= WAIT_S:
                return state

    async def delete(self, session_id: str) -> None:
        """Ends and removes a session, with its turns and images. Repeating is harmless."""
        with contextlib.suppress(NotFound):
            await self._ask("DELETE", f"/sessions/{session_id}", dict[str, Any])

    async def abort(self, session_id: str, reason: str) -> None:
        await self._ask("POST", f"/sessions/{session_id}/abort", SessionState, {"reason": reason})

    async def finalize(self, session_id: str) -> SessionRecord:
        return await self._ask("POST", f"/sessions/{session_id}/finalize", SessionRecord)

    async def submission(self, session_id: str) -> Submission | None:
        try:
            return await self._ask("GET", f"/sessions/{session_id}/submission", Submission)
        except Conflict:
            return None

    async def publish(self, policy: Policy, path: str) -> None:
        body = {"version": policy.version, "path": path}
        await self._ask("POST", "/policy", dict[str, int], body, timeout_s=LOADING_S)

    async def _ask(
        self,
        method: str,
        path: str,
        into: type[T],
        body: object = None,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        data = msgspec.json.encode(body) if body is not None else None
        deadline = time.monotonic() + self._unavailable_timeout_s
        limit = aiohttp.ClientTimeout(total=timeout_s)
        while True:
            try:
                async with self._http.request(method, self._url + path, data=data, timeout=limit) as response:
                    answer = await response.read()
                if response.status < 400:
                    return msgspec.json.decode(answer, type=into)
                error = _error(response.status, answer, self._url + path)
                if response.status < 500 or time.monotonic() > deadline:
                    raise error
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"the gateway at {self._url} does not answer: {error}") from error
            await asyncio.sleep(0.2)


def _without_none(body: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in body.items() if value is not None}


def _error(status: int, answer: bytes, url: str) -> Exception:
    try:
        error: dict[str, Any] = msgspec.json.decode(answer)["error"]
        message = f"{error['message']}; {error['hint']}" if error.get("hint") else error["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = answer[:200].decode(errors="replace")
    if status == 409:
        return Conflict(message)
    if status == 404:
        return NotFound(message)
    if status in (401, 403):
        return UsageError(f"the gateway refuses the admin key: {message}")
    kind = UsageError if status < 500 else Unavailable
    return kind(f"{url}: {status} {message}")
