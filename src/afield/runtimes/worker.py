"""One process that serves an agent: started, pinged, posted to, and killed with all it started.

It is under a guard (see `afield.sdk.guard`) that holds a pipe to us as its stdin: when we die, however we
die, the pipe ends, and so does all that the agent started, daemons included. Its output goes to a log file,
whose tail explains its death.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp
from msgspec import Struct

from afield.errors import InfrastructureFailure, RateLimited
from afield.log_tail import tail
from afield.runtimes import invocations
from afield.sdk.signed_invocations import InvocationKey, fresh_key
from afield.types import Attempt, Reason

TAIL_BYTES = 4_000
LOG_BYTES = 256_000


class Command(Struct, frozen=True):
    """How a worker is started."""

    argv: tuple[str, ...]
    """Ends before the descriptor that is told the port."""
    env: Mapping[str, str] | None
    """None hands on our own."""
    timeout_s: float
    """How long it may take until it serves."""
    key: InvocationKey
    """What invocations are signed with; the worker gets it through a pipe."""


def command_for(
    target: str,
    env: Mapping[str, str] | None,
    env_drop: Sequence[str],
    timeout_s: float,
    outcome_root: Path = Path("/"),
) -> Command:
    """`env` None hands on our own environment; what `env_drop` names is left out either way."""
    serve = (sys.executable, "-u", "-m", "afield.sdk.serve", target, "--watch-stdin")
    serve += ("--outcome-root", str(outcome_root), "--ready-fd")
    key = fresh_key()
    if env is not None:
        return Command(serve, {k: v for k, v in env.items() if k not in env_drop}, timeout_s, key)
    dropping = [part for name in env_drop for part in ("-u", name)]
    return Command(("env", *dropping, *serve), None, timeout_s, key)


def _filled(data: bytes) -> int:
    """A pipe to read `data` from; it fits into the kernel's buffer."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


class Worker:
    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.sessions: set[str] = set()
        self.accepted: set[str] = set()
        self.served = 0
        self.retired = False
        self.ready = False
        self.problem: InfrastructureFailure | None = None
        self._condemned = False
        self._buried = False
        self.log = log
        self._process: Process | None = None
        self._url = ""
        self._key: InvocationKey | None = None

    async def start(self, command: Command) -> None:
        """Until `/ping` works. Raises InfrastructureFailure with what the process printed."""
        ready: IO[bytes] | None = None
        writing = key_fd = -1
        self._key = command.key
        try:
            reading, writing = os.pipe()
            ready = os.fdopen(reading, "rb", 0)
            key_fd = _filled(command.key.value)
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    str(writing),
                    "--key-fd",
                    str(key_fd),
                    stdin=PIPE,
                    stdout=output,
                    stderr=output,
                    env=command.env,
                    pass_fds=(writing, key_fd),
                    start_new_session=True,
                )
            os.close(writing)
            writing = -1
            if self._condemned:
                self.kill()
            port = await self._port(ready, command.timeout_s)
        except OSError as error:
            raise InfrastructureFailure(f"{self.name} cannot be started: {error}", Reason.LAUNCH) from error
        finally:
            for fd in (writing, key_fd):
                if fd >= 0:
                    os.close(fd)
            if ready is not None:
                ready.close()
        self._url = f"http://127.0.0.1:{port}"
        self.ready = True

    async def _port(self, ready: IO[bytes], timeout_s: float) -> int:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), ready
        )
        try:
            async with asyncio.timeout(timeout_s):
                line = await reader.readline()
                if line.endswith(b"\n"):
                    return int(line)
                why = f"ended before it was ready ({await self.ended()})"
        except TimeoutError:
            why = f"was not ready within {timeout_s:g} s"
        finally:
            transport.close()
        raise InfrastructureFailure(f"{self.name} {why}; its log ends: {self.tail()}", Reason.LAUNCH)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def url(self) -> str:
        """Where it serves; empty before that."""
        return self._url

    async def ended(self) -> str:
        """Until the process is gone; says how it went."""
        if self._process is None:
            return "never started"
        code = await self._process.wait()
        # It ended what the agent started; unless it was killed itself, when its group may outlive it.
        self._signal_group(signal.SIGKILL)
        self._buried = True
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size == 0:
                self.log.unlink()
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    async def ended_within(self, seconds: float) -> str | None:
        """How it went, or None while it lives."""
        try:
            async with asyncio.timeout(seconds):
                return await self.ended()
        except TimeoutError:
            return None

    def kill(self) -> None:
        """At once, or as soon as it has started, with all that the agent started. Repeating is harmless."""
        self.ready, self._condemned = False, True
        if self._process is not None and not self._buried:
            if self._process.stdin is not None:
                self._process.stdin.close()
            # The guard sees it even where an agent has stopped its whole group.
            self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        if self._process is not None and not self._buried:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def tail(self) -> str:
        return tail(self.log, TAIL_BYTES) or "(empty)"

    @property
    def printed(self) -> int:
        """Bytes so far."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    @property
    def where(self) -> str:
        """For an operator: the process, and where it prints."""
        return f"pid {self.pid} ({self.log.name})" if self.pid else ""

    async def post(self, http: aiohttp.ClientSession, attempt: Attempt, payload: dict[str, Any]) -> None:
        try:
            await invocations.post(http, self._url, attempt, payload, self._key)
        except RateLimited as error:
            # Its places are counted here: one that has no thread left is a place that broke.
            raise InfrastructureFailure(str(error), Reason.LAUNCH) from error

    async def active(self, http: aiohttp.ClientSession) -> set[str]:
        return set((await invocations.ping(http, self._url)).active or ())
