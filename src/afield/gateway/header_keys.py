"""Header keys: API keys that open a session per header value.

For clients that send a session name in a header such as `X-Session-ID`, to one base URL with one key.

1. The definition of a key has the header, the spec of its sessions, the number of open sessions and the idle
   timeout.
2. The first request with a value opens the session `KEY_ID.VALUE`; later ones continue it.
3. Definitions are in the store, so that all processes of a gateway share them and they survive a restart.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from afield.errors import Conflict
from afield.gateway.api_error import ApiError, bad_request, conflict, unauthorized
from afield.gateway.http import Scope as HttpScope
from afield.gateway.http import header
from afield.gateway.session_keys import Grant, KeyScope, SessionKeys, header_session_id, split_header_key
from afield.gateway.sessions import Session, SessionManager, SessionPhase
from afield.gateway.store import GatewayStore
from afield.interfaces import SessionSpec

log = logging.getLogger(__name__)
KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,48}")
LONGEST_VALUE = 512
"""Maximum length of a header value, in characters."""
HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
RESERVED = frozenset({"authorization", "x-api-key", "x-goog-api-key", "content-type", "host"})
NOT_SHARED = ("id", "rollout_id", "attempt", "exp_id", "input_id", "draw")
RETRY_S = 5.0
"""Retry-After of a key with too many open sessions, in seconds."""


class HeaderKeySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Definition of a header key; the body of `POST /keys`."""

    id: str | None = None
    """Name of the key, and prefix of its session ids; generated if None."""
    header: str = "x-session-id"
    """Header whose values name sessions (default: x-session-id)."""
    session: SessionSpec = SessionSpec()
    """Spec of every session that the key opens; fields of a single attempt are not allowed."""
    max_open: int = 1024
    """Open sessions per key (default: 1024)."""
    idle_s: float | None = 3600.0
    """Idle time in seconds before a session is completed; None for never (default: 3600)."""

    def __post_init__(self) -> None:
        if self.id is not None and not KEY_ID.fullmatch(self.id):
            raise ValueError(f"key id {self.id[:80]!r} must be 1 to 48 characters of A-Z a-z 0-9 _ -")
        name = self.header.lower()
        if not HEADER_NAME.fullmatch(name) or name in RESERVED:
            raise ValueError(
                f"header {self.header[:80]!r} must be the name of a header, such as x-session-id"
            )
        structs.force_setattr(self, "header", name)
        if self.max_open < 1:
            raise ValueError(f"max_open {self.max_open} must be at least 1")
        if self.idle_s is not None and not self.idle_s > 0:
            raise ValueError(f"idle_s = {self.idle_s} must be positive, or null to never expire")
        for field in NOT_SHARED:
            if getattr(self.session, field) is not None:
                raise ValueError(
                    f"session.{field} is that of one session; a header key opens many: leave it out"
                )


class HeaderKeyCredentials(Struct, frozen=True, kw_only=True):
    """Key and base URLs for the clients of a header key."""

    id: str
    """Key id."""
    api_key: str
    """The key."""
    base_url: str
    """Base URL for Anthropic and Gemini clients."""
    openai_base_url: str
    """Base URL for OpenAI clients."""
    header: str
    """Header whose values name sessions."""


class HeaderKeyRow(Struct, frozen=True, kw_only=True):
    """A stored header key."""

    id: str
    """Key id."""
    spec: HeaderKeySpec
    """Definition."""
    nonce: str
    """Random; tokens of a deleted key with the same id are invalid."""
    created: float
    """Creation time, seconds since the epoch."""

    @property
    def opener(self) -> str:
        """`SessionRow.opened_by` of the sessions that this key opened."""
        return f"{self.id}~{self.nonce}"

    @property
    def grant(self) -> Grant:
        spec = self.spec.session
        scopes = {KeyScope(scope) for scope in spec.scope} | {KeyScope.OUTCOME}
        judged = {KeyScope.REWARD} if spec.reward_from == "verifier" else set[KeyScope]()
        return Grant("", frozenset(scopes - judged), self.nonce)


