"""Endpoint gateway: sessions at any OpenAI-compatible endpoint, without records.

Agents call the endpoint itself, so nothing is captured: records are empty, and a deadline that passes counts
as an infrastructure failure, since nobody knows whether the model was still being called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import aiohttp

from afield.errors import Unavailable, UsageError
from afield.interfaces import SessionCredentials, SessionRecord, SessionSpec, SessionState
from afield.types import Policy
from afield.wire import Submission

CHECK_TIMEOUT_S = 20.0


class EndpointGateway:
    """Gateway interface over an endpoint that serves /v1/chat/completions or another OpenAI route."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key or "none"

    async def __aenter__(self) -> Self:
        """Check that the endpoint answers and accepts the key."""
        headers = {"authorization": f"Bearer {self._api_key}"}
        limit = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as http,
                http.get(f"{self._url}/v1/models", headers=headers) as response,
            ):
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"the endpoint {self._url}/v1 does not answer: {error}; check the address"
            ) from error
        if status in (401, 403):
            raise UsageError(
                f"the endpoint {self._url}/v1 refuses the key ({status}): set AFIELD_ENDPOINT_KEY"
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def open(self, spec: SessionSpec) -> SessionCredentials:
        return SessionCredentials(
            id=spec.id or "",
            api_key=self._api_key,
            base_url=self._url,
            openai_base_url=f"{self._url}/v1",
        )

    async def state(self, session_id: str) -> SessionState:
        raise Unavailable(
            f"the endpoint {self._url} does not report the state of sessions, such as {session_id}"
        )

    async def states(self, session_ids: Sequence[str]) -> dict[str, SessionState]:
        return {}

    async def version(self) -> int:
        return 0

    async def context(self) -> int | None:
        return None

    async def engine_dtype(self) -> str:
        return ""

    async def abort(self, session_id: str, reason: str) -> None:
        pass

    async def finalize(self, session_id: str) -> SessionRecord:
        return SessionRecord(trajectories=(), excluded=())

    async def submission(self, session_id: str) -> Submission | None:
        return None

    async def publish(self, policy: Policy, path: str) -> None:
        raise UsageError(
            f"cannot update the weights of the endpoint {self._url}; train with a gateway, and evaluate here"
        )
