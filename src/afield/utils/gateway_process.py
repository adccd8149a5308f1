"""Gateway in a child process, in a session of its own.

1. The child reads its settings from standard input and exits when that closes, also after SIGKILL of this
   process.
2. A `listener` outlives it: connections wait in its backlog while one process ends and the next one starts.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

from afield.errors import Unavailable, UsageError
from afield.utils.child_process import TERM_S, terminate

LOG_LINES = 5
"""Last lines of the log that an error quotes."""


class GatewayProcess:
    """Gateway process. `command` reads one line of settings and prints one line of JSON when it serves.

    `environment` None inherits this process's. `start_timeout_s` limits the time until it serves. Its log is
    appended to the file `log`; None makes it part of this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        log: Path | None,
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

    async def start(self, settings: bytes, pass_fds: Sequence[int] = ()) -> None:
        """Start the process, which inherits the descriptors `pass_fds`; `ready` waits until it serves."""
        descriptors = () if self._listener is None else (self._listener.fileno(),)
        with await asyncio.to_thread(_opened, self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *(f"--fd={descriptor}" for descriptor in descriptors),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(*descriptors, *pass_fds),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(settings + b"\n")

    async def ready(self) -> dict[str, str]:
        """Wait until the gateway serves; returns its addresses and admin key."""
        assert self._running.stdout is not None
        try:
            line = await asyncio.wait_for(self._running.stdout.readline(), self._start_timeout_s)
        except TimeoutError as error:
            late = f"{self._start_timeout_s:g}"
            if self._log is None:
                raise Unavailable(f"the gateway did not start within {late} s; see its log") from error
            raise Unavailable(
                f"the gateway did not start within {late} s; see {self._log}, or raise engine_start_timeout_s"
            ) from error
        if not line:
            raise UsageError(f"the gateway did not start:\n{await asyncio.to_thread(self._last_lines)}")
        return json.loads(line)

    def _last_lines(self) -> str:
        if self._log is None:
            return "its log says why"
        text = self._log.read_text(errors="replace").strip()
        empty = f"{self._log} is empty; is there room on the disk?"
        return "\n".join((text or empty).splitlines()[-LOG_LINES:])

    @property
    def returncode(self) -> int | None:
        """Exit code of the process; None while it runs."""
        return self._running.returncode

    async def wait(self) -> int:
        """Wait until the process ends; returns its exit code."""
        return await self._running.wait()

    async def ended(self) -> str:
        """Wait until the process ends; returns its exit code and log in words."""
        return f"the gateway ended with code {await self.wait()}; see {self._log or 'its log'}"

    async def stop(self, term_s: float = TERM_S) -> None:
        """End the process: SIGTERM, then SIGKILL after `term_s` seconds. Repeating is harmless."""
        if self._process is None:
            return
        await terminate(self._process, term_s)
        if self._process.stdin:
            self._process.stdin.close()


def _opened(log: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if log is None:
        return nullcontext()
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return log.open("ab")
