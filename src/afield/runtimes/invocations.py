"""HTTP client for agent servers: `POST /invocations`, `DELETE /invocations/ID`, `GET /ping`.

Each function sends one request without retries. Runtimes share this mapping of error statuses to failures.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from msgspec import Struct

from afield import wire
from afield.errors import InfrastructureFailure, RateLimited, RolloutFailure, TaskFailure, WireError
from afield.sdk.signed_invocations import InvocationKey
from afield.types import Attempt, Reason

REQUEST_S = 30.0
CONNECT_S = 5.0
MAX_ANSWER_BYTES = 1024 * 1024
ACCEPTED = "processing"  # status in a rollout app's answer to an invocation
SHOWN_CHARS = 200  # characters of an unexpected answer in error messages
# Statuses that blame the server or the credentials, not the payload.
WRONG_SERVER = frozenset({401, 403, 404, 405, 407, 408})
# Statuses of a server that accepts no more sessions at present.
BUSY = frozenset({429, 503})
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError)


class PingResponse(Struct, frozen=True):
    """Answer to `GET /ping`."""

    status: str
    """Health of the server: `Healthy` if idle, `HealthyBusy` while sessions run."""
    active: list[str] | None = None
    """Ids of running sessions; None if the server does not list sessions."""
    instance: str = ""
    """Id of the server process, which changes with each restart; empty if the server sends none."""


class _InvocationResponse(Struct, frozen=True):
    status: str = ""
    instance: str = ""


def http_session(keepalive_s: float) -> aiohttp.ClientSession:
    """Session without a limit of connections, which closes connections that are idle for `keepalive_s`."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s))


def encode_payload(session_id: str, payload: dict[str, Any]) -> bytes:
    """Encode a payload as JSON; raises TaskFailure if that is impossible."""
    try:
        return wire.encode(payload)
    except WireError as error:
        raise TaskFailure(f"the payload of {session_id} {error}", Reason.LAUNCH) from error


async def post(
    http: aiohttp.ClientSession,
    url: str,
    attempt: Attempt,
    payload: dict[str, Any],
    key: InvocationKey | None = None,
) -> str:
    """Send a payload, signed with `key`; returns the server's instance id, or "" if it sends none.

    Raises TaskFailure, InfrastructureFailure or RateLimited depending on the status, and aiohttp's error if
    there is no answer.
    """
    body = encode_payload(attempt.session_id, payload)
    headers = {
        "Content-Type": "application/json",
        "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": attempt.session_id,
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
    headers |= key.sign("POST", "/invocations", body) if key else {}
    async with http.post(f"{url}/invocations", data=body, headers=headers, timeout=timeout) as response:
        body_text = await _read_body(response)
        if response.status not in (200, 202):
            raise _error_of(attempt, response, body_text.decode("utf-8", "replace"))
    return _decode(body_text).instance


def check_accepted(session_id: str, answer: bytes, where: str) -> None:
    """Check that an answer comes from a rollout app; raises TaskFailure otherwise.

    For runtimes that have no other evidence that the server runs rollouts: any other server never delivers an
    outcome, and retries do not help.
    """
    if _decode(answer).status == ACCEPTED:
        return
    text = answer[:SHOWN_CHARS].decode("utf-8", "replace")
    raise TaskFailure(
        f"{session_id}: {where} is not a rollout app: it answered {text!r}, not one with"
        f' "status": "{ACCEPTED}"; give it an entrypoint (@app.rollout_entrypoint), or name another',
        Reason.NO_AGENT,
    )


def _decode(answer: bytes) -> _InvocationResponse:
    try:
        return msgspec.json.decode(answer, type=_InvocationResponse)
    except msgspec.MsgspecError:
        return _InvocationResponse()


async def ping(http: aiohttp.ClientSession, url: str, timeout_s: float = REQUEST_S) -> PingResponse:
    """Send `GET /ping`; raises one of NO_ANSWER if there is no readable answer."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
    async with http.get(f"{url}/ping", timeout=timeout) as response:
        response.raise_for_status()
        return msgspec.json.decode(await _read_body(response), type=PingResponse)


async def delete(
    http: aiohttp.ClientSession, url: str, attempt: Attempt, key: InvocationKey | None = None
) -> None:
    """Ask the server to stop a session; error statuses, e.g. of servers without this route, are ignored."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_S)
    headers = key.sign("DELETE", f"/invocations/{attempt.session_id}") if key else {}
    address = f"{url}/invocations/{quote(attempt.session_id)}"
    async with http.delete(address, headers=headers, timeout=timeout) as response:
        await response.read()


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read a response body up to MAX_ANSWER_BYTES: an agent's answer may be endless."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            response.close()
            break
    return body


def failure_of(attempt: Attempt, status: int, body: str) -> RolloutFailure:
    """Map an agent's error status to a failure.

    Most 4xx statuses are task failures; all others are infrastructure failures.
    """
    kind = TaskFailure if 400 <= status < 500 and status not in WRONG_SERVER | BUSY else InfrastructureFailure
    return kind(_message(attempt, status, body), Reason.LAUNCH)


def _error_of(attempt: Attempt, response: aiohttp.ClientResponse, body: str) -> RolloutFailure | RateLimited:
    if response.status in BUSY:
        return RateLimited(_message(attempt, response.status, body), _retry_after(response))
    return failure_of(attempt, response.status, body)


def _message(attempt: Attempt, status: int, body: str) -> str:
    return f"the agent refused the payload of {attempt.session_id} with {status}: {body[:2000]}"


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Retry-After in seconds; None if absent or given as a date."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return None
