"""Signed invocations: an agent's server takes work from its own controller alone.

1. The controller signs method, path, time and body with a key that both sides have (HMAC-SHA256).
2. A worker that `ProcessRuntime` starts gets a fresh key through a pipe.
3. Servers that people start (`python -m afield.sdk.serve`, `App.run`) and `--runtime served` use the key of
   the user, a file with mode 0600 in the user's state directory, or the file that they are given.
4. A server that listens on all addresses of a container takes what reaches the container, unless it has a
   key: the platforms that run containers (AgentCore, Kubernetes) send invocations that nobody signs.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from afield.errors import UsageError
from afield.private_files import STATE, private_directory, read_private, state_directory, write_once

log = logging.getLogger("afield.sdk")

HEADER = "X-Afield-Signature"
KEY_BYTES = 32
SKEW_S = 300.0
CONTAINER_SIGNS = (".dockerenv", "run/.containerenv")
CONTAINER_VARIABLES = ("DOCKER_CONTAINER", "KUBERNETES_SERVICE_HOST", "container")


class InvocationKey:
    """Signs and checks invocations."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(key) < KEY_BYTES:
            raise UsageError(f"an invocation key has at least {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._clock = clock

    @property
    def value(self) -> bytes:
        return self._key

    def sign(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """The header to send."""
        at = str(int(self._clock()))
        return {HEADER: f"{at}.{self._mac(at, method, path, body)}"}

    def problem(self, signature: str, method: str, path: str, body: bytes = b"") -> str:
        """Why a request is not taken; empty if it is."""
        at, _, mac = signature.partition(".")
        if not signature:
            return f"it has no {HEADER} header"
        if not hmac.compare_digest(mac.encode(), self._mac(at, method, path, body).encode()):
            return "its signature was made with another key, or for another request"
        if abs(self._clock() - int(at)) > SKEW_S:
            return f"it was signed more than {SKEW_S:g} s ago, or by a clock that is wrong"
        return ""

    def _mac(self, at: str, method: str, path: str, body: bytes) -> str:
        signed = f"{at}\n{method}\n{path}\n".encode() + hashlib.sha256(body).digest()
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def fresh_key() -> InvocationKey:
    return InvocationKey(secrets.token_bytes(KEY_BYTES))


def key_from_descriptor(fd: int) -> InvocationKey:
    """Read from a pipe that a controller has filled."""
    with os.fdopen(fd, "rb") as pipe:
        return InvocationKey(pipe.read())


def key_from_file(path: Path) -> InvocationKey:
    try:
        return InvocationKey(read_private(path))
    except OSError as error:
        raise UsageError(f"the invocation key {path} cannot be read: {error}") from error


def user_key() -> InvocationKey:
    """The key of this user on this machine, made at first use."""
    path = state_directory() / "invocations.key"
    try:
        private_directory(path.parent, STATE)
        return InvocationKey(write_once(path, secrets.token_bytes(KEY_BYTES)))
    except OSError as error:
        raise UsageError(f"the invocation key {path} cannot be kept: {error}; name another file") from error


def in_container(root: Path = Path("/"), variables: Mapping[str, str] | None = None, pid: int = 0) -> bool:
    """Whether this process has a container to itself: by its marks, or because it is the first process."""
    variables = os.environ if variables is None else variables  # noqa: TID251 - what the platform says
    marked = any((root / name).exists() for name in CONTAINER_SIGNS)
    return marked or any(variables.get(name) for name in CONTAINER_VARIABLES) or (pid or os.getpid()) == 1


def default_host(container: bool) -> str:
    """Loopback, but for a container, whose own address is the way in."""
    return "0.0.0.0" if container else "127.0.0.1"


def key_for(host: str, key_file: Path | None, *, unsigned: bool, container: bool) -> InvocationKey | None:
    """The key that a server at `host` asks for; None where it takes unsigned invocations."""
    if key_file is not None:
        return key_from_file(key_file)
    if unsigned or (container and not _loopback(host)):
        log.info("invocations are taken without a signature: whoever reaches %s can start the agent", host)
        return None
    return user_key()


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
