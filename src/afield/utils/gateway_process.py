"""Gateway in a child process, on a listening socket that outlives it.

1. The child reads its settings from standard input and exits when that closes, also after SIGKILL of this
   process.
2. With a `listener`, connections wait in its backlog while one process ends and the next one starts.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from afield.errors import Unavailable, UsageError

TERM_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
LOG_LINES = 5
"""Last lines of the log that an error quotes."""


class GatewayProcess:
    """Gateway process. `command` reads one line of settings and prints one line of JSON when it serves.

    `environment` None inherits this process's. `start_timeout_s` limits the time until it serves. Its log is
    appended to the file `log`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        log: Path,
        *,
        start_timeout_s: float,
        listener: socket.socket | None = None,
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("call start first")
        return self._process

    async def start(self, settings: bytes) -> None:
        """Start the process; `ready` waits until it serves."""
        await asyncio.to_thread(self._log.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
        descriptors = () if self._listener is None else (self._listener.fileno(),)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *(f"--fd={descriptor}" for descriptor in descriptors),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=descriptors,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(settings + b"\n")

    async def ready(self) -> dict[str, str]:
        """Wait until the gateway serves; returns its addresses and admin key."""
        assert self._running.stdout is not None
        try:
            line = await asyncio.wait_for(self._running.stdout.readline(), self._start_timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                f"the gateway did not start within {self._start_timeout_s:g} s; see {self._log}, or raise"
                " engine_start_timeout_s"
            ) from error
        if not line:
            text = (await asyncio.to_thread(self._log.read_text, errors="replace")).strip()
            empty = f"{self._log} is empty; is there room on the disk?"
            last = (text or empty).splitlines()[-LOG_LINES:]
            raise UsageError("the gateway did not start:\n" + "\n".join(last))
        return json.loads(line)

    async def ended(self) -> str:
        """Wait until the process ends; returns its exit code and log in words."""
        code = await self._running.wait()
        return f"the gateway ended with code {code}; see {self._log}"

    async def stop(self, term_s: float = TERM_S) -> None:
        """End the process: SIGTERM, then SIGKILL after `term_s` seconds. Repeating is harmless."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), term_s)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