class HeaderKeys:
    """Header keys of a store. `owns` returns whether a session belongs to this process."""

    def __init__(
        self,
        store: GatewayStore,
        keys: SessionKeys,
        sessions: SessionManager,
        clock: Callable[[], float],
        owns: Callable[[str], bool],
    ) -> None:
        self._store = store
        self._keys = keys
        self._sessions = sessions
        self._clock = clock
        self._owns = owns
        self._known: dict[str, tuple[str, HeaderKeyRow]] = {}  # by key id
        self._opening: dict[str, set[str]] = {}  # by key id: sessions that are not in the store yet

    async def create(self, spec: HeaderKeySpec) -> tuple[HeaderKeyRow, bool]:
        """Returns the key and whether it is new. Raises Conflict if the id exists with another spec."""
        key_id = spec.id or f"k-{secrets.token_hex(8)}"
        spec = structs.replace(spec, id=key_id)
        existing = self._store.header_key(key_id, HeaderKeyRow)
        if existing is not None:
            if existing.spec != spec:
                raise Conflict(f"key {key_id} exists with another specification")
            return existing, False
        row = HeaderKeyRow(id=key_id, spec=spec, nonce=secrets.token_hex(8), created=self._clock())
        await self._store.put_header_key(key_id, row)
        return row, True

    def token(self, row: HeaderKeyRow) -> str:
        return self._keys.issue_header_key(row.id, row.spec.header, row.nonce)

    def list(self) -> list[HeaderKeyRow]:
        return self._store.header_keys(HeaderKeyRow)

    def check(self, token: str) -> HeaderKeyRow | None:
        """Returns the key of a token; None if it is invalid or deleted."""
        parts = split_header_key(token)
        if parts is None:
            return None
        if cached := self._known.get(parts.id):
            return cached[1] if hmac.compare_digest(cached[0].encode(), token.encode()) else None
        if not self._keys.signed_header_key(token):
            return None
        row = self._store.header_key(parts.id, HeaderKeyRow)
        if row is None or not hmac.compare_digest(row.nonce, parts.nonce):
            return None
        self._known[parts.id] = token, row
        return row

    async def session(self, row: HeaderKeyRow, path_session_id: str | None, scope: HttpScope) -> Session:
        """Returns the session of a request: by header value, or by path for one that this key opened."""
        value = header(scope, row.spec.header.encode())
        if not value:
            if path_session_id is None:
                raise bad_request(
                    f"this key needs the header {row.spec.header}, whose values name sessions; it is missing",
                    "send the same value with all requests of a rollout",
                )
            existing = self._sessions.find(path_session_id)
            if existing is None or existing.row.opened_by != row.opener:
                raise unauthorized()
            return existing
        if len(value) > LONGEST_VALUE:
            raise bad_request(
                f"the header {row.spec.header} has {len(value)} characters", f"send at most {LONGEST_VALUE}"
            )
        session_id = header_session_id(row.id, value)
        if path_session_id not in (None, session_id):
            raise bad_request(
                f"the path names {path_session_id!r}, the header {row.spec.header} names {session_id!r}",
                "leave one of them out",
            )
        existing = self._sessions.find(session_id)
        return self._own(row, existing) if existing else await self._open(row, session_id, value)

    def _own(self, row: HeaderKeyRow, session: Session) -> Session:
        if session.row.opened_by != row.opener:
            raise conflict(f"session {session.id} was not opened by this key", "choose another header value")
        return session

    async def _open(self, row: HeaderKeyRow, session_id: str, value: str) -> Session:
        opening = self._opening.setdefault(row.id, set())
        opened = self._store.count_open(row.id) + len(opening - {session_id})
        if opened >= row.spec.max_open:
            raise ApiError(
                429,
                "too_many_sessions",
                f"key {row.id} has {opened} open sessions, the maximum",
                "complete or finalize some, or create the key with a larger max_open",
                retry_after_s=RETRY_S,
            )
        metadata = {**row.spec.session.metadata, "header": {row.spec.header: value}}
        spec = structs.replace(row.spec.session, id=session_id, metadata=metadata)
        opening.add(session_id)
        try:
            session, _ = await self._sessions.open(spec, opened_by=row.opener)
        except Conflict as error:
            raise conflict(str(error), "choose another header value") from error
        finally:
            opening.discard(session_id)
        return session

    async def delete(self, key_id: str) -> int:
        """Deletes a key, completes its open sessions in this process, and returns their number."""
        await self._store.delete_header_key(key_id)
        self._known.pop(key_id, None)  # not earlier: a concurrent request would cache it again
        return await self._complete(key_id, f"{key_id}~", 0.0)

    async def close_idle(self) -> int:
        """Completes the sessions of this process whose idle timeout has passed, and returns their number."""
        bounded = [(row, row.spec.idle_s) for row in self.list()]
        return sum([await self._complete(row.id, row.opener, s) for row, s in bounded if s is not None])

    async def _complete(self, key_id: str, opener: str, idle_s: float) -> int:
        """Completes sessions with this `opened_by` prefix that are idle for at least `idle_s`."""
        completed = 0
        for session_id in filter(self._owns, self._store.open_ids(key_id)):
            session = self._sessions.find(session_id)
            if session is None or session.phase is not SessionPhase.OPEN:
                continue
            if session.row.opened_by.startswith(opener) and session.idle_s >= idle_s:
                await self._sessions.complete(session, {})
                completed += 1
        return completed


def public_fields(row: HeaderKeyRow) -> dict[str, Any]:
    """A key without its secret, as listed by `GET /keys`."""
    return {"id": row.id, "created": row.created, **structs.asdict(row.spec)}
