"""Processes of a chaos run: restarted after a kill, stopped with the benchmark.

Every process has a mark in its environment, which its children inherit, so that leftovers can be listed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

MARK = "CHAOS_MARK"
NOTES = "CHAOS_NOTES"
STEP_S = "CHAOS_STEP_S"
RESTART_S = 2.0
PR_SET_PDEATHSIG = 1
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
TAIL = 1500
MAX_CRASHES = 5  # crashes of a process before the run stops


class Kill(Struct, frozen=True, kw_only=True):
    """A SIGKILL of one process."""

    kind: str
    part: str
    at: float
    """Seconds since the epoch."""
    age_s: float
    """Seconds since the process started."""
    sampled: int
    """Size of the recording of engine calls at that time, in bytes."""
    notes: Path
    """File that the process wrote its progress to."""


class ManagedProcess:
    """One process at a time under one name; with `ends`, exit code 0 means done."""

    def __init__(
        self,
        kind: str,
        name: str,
        command: Sequence[object],
        *,
        directory: Path,
        environment: dict[str, str],
        rng: random.Random,
        ends: bool = False,
    ) -> None:
        self.kind, self.name = kind, name
        self.crashes: list[dict[str, Any]] = []
        self.starts = 0
        self.done = asyncio.Event()
        self.gave_up = asyncio.Event()
        self._command = [str(word) for word in command]
        self._directory, self._environment, self._rng, self._ends = directory, environment, rng, ends
        self._log = directory / "logs" / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._began = 0.0
        self._killed = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def notes(self) -> Path:
        """Progress file of the current process."""
        return self._directory / "notes" / f"{self.name}-{self.starts}.jsonl"

    async def keep(self) -> None:
        """Keep it running until it is done or this task is cancelled, then stop it."""
        try:
            while not self.done.is_set():
                await self._live()
                await asyncio.sleep(self._rng.uniform(0.0, RESTART_S))
        finally:
            await self._end()

    def kill(self, sampled: int) -> Kill | None:
        """Send SIGKILL; None if no process runs."""
        if self._process is None or self._process.returncode is not None or self._killed:
            return None
        self._killed = True
        self._process.send_signal(signal.SIGKILL)
        return Kill(
            kind=self.kind,
            part=self.name,
            at=time.time(),
            age_s=round(time.monotonic() - self._began, 2),
            sampled=sampled,
            notes=self.notes,
        )

    async def _live(self) -> None:
        self.starts += 1
        self._killed = False
        self._began = time.monotonic()
        environment = os.environ | self._environment | {NOTES: str(self.notes)}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._directory,
                preexec_fn=_die_with_parent,
            )
        code = await self._process.wait()
        if self._killed:
            return
        if code == 0 and self._ends:
            self.done.set()
            return
        text = self._log.read_text(errors="replace")[-TAIL:]
        self.crashes.append({"part": self.name, "code": code, "output": text})
        if len(self.crashes) >= MAX_CRASHES:
            self.gave_up.set()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def marked_processes(mark: str) -> dict[int, str]:
    """Command lines of the processes with this mark in their environment, by pid."""
    processes: dict[int, str] = {}
    word = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if word in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                processes[int(entry.name)] = line.strip()
        except OSError:
            continue
    return processes


def free_ports(n: int) -> list[int]:
    """Free ports outside the range of outgoing connections, so that they stay free during restarts."""
    first = int(OUTGOING.read_text().split()[0]) if OUTGOING.exists() else 32_768
    chosen: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(min(10_000, first // 2), first), 1000):
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                chosen.append(port)
            if len(chosen) == n:
                return chosen
    raise OSError(f"no {n} free ports below {first}")
