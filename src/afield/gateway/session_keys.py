"""Session keys and header keys: signed API keys and their secret.

A session key is `afk-SESSION~SCOPES~NONCE~MAC`. It needs no table, survives a restart and ends with its
session. A header key is `afh-ID~HEADER~NONCE~MAC` (see `header_keys`). The secret is a file outside the
store, named by the store's id, so that a moved store keeps its keys and processes share them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from afield.errors import UsageError
from afield.utils.private_files import private_directory, write_once

PREFIX = "afk-"
HEADER_PREFIX = "afh-"
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,63})")
UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
SHOWN = 40
"""Characters of a header value that a derived session id shows."""
REMEMBERED = 8192
"""Sessions whose checked keys are cached."""


class KeyScope(StrEnum):
    """Permission of a key."""

    INFER = "infer"
    """Model calls."""
    REWARD = "reward"
    """Rewards."""
    OUTCOME = "outcome"
    """Report of the end of the work; a reward needs `reward` as well."""
    READ = "read"
    """State, submission, turns and trajectories of the session."""


class Grant(Struct, frozen=True):
    """Permissions of a checked key."""

    session_id: str
    """Session of the key; empty for a header key."""
    scopes: frozenset[KeyScope]
    """Permissions."""
    nonce: str
    """Nonce of the session; differs between sessions with the same id."""


def session_named_by(key: str) -> str | None:
    """Returns the session id in a key, without checking the key."""
    return key[len(PREFIX) :].partition("~")[0] or None if key.startswith(PREFIX) else None


class HeaderKeyParts(Struct, frozen=True):
    """Fields of a header key, without checking it."""

    id: str
    """Key id."""
    header: str
    """Header whose values name sessions."""
    nonce: str
    """Nonce of the key."""


def split_header_key(key: str) -> HeaderKeyParts | None:
    if not key.startswith(HEADER_PREFIX):
        return None
    parts = key[len(HEADER_PREFIX) :].split("~")
    return HeaderKeyParts(*parts[:3]) if len(parts) == 4 else None


def header_session_id(key_id: str, value: str) -> str:
    """Returns the session id for a header value: the value itself if it is a valid id, else a prefix and a
    digest.
    """
    if not PLAIN_VALUE.fullmatch(value):
        digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:20]
        value = f"{UNUSUAL.sub('_', value[:SHOWN])}-{digest}"
    return f"{key_id}.{value}"


class SessionKeys:
    """Issues and checks keys."""

    def __init__(self, secret: bytes, admin_key: str) -> None:
        self._secret = secret
        self._admin_key = admin_key
        self._known: dict[str, dict[str, Grant]] = {}  # checked keys by session id

    def issue(self, session_id: str, scopes: frozenset[KeyScope], nonce: str) -> str:
        body = f"{session_id}~{'.'.join(sorted(scopes))}~{nonce}"
        return f"{PREFIX}{body}~{self._mac(body)}"

    def check(self, key: str) -> Grant | None:
        """Returns the grant of a key; None if it is invalid."""
        session_id_in_key = session_named_by(key) or ""
        if (cached := self._known.get(session_id_in_key, {}).get(key)) is not None:
            return cached
        body, _, mac = key.removeprefix(PREFIX).rpartition("~")
        if not key.startswith(PREFIX) or not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            return None
        session_id, scopes, nonce = body.split("~")
        grant = Grant(session_id, frozenset(KeyScope(s) for s in scopes.split(".") if s), nonce)
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known.setdefault(session_id, {})[key] = grant
        return grant

    def issue_header_key(self, key_id: str, header: str, nonce: str) -> str:
        body = f"{key_id}~{header}~{nonce}"
        return f"{HEADER_PREFIX}{body}~{self._header_mac(body)}"

    def signed_header_key(self, key: str) -> bool:
        body, _, mac = key.removeprefix(HEADER_PREFIX).rpartition("~")
        return hmac.compare_digest(mac.encode(), self._header_mac(body).encode())

    def _header_mac(self, body: str) -> str:
        return self._mac(f"{HEADER_PREFIX}\n{body}")  # session keys contain no line break

    def forget(self, session_id: str) -> None:
        """Drops the cached keys of a session."""
        self._known.pop(session_id, None)

    def is_admin(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._admin_key.encode())

    def _mac(self, body: str) -> str:
        return hmac.new(self._secret, body.encode(), hashlib.sha256).hexdigest()[:40]


log = logging.getLogger(__name__)
SECRET_BYTES = 32


class SecretPlace(Struct, frozen=True, kw_only=True):
    """Location of the secret that signs session keys."""

    directory: Path | None = None
    """Directory with one file per store, named by the store's id; None for none."""
    file: Path | None = None
    """File to use instead of `directory`, for example if the home directory is not persistent; None for
    none."""

    def path(self, store_id: str) -> Path | None:
        """Returns the file; None keeps the secret in memory, and keys end with the process."""
        if self.file is not None:
            return self.file.expanduser().absolute()
        if self.directory is None:
            return None
        if not re.fullmatch(r"[0-9a-f]{32}", store_id):
            raise UsageError(f"the gateway's store has the id {store_id!r}; it must be 32 hexadecimal digits")
        return self.directory.expanduser().absolute() / f"{store_id}.key"


def signing_secret(place: SecretPlace, store_id: str, store: Path, *, sessions: bool) -> bytes:
    """Reads or creates the secret. `sessions` is whether the store has sessions, whose keys a new secret
    revokes.
    """
    path = place.path(store_id)
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    if path.is_relative_to(store.absolute()) or path.resolve().is_relative_to(store.resolve()):
        raise UsageError(
            f"the secret file {path} is inside the store {store}, which it protects; put it elsewhere"
        )
    try:
        if new := not path.exists():
            private_directory(path.parent, _names(path.parent))
        secret = write_once(path, secrets.token_bytes(SECRET_BYTES))
    except OSError as error:
        raise UsageError(
            f"the gateway's secret cannot be kept in {path}: {error}; see --secret-file"
        ) from error
    if len(secret) < SECRET_BYTES:
        raise UsageError(
            f"{path} holds {len(secret)} bytes; write at least {SECRET_BYTES} random bytes to it"
        )
    if new and sessions:
        log.warning(
            "keys: signing secret created, keys of earlier sessions are invalid store=%s path=%s",
            store,
            path,
        )
    return secret


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.key")] if directory.is_dir() else []
