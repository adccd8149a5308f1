"""Session keys: capabilities that name their session and what they may do, signed by the gateway.

A key is `afk-SESSION~SCOPES~NONCE~MAC`. It needs no table, survives a restart (see
`signing_secret`), opens nothing but its own session, and ends with it. A header key (see `header_keys`) is
`afh-ID~HEADER~NONCE~MAC`: it says which header of a request names the session.
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
from afield.private_files import private_directory, write_once

PREFIX = "afk-"
HEADER_PREFIX = "afh-"
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{0,63})")
UNUSUAL = re.compile(r"[^A-Za-z0-9_-]")
SHOWN = 40  # characters of a header's value that are shown in an id which cannot hold all of it
REMEMBERED = 8192


class KeyScope(StrEnum):
    """`outcome` is the right to say that the work is done, without a word on its reward."""

    INFER = "infer"
    REWARD = "reward"
    OUTCOME = "outcome"
    READ = "read"


class Grant(Struct, frozen=True):
    """`nonce` is the session's own: another session of the same id has another one."""

    session_id: str
    scopes: frozenset[KeyScope]
    nonce: str


def session_named_by(key: str) -> str | None:
    """Which session a key is for, whether or not it is a good one."""
    return key[len(PREFIX) :].partition("~")[0] or None if key.startswith(PREFIX) else None


class HeaderKeyParts(Struct, frozen=True):
    """What a header key says of itself, whether or not it is a good one."""

    id: str
    header: str
    nonce: str


def split_header_key(key: str) -> HeaderKeyParts | None:
    if not key.startswith(HEADER_PREFIX):
        return None
    parts = key[len(HEADER_PREFIX) :].split("~")
    return HeaderKeyParts(*parts[:3]) if len(parts) == 4 else None


def header_session_id(key_id: str, value: str) -> str:
    """The session that a header's value names: the value itself where it can be an id, else what can be shown
    of it and a digest.
    """
    if not PLAIN_VALUE.fullmatch(value):
        digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:20]
        value = f"{UNUSUAL.sub('_', value[:SHOWN])}-{digest}"
    return f"{key_id}.{value}"


class SessionKeys:
    def __init__(self, secret: bytes, admin_key: str) -> None:
        self._secret = secret
        self._admin_key = admin_key
        self._known: dict[str, dict[str, Grant]] = {}  # keys that were good once are good for ever

    def issue(self, session_id: str, scopes: frozenset[KeyScope], nonce: str) -> str:
        body = f"{session_id}~{'.'.join(sorted(scopes))}~{nonce}"
        return f"{PREFIX}{body}~{self._mac(body)}"

    def check(self, key: str) -> Grant | None:
        """What a key opens; None for a key that is not ours."""
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
        return self._mac(f"{HEADER_PREFIX}\n{body}")  # no session's key has a line break

    def forget(self, session_id: str) -> None:
        """Its keys stay good; they are looked at anew."""
        self._known.pop(session_id, None)

    def is_admin(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._admin_key.encode())

    def _mac(self, body: str) -> str:
        return hmac.new(self._secret, body.encode(), hashlib.sha256).hexdigest()[:40]


log = logging.getLogger("afield.gateway")
SECRET_BYTES = 32


class SecretPlace(Struct, frozen=True, kw_only=True):
    """Where a gateway keeps the secret behind its session keys."""

    directory: Path | None = None
    """Directory with one file for each store, named by the store's id."""
    file: Path | None = None
    """File to use in place of `directory`, as where the user's home does not outlive the gateway."""

    def path(self, store_id: str) -> Path | None:
        """None without a place: the secret ends with the process, and all keys with it."""
        if self.file is not None:
            return self.file.expanduser().absolute()
        if self.directory is None:
            return None
        if not re.fullmatch(r"[0-9a-f]{32}", store_id):
            raise UsageError(f"the gateway's store has the id {store_id!r}; it must be 32 hexadecimal digits")
        return self.directory.expanduser().absolute() / f"{store_id}.key"


def signing_secret(place: SecretPlace, store_id: str, store: Path, *, sessions: bool) -> bytes:
    """Read the secret, or create it. `sessions`: whether the store has some, whose keys a new one ends."""
    path = place.path(store_id)
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    if path.is_relative_to(store.absolute()) or path.resolve().is_relative_to(store.resolve()):
        raise UsageError(
            f"the secret file {path} lies in the store {store}, which it protects: choose another place"
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
        raise UsageError(f"{path} holds {len(secret)} bytes; a secret has at least {SECRET_BYTES}")
    if new and sessions:
        log.warning(
            "the secret of %s is not in %s: a new one was made, and keys of earlier sessions open nothing",
            store,
            path,
        )
    return secret


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.key")] if directory.is_dir() else []
