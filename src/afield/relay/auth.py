"""Relay credentials: link proofs and route tokens, signed with a cluster's secret.

1. A process that dials out proves that it has the cluster's secret by signing the relay's nonce, and the
   relay proves the same by signing the process's nonce. The secret itself is never sent.
2. A route token is part of an agent's URL. The relay checks it before it forwards anything. It opens a route
   to one session, not the session: the gateway still checks the session key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from afield.errors import UsageError
from afield.utils.private_files import read_private

SECRET_BYTES = 16
"""Minimum length of a cluster's secret, in bytes."""
NONCE_S = 30.0
"""Lifetime of a challenge, in seconds."""
EVERY_PATH = "all"
"""Scope of a token for every path, for engines and operators."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SCHEME = "Afield-Relay"
_AGENT_PATH = re.compile(
    r"/(?:(?:s|k|v1|v1beta)(?:/|$)|chat/completions$|completions$|responses(?:/|$)|messages(?:/|$)|models(?:/|$))"
)


def _mac(secret: bytes, *parts: str) -> str:
    return hmac.new(secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def read_secret(file: Path) -> bytes:
    """Read a cluster's secret; the file must be readable by its owner only."""
    try:
        secret = read_private(file).strip()
    except OSError as error:
        raise UsageError(f"the cluster's secret cannot be read from {file}: {error}") from error
    return check_secret(str(file), secret)


def check_secret(source: str, secret: bytes) -> bytes:
    if len(secret) < SECRET_BYTES:
        raise UsageError(
            f"{source} holds {len(secret)} bytes; a cluster's secret has at least {SECRET_BYTES}:"
            " write one with `openssl rand -hex 32`"
        )
    return secret


def check_name(kind: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(f"{kind} {name!r}: use at most 64 letters, digits, _ and -")
    return name


# --- route tokens --------------------------------------------------------------------------------


def session_scope(session_id: str) -> str:
    return f"s~{session_id}"


def header_key_scope(key_id: str) -> str:
    return f"k~{key_id}"


def route_token(secret: bytes, gateway: str, scope: str) -> str:
    """Sign a token that lets requests of one scope through to a gateway."""
    return f"{scope}~{_mac(secret, 'route', gateway, scope)[:32]}"


def route_prefix(secret: bytes, cluster: str, gateway: str, scope: str) -> str:
    """Path in front of a gateway's own paths, for one scope."""
    return f"/c/{cluster}/g/{gateway}/t/{route_token(secret, gateway, scope)}"


def admits(secret: bytes, gateway: str, token: str, path: str) -> bool:
    """Whether a token is genuine and covers a path of the gateway."""
    scope, _, mac = token.rpartition("~")
    if not hmac.compare_digest(mac.encode(), _mac(secret, "route", gateway, scope)[:32].encode()):
        return False
    if scope == EVERY_PATH:
        return True
    if not _AGENT_PATH.match(path) or {".", ".."} & set(path.split("/")):
        return False
    if scope.startswith("s~") and path.startswith("/s/"):
        return path[3:].partition("/")[0] == scope[2:]
    return True


# --- links ---------------------------------------------------------------------------------------


class LinkRequest(Struct, frozen=True, kw_only=True):
    """Identity of a process that dials out, with its proof."""

    gateway: str
    """Name of the gateway or engine in its cluster."""
    process: int = 0
    """Number of the process, from 0."""
    processes: int = 1
    """Number of processes of this gateway."""
    instance: str
    """Random id of the process; differs after a restart."""
    challenge: str
    """Nonce that the relay gave."""
    nonce: str
    """Nonce that the relay has to sign in turn."""
    proof: str = ""
    """Signature of all other fields."""

    def signed(self, cluster: str, secret: bytes) -> LinkRequest:
        return msgspec.structs.replace(self, proof=self._proof(cluster, secret))

    def is_genuine(self, cluster: str, secret: bytes) -> bool:
        return hmac.compare_digest(self.proof.encode(), self._proof(cluster, secret).encode())

    def relay_proof(self, cluster: str, secret: bytes) -> str:
        """Signature by which the relay proves that it has the secret."""
        return _mac(secret, "relay", cluster, self.nonce, self.instance)

    def to_header(self) -> str:
        return f"{SCHEME} {base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()}"

    @classmethod
    def from_header(cls, header: str) -> LinkRequest | None:
        """Decode an Authorization header; None if it is malformed."""
        scheme, _, text = header.partition(" ")
        try:
            request = msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            return None
        valid = 0 <= request.process < request.processes <= 1024 and NAME.fullmatch(request.gateway)
        return request if scheme == SCHEME and valid else None

    def _proof(self, cluster: str, secret: bytes) -> str:
        numbers = (str(self.process), str(self.processes))
        return _mac(
            secret, "link", cluster, self.gateway, *numbers, self.instance, self.challenge, self.nonce
        )


class Challenges:
    """Single-use nonces of one relay process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def issue(self) -> str:
        body = f"{int(self._clock())}.{secrets.token_hex(12)}"
        return f"{body}.{_mac(self._secret, body)[:32]}"

    def use(self, challenge: str) -> bool:
        """Accept a nonce of this relay that is recent and was not used before."""
        body, _, mac = challenge.rpartition(".")
        if not hmac.compare_digest(mac.encode(), _mac(self._secret, body)[:32].encode()):
            return False
        now = self._clock()
        if now - int(body.partition(".")[0]) > NONCE_S or challenge in self._used:
            return False
        self._used = {nonce: at for nonce, at in self._used.items() if now - at <= NONCE_S}
        self._used[challenge] = now
        return True
