"""Agents in processes of this machine: warm ones that serve many attempts, or a fresh one for each.

A worker that dies takes its attempts with it, each told at once with the tail of the log, and is
replaced. Stopping an attempt retires its worker, since a thread cannot be killed: it takes nothing
new and is killed when its other attempts have ended. Nothing outlives the runtime, not even after
SIGKILL. An attempt that had just delivered when its worker died is reported dead all the same: the
store knows better.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import aiohttp
from msgspec import Struct

from afield.errors import InfrastructureFailure, RateLimited, RolloutFailure, UsageError
from afield.interfaces.runtime import Capabilities, Exit, SessionStatus
from afield.log_tail import Slice, note, tail
from afield.process_tree import signal_group
from afield.runtimes import invocations
from afield.runtimes.attempt_table import REMEMBERED, Attempts, broken
from afield.runtimes.invocations import SILENT
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
        if not self._buried:
            signal_group(self._process.pid, signal.SIGKILL)
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
            signal_group(self._process.pid, signal.SIGCONT)

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


# Below the 30 s after which a worker closes an idle connection.
KEEPALIVE_S = 10.0
REAP_S = 10.0
# How long after its connection broke a dead process is noticed at the latest.
NOTICE_S = 1.0
MISS_S = 0.5
LONGEST_MISS_S = 30.0
T = TypeVar("T")


class ProcessRuntime:
    """`target` is what `afield.sdk.serve` takes: `path/to/file.py:name` or `package.module:name`.

    `concurrency` bounds the attempts of one warm worker, or the fresh processes at one time.
    `env` None hands on this process's environment. Workers take what this runtime signed, and write `file:`
    outcomes below `outcome_root` alone.
    """

    def __init__(
        self,
        target: str,
        *,
        log_dir: Path,
        workers: int = 2,
        fresh: bool = False,
        start_timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        env_drop: Sequence[str] = ("AFIELD_ADMIN_KEY",),
        concurrency: int | None = None,
        outcome_root: Path = Path("/"),
        poll_s: float = 0.1,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers {workers} must be at least 1")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency {concurrency} must be at least 1, or None for no bound")
        self._target = target
        self._command = command_for(target, env, env_drop, start_timeout_s, outcome_root)
        self._log_dir = log_dir
        self._size = 0 if fresh else workers
        self._fresh = fresh
        self._concurrency = concurrency
        self._poll_s = poll_s
        self._attempts = Attempts()
        self._workers: dict[Worker, asyncio.Task[None]] = {}
        self._where: dict[str, Worker] = {}
        self._logs: dict[str, tuple[Path, int]] = {}
        self._launches: dict[str, asyncio.Task[RolloutFailure | None]] = {}
        self._started = 0
        self._misses = 0
        self._problem: InfrastructureFailure | None = None
        self._retry_at = 0.0
        self._news = asyncio.Event()
        self._open = False

    async def __aenter__(self) -> Self:
        try:
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"no logs can be kept in {self._log_dir}: {error}; choose another") from error
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._http = await aiohttp.ClientSession(connector=connector).__aenter__()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        self._top_up()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            for task in (*self._launches.values(), *self._workers.values()):
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            for worker in self._workers:
                worker.kill()
            for session_id, worker in self._where.items():
                self._note(worker, session_id)
            for session_id in self._attempts:
                message = f"{session_id}: the runtime was closed"
                self._attempts.settle(session_id, broken(message, Reason.CANCELLED))
            await self._http.close()

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="process")

    # --- the verbs -------------------------------------------------------------------------------

    async def check(self) -> None:
        """Until the warm workers are up, or a probe was; what stops them is in the error."""
        started = [w for w in self._workers if not w.retired] or [self._spawn(f"check-{os.getpid()}")]
        while not all(worker.ready or worker.problem for worker in started):
            await self._news.wait()
        for worker in started:
            if worker.problem is not None:
                raise UsageError(f"{self._target} cannot be started: {worker.problem}")
            if self._fresh:
                worker.retired = True
                worker.kill()

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        if not self._open:
            raise RuntimeError("launch is called inside 'async with runtime'")
        await self._attempts.once(
            attempt.session_id, self._launches, lambda: self._task(self._launch(attempt, payload))
        )

    async def adopt(self, attempt: Attempt) -> bool | None:
        """Workers end with the process that started them: only this one's own run here."""
        return self._attempts.running(attempt.session_id)

    async def wait(self, attempt: Attempt) -> Exit:
        return await self._attempts.exit(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.settle(session_id, broken(f"{session_id} was stopped", Reason.CANCELLED))
        if worker := self._where.get(session_id):
            worker.retired = True
            self._leave(worker, session_id)
            self._top_up()
        self._tell()

    async def status(self, attempt: Attempt) -> SessionStatus:
        return self._live(attempt.session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._live(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        """From the attempt's start; other attempts of the same warm worker print into the same log."""
        log, start = self._logs.get(attempt.session_id, (self._log_dir / f"{attempt.session_id}.log", 0))
        return await asyncio.to_thread(tail, log, LOG_BYTES, start)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> RolloutFailure | None:
        session_id = attempt.session_id
        try:
            worker = await (self._own(session_id) if self._fresh else self._share(session_id))
            await self._post(worker, attempt, payload)
        except RolloutFailure as failure:
            self._attempts.settle(session_id, Exit(failure.failure))
            if worker := self._where.get(session_id):
                self._leave(worker, session_id)
            return failure
        worker.accepted.add(session_id)
        worker.served += 1
        self._misses = 0
        return None

    async def _share(self, session_id: str) -> Worker:
        """A place in the least loaded warm worker."""
        missed = self._problem
        if self._misses == 0 or asyncio.get_running_loop().time() >= self._retry_at:
            self._top_up()
        while True:
            self._check_wanted(session_id)
            able = [w for w in self._workers if w.ready and not w.retired and self._has_room(w)]
            if able:
                return self._enter(min(able, key=lambda w: len(w.sessions)), session_id)
            if not any(not w.retired for w in self._workers):
                if self._problem is not None and self._problem is not missed:
                    raise _again(self._problem)
                self._top_up()
            await self._news.wait()

    async def _own(self, session_id: str) -> Worker:
        """A process for this attempt alone."""
        while self._concurrency is not None and len(self._workers) >= self._concurrency:
            await self._news.wait()
            self._check_wanted(session_id)
        worker = self._enter(self._spawn(session_id), session_id)
        while not worker.ready:
            self._check_wanted(session_id)
            if worker.problem is not None:
                raise _again(worker.problem)
            await self._news.wait()
        return worker

    def _check_wanted(self, session_id: str) -> None:
        if not self._attempts.running(session_id):
            raise InfrastructureFailure(f"{session_id} was stopped before it started", Reason.CANCELLED)

    def _has_room(self, worker: Worker) -> bool:
        return self._concurrency is None or len(worker.sessions) < self._concurrency

    def _enter(self, worker: Worker, session_id: str) -> Worker:
        worker.sessions.add(session_id)
        self._where[session_id] = worker
        self._logs[session_id] = (worker.log, worker.printed)
        if len(self._logs) > REMEMBERED:
            del self._logs[next(iter(self._logs))]
        return worker

    def _live(self, session_id: str) -> SessionStatus:
        worker = self._where.get(session_id)
        starting = worker is None or session_id not in worker.accepted
        return self._attempts.live(session_id, worker.where if worker else "", starting=starting)

    def _leave(self, worker: Worker, session_id: str) -> None:
        self._where.pop(session_id, None)
        self._note(worker, session_id)
        worker.sessions.discard(session_id)
        worker.accepted.discard(session_id)
        if not worker.sessions and (self._fresh or worker.retired):
            worker.kill()
        self._tell()

    def _note(self, worker: Worker, session_id: str) -> None:
        """Where to find what it printed, among what others of a warm worker did."""
        log, start = self._logs.get(session_id, (worker.log, 0))
        if not self._fresh and log == worker.log:
            note(self._log_dir, Slice(session_id, log.name, start, worker.printed))

    async def _post(self, worker: Worker, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Posting is idempotent, so a connection that broke under it is tried once more."""
        for last in (False, True):
            try:
                await worker.post(self._http, attempt, payload)
                return
            except TimeoutError as error:
                # It may have taken the payload or not: nothing more goes there.
                worker.retired = True
                raise _not_taken(worker, attempt, "it did not answer in time", Reason.LAUNCH) from error
            except (aiohttp.ClientError, OSError) as error:
                if (ended := await worker.ended_within(NOTICE_S)) is not None:
                    raise _not_taken(worker, attempt, f"it died with {ended}", Reason.DIED) from error
                if last:
                    raise _not_taken(worker, attempt, str(error), Reason.LAUNCH) from error

    # --- workers ---------------------------------------------------------------------------------

    def _top_up(self) -> None:
        """Start what is missing of the warm workers."""
        serving = sum(not worker.retired for worker in self._workers)
        for _ in range(self._size - serving if self._open else 0):
            self._started += 1
            # The process id keeps the logs of a run that is resumed apart.
            self._spawn(f"worker-{os.getpid()}-{self._started}")

    def _spawn(self, name: str) -> Worker:
        worker = Worker(f"{name} of {self._target}", self._log_dir / f"{name}.log")
        self._workers[worker] = self._task(self._life(worker))
        return worker

    async def _life(self, worker: Worker) -> None:
        """A worker's whole life, from its start until nothing of it is left."""
        polling: asyncio.Task[None] | None = None
        try:
            await worker.start(self._command)
            self._tell()
            polling = self._task(self._poll(worker))
            ended = await worker.ended()
            self._bury(worker, ended)
        except InfrastructureFailure as problem:
            self._miss(worker, problem)
        finally:
            if polling is not None:
                polling.cancel()
            worker.kill()
            self._workers.pop(worker, None)
            self._tell()
            await worker.ended_within(REAP_S)
        # One that never served is replaced by a later launch: a target that keeps dying must not spin.
        if worker.served:
            self._top_up()

    def _miss(self, worker: Worker, problem: InfrastructureFailure) -> None:
        """A process that was of no use. Each one in a row makes the next one wait longer."""
        self._problem = worker.problem = problem
        wait_s = min(MISS_S * 2**self._misses, LONGEST_MISS_S)
        self._retry_at = asyncio.get_running_loop().time() + wait_s
        self._misses += 1

    def _bury(self, worker: Worker, ended: str) -> None:
        tail = worker.tail()
        if not worker.served and not worker.retired:
            said = f"{worker.name} died with {ended} before it served; its log ends: {tail}"
            self._miss(worker, InfrastructureFailure(said, Reason.LAUNCH))
        for session_id in list(worker.sessions):
            said = f"{worker.name} (pid {worker.pid}) died with {ended} while {session_id} ran"
            self._attempts.settle(session_id, broken(f"{said}; its log ends: {tail}", Reason.DIED, tail))
            self._leave(worker, session_id)

    async def _poll(self, worker: Worker) -> None:
        """Learn which attempts have ended: one question for all of a worker's attempts."""
        while True:
            await asyncio.sleep(self._poll_s)
            expected = set(worker.accepted)
            if not expected:
                continue
            try:
                active = await worker.active(self._http)
            except SILENT:
                # A worker that is dead is buried by `_life`; one that is only busy is asked again.
                continue
            for session_id in expected - active:
                self._attempts.settle(session_id, Exit())
                self._leave(worker, session_id)

    # --- small things ----------------------------------------------------------------------------

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._group.create_task(work)

    def _tell(self) -> None:
        """Wake everyone who waits for a change of workers or places."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _not_taken(worker: Worker, attempt: Attempt, why: str, reason: Reason) -> InfrastructureFailure:
    said = f"{worker.name} did not take {attempt.session_id}: {why}; its log ends: {worker.tail()}"
    return InfrastructureFailure(said, reason)


def _again(failure: InfrastructureFailure) -> InfrastructureFailure:
    """A failure of its own for each caller: an exception collects a traceback wherever it is raised."""
    return InfrastructureFailure(str(failure), failure.reason)
