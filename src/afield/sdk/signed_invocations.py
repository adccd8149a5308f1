"""Signed invocations: HMAC-SHA256 between the controller and agent servers.

1. The controller signs method, path, time and body with a shared key.
2. A worker that `ProcessRuntime` starts gets a fresh key through a pipe.
3. Servers started by hand (`python -m afield.sdk.serve`, `App.run`) and `--runtime served` use the user's
   key, a file with mode 0600 in the user's state directory, or a given file.
4. A server that listens on all addresses of a container accepts unsigned invocations unless it has a key,
   because container platforms (AgentCore, Kubernetes) do not sign.
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
from afield.utils.private_files import STATE, private_directory, read_private, state_directory, write_once

log = logging.getLogger(__name__)

HEADER = "X-Afield-Signature"
KEY_BYTES = 32
SKEW_S = 300.0
CONTAINER_FILES = (".dockerenv", "run/.containerenv")
CONTAINER_VARIABLES = ("DOCKER_CONTAINER", "KUBERNETES_SERVICE_HOST", "container")


class InvocationKey:
    """Signs and checks invocations."""

    def __init__(self, key: bytes, clock: Callable[[], float] = time.time) -> None:
        if len(key) < KEY_BYTES:
            raise UsageError(f"an invocation key must have at least {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._clock = clock

    @property
    def value(self) -> bytes:
        return self._key

    def sign(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        """The signature header of a request."""
        timestamp = str(int(self._clock()))
        return {HEADER: f"{timestamp}.{self._mac(timestamp, method, path, body)}"}

    def problem(self, signature: str, method: str, path: str, body: bytes = b"") -> str:
        """Why a signature is invalid; empty if it is valid."""
        timestamp, _, mac = signature.partition(".")
        if not signature:
            return f"it has no {HEADER} header"
        if not hmac.compare_digest(mac.encode(), self._mac(timestamp, method, path, body).encode()):
            return "its signature was made with another key, or for another request"
        if abs(self._clock() - int(timestamp)) > SKEW_S:
            return f"it was signed more than {SKEW_S:g} s ago, or by a clock that is wrong"
        return ""

    def _mac(self, timestamp: str, method: str, path: str, body: bytes) -> str:
        signed = f"{timestamp}\n{method}\n{path}\n".encode() + hashlib.sha256(body).digest()
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def fresh_key() -> InvocationKey:
    return InvocationKey(secrets.token_bytes(KEY_BYTES))


def key_from_descriptor(fd: int) -> InvocationKey:
    """The key from a pipe that the controller wrote to."""
    with os.fdopen(fd, "rb") as pipe:
        return InvocationKey(pipe.read())


def key_from_file(path: Path) -> InvocationKey:
    try:
        return InvocationKey(read_private(path))
    except OSError as error:
        raise UsageError(f"cannot read the invocation key {path}: {error}") from error


def user_key() -> InvocationKey:
    """The key of this user on this machine, created at first use."""
    path = state_directory() / "invocations.key"
    try:
        private_directory(path.parent, STATE)
        return InvocationKey(write_once(path, secrets.token_bytes(KEY_BYTES)))
    except OSError as error:
        raise UsageError(
            f"cannot store the invocation key {path}: {error}; give another with --key-file"
        ) from error


def in_container(root: Path = Path("/"), variables: Mapping[str, str] | None = None, pid: int = 0) -> bool:
    """Whether this process runs alone in a container: by marker files, variables, or because its pid is 1."""
    variables = os.environ if variables is None else variables  # noqa: TID251 - set by the platform
    marked = any((root / name).exists() for name in CONTAINER_FILES)
    return marked or any(variables.get(name) for name in CONTAINER_VARIABLES) or (pid or os.getpid()) == 1


def default_host(container: bool) -> str:
    """All addresses inside a container, otherwise loopback."""
    return "0.0.0.0" if container else "127.0.0.1"


def key_for(host: str, key_file: Path | None, *, unsigned: bool, container: bool) -> InvocationKey | None:
    """The key that a server at `host` requires; None if it accepts unsigned invocations."""
    if key_file is not None:
        return key_from_file(key_file)
    if unsigned or (container and not _loopback(host)):
        log.info("serve: unsigned invocations accepted on %s", host)
        return None
    return user_key()


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
