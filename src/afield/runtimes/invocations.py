"""The client's side of the contract that agents are served on: `/invocations` and `/ping`.

One request each, no retries. What a refusal means is read here, so that all runtimes read it alike.
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
MOST_BYTES = 1024 * 1024
TAKEN = "processing"  # the status a rollout app answers an invocation with
SHOWN = 200  # characters of any other answer
# The place is wrong, not the payload.
MISPLACED = frozenset({401, 403, 404, 405, 407, 408})
# It takes no more for now.
BUSY = frozenset({429, 503})
SILENT = (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError)


class Said(Struct, frozen=True):
    """What a server said to `/ping`. `active` is None where it does not tell its sessions apart."""

    status: str
    active: list[str] | None = None
    instance: str = ""


class _Taken(Struct, frozen=True):
    status: str = ""
    instance: str = ""


async def post(
    http: aiohttp.ClientSession,
    url: str,
    attempt: Attempt,
    payload: dict[str, Any],
    key: InvocationKey | None = None,
) -> str:
    """Hand an attempt over, signed with `key`; answers with the instance that took it, if it says so.

    Raises what a refusal means, or what aiohttp raises where there was no answer.
    """
    headers = {
        "Content-Type": "application/json",
        "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id": attempt.session_id,
    }
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
    try:
        body = wire.encode(payload)
    except WireError as error:
        raise TaskFailure(f"the payload of {attempt.session_id} {error}", Reason.LAUNCH) from error
    headers |= key.sign("POST", "/invocations", body) if key else {}
    async with http.post(f"{url}/invocations", data=body, headers=headers, timeout=timeout) as response:
        said = await _heard(response)
        if response.status not in (200, 202):
            raise _refused(attempt, response, said.decode("utf-8", "replace"))
    return _taken(said).instance


def check_taken(session_id: str, answer: bytes, where: str) -> None:
    """Where nothing else tells that a place runs rollouts: whoever answers an invocation otherwise than a
    rollout app would deliver no outcome either. That is known at once, and another try would not help.
    """
    if _taken(answer).status == TAKEN:
        return
    shown = answer[:SHOWN].decode("utf-8", "replace")
    raise TaskFailure(
        f"{session_id}: {where} is no rollout app: it answered {shown!r}, not one with"
        f' "status": "{TAKEN}"; give it an entrypoint (@app.rollout_entrypoint), or name another',
        Reason.NO_AGENT,
    )


def _taken(answer: bytes) -> _Taken:
    try:
        return msgspec.json.decode(answer, type=_Taken)
    except msgspec.MsgspecError:
        return _Taken()


async def ping(http: aiohttp.ClientSession, url: str, timeout_s: float = REQUEST_S) -> Said:
    """Raises one of SILENT where there is no answer, or none that can be read."""
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S))
    async with http.get(f"{url}/ping", timeout=timeout) as response:
        response.raise_for_status()
        return msgspec.json.decode(await _heard(response), type=Said)


async def delete(
    http: aiohttp.ClientSession, url: str, attempt: Attempt, key: InvocationKey | None = None
) -> None:
    """Ask for a session's end. A server that cannot do that says so, which is no error."""
    timeout = aiohttp.ClientTimeout(total=CONNECT_S)
    headers = key.sign("DELETE", f"/invocations/{attempt.session_id}") if key else {}
    address = f"{url}/invocations/{quote(attempt.session_id)}"
    async with http.delete(address, headers=headers, timeout=timeout) as response:
        await response.read()


async def _heard(response: aiohttp.ClientResponse) -> bytes:
    """What an agent answers, which may be anything and without end."""
    said = b""
    async for piece in response.content.iter_any():
        said += piece
        if len(said) > MOST_BYTES:
            response.close()
            break
    return said


def refused(attempt: Attempt, status: int, said: str) -> RolloutFailure:
    """What it means that an agent answered a payload with this status."""
    kind = TaskFailure if 400 <= status < 500 and status not in MISPLACED | BUSY else InfrastructureFailure
    return kind(_words(attempt, status, said), Reason.LAUNCH)


def _refused(attempt: Attempt, response: aiohttp.ClientResponse, said: str) -> RolloutFailure | RateLimited:
    if response.status in BUSY:
        return RateLimited(_words(attempt, response.status, said), _retry_after(response))
    return refused(attempt, response.status, said)


def _words(attempt: Attempt, status: int, said: str) -> str:
    return f"the agent refused the payload of {attempt.session_id} with {status}: {said[:2000]}"


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """In seconds; the form that names a date is rare here and not read."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return None
