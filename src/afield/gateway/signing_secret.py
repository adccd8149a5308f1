"""The secret that signs session keys: a file of its own, outside the store and every agent's reach.

The store holds a random id, which is no secret, and names the file by it: a store that is moved keeps its
keys, and several processes of one gateway share them.
"""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path

from msgspec import Struct

from afield.errors import UsageError
from afield.private_files import private_directory, write_once

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
