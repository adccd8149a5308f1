"""Process runtime: reused worker processes, or one process per attempt.

1. A worker serves the agent with `afield.sdk.serve` and writes to a log file. It runs under a guard
(`afield.sdk.parent_watch`) that kills it and all its descendants when this process ends, even after SIGKILL.
2. A worker that dies fails its attempts, each with the tail of the log, and is replaced.
3. A thread cannot be killed, so stopping an attempt retires its worker: it gets no new attempts and is killed
when its other attempts have ended.

An attempt that delivers its outcome right before its worker dies is still reported dead. The caller must
prefer the stored outcome.
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
from afield.runtimes import invocations
from afield.runtimes.base import REMEMBERED, BaseRuntime, failed_exit, make_log_dir
from afield.runtimes.invocations import NO_ANSWER
from afield.sdk.signed_invocations import InvocationKey, fresh_key
from afield.types import Attempt, Reason
from afield.utils.backoff import Backoff
from afield.utils.log_tail import LogSlice, record_slice, tail
from afield.utils.process_tree import signal_group

TAIL_BYTES = 4_000
LOG_BYTES = 256_000


class WorkerCommand(Struct, frozen=True):
    """Command line and environment of a worker process."""

    argv: tuple[str, ...]
    """Command line, without the number of the file descriptor that receives the port; `start` appends it."""
    env: Mapping[str, str] | None
    """Environment of the worker; None inherits this process's environment."""
    timeout_s: float
    """Time limit from start until the worker serves, in seconds."""
    key: InvocationKey
    """Key that signs invocations; the worker receives it through a pipe."""


def worker_command(
    target: str,
    env: Mapping[str, str] | None,
    env_drop: Sequence[str],
    timeout_s: float,
    outcome_root: Path = Path("/"),
    python: str = "",
) -> WorkerCommand:
    """Build the command that serves `target`.

    `python` is the interpreter; empty is this process's. `env` None inherits this process's environment;
    `env_drop` lists variables to remove from it.
    """
    serve = (python or sys.executable, "-u", "-m", "afield.sdk.serve", target, "--watch-stdin")
    serve += ("--outcome-root", str(outcome_root), "--ready-fd")
    key = fresh_key()
    if env is not None:
        return WorkerCommand(serve, {k: v for k, v in env.items() if k not in env_drop}, timeout_s, key)
    dropping = [part for name in env_drop for part in ("-u", name)]
    return WorkerCommand(("env", *dropping, *serve), None, timeout_s, key)


def _pipe_with(data: bytes) -> int:
    """Return the read end of a pipe that holds `data`, which must fit into the pipe's kernel buffer."""
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return reading


class AgentWorker:
    """Worker process that serves an agent."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.sessions: set[str] = set()
        """Ids of the sessions that hold a slot."""
        self.accepted: set[str] = set()
        """Ids of the sessions whose payload the worker has accepted."""
        self.served = 0
        """Number of sessions accepted so far."""
        self.retired = False
        """Whether the worker gets no new sessions."""
        self.ready = False
        """Whether the worker serves requests."""
        self.start_error: InfrastructureFailure | None = None
        """Why the worker failed to start; None if it has not."""
        self._killed = False
        self._reaped = False
        self.log = log
        self._process: Process | None = None
        self._url = ""
        self._key: InvocationKey | None = None

    async def start(self, command: WorkerCommand) -> None:
        """Start the process and wait until it reports its port.

        Raises InfrastructureFailure with the tail of the log if it fails or times out.
        """
        ready: IO[bytes] | None = None
        writing = key_fd = -1
        self._key = command.key
        try:
            reading, writing = os.pipe()
            ready = os.fdopen(reading, "rb", 0)
            key_fd = _pipe_with(command.key.value)
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
            if self._killed:
                self.kill()
            port = await self._read_port(ready, command.timeout_s)
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

    async def _read_port(self, ready: IO[bytes], timeout_s: float) -> int:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), ready
        )
        try:
            async with asyncio.timeout(timeout_s):
                line = await reader.readline()
                if line.endswith(b"\n"):
                    return int(line)
                why = f"ended before it was ready ({await self.wait()})"
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
        """Base URL; empty until the worker is ready."""
        return self._url

    async def wait(self) -> str:
        """Wait until the process has ended; returns its exit code or signal in words."""
        if self._process is None:
            return "never started"
        code = await self._process.wait()
        # The guard kills the agent's descendants on exit. If the guard itself was killed, its process group
        # may survive.
        if not self._reaped:
            signal_group(self._process.pid, signal.SIGKILL)
        self._reaped = True
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size == 0:
                self.log.unlink()
        return f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"

    async def wait_within(self, seconds: float) -> str | None:
        """Wait up to `seconds`; returns None if the process is still running."""
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            return None

    def kill(self) -> None:
        """Kill the process and all its descendants; a process that is about to start is killed at once.

        Repeating is harmless.
        """
        self.ready, self._killed = False, True
        if self._process is not None and not self._reaped:
            if self._process.stdin is not None:
                self._process.stdin.close()
            # Continue the guard: an agent can have stopped its whole process group.
            signal_group(self._process.pid, signal.SIGCONT)

    def tail(self) -> str:
        return tail(self.log, TAIL_BYTES) or "(empty)"

    @property
    def log_size(self) -> int:
        """Log size in bytes."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    async def post(self, http: aiohttp.ClientSession, attempt: Attempt, payload: dict[str, Any]) -> None:
        try:
            await invocations.post(http, self._url, attempt, payload, self._key)
        except RateLimited as error:
            # This runtime counts the worker's slots itself, so a full worker is an infrastructure failure.
            raise InfrastructureFailure(str(error), Reason.LAUNCH) from error

    async def active_sessions(self, http: aiohttp.ClientSession) -> set[str]:
        return set((await invocations.ping(http, self._url)).active or ())


# Below the 30 s after which a worker closes an idle connection.
KEEPALIVE_S = 10.0
REAP_S = 10.0
# Time to notice that a worker died after its connection broke, in seconds.
EXIT_NOTICE_S = 1.0
BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
T = TypeVar("T")


class ProcessRuntime(BaseRuntime):
    """Runs agents in processes of this machine.

    `target` is a target of `afield.sdk.serve`: `path/to/file.py:name` or `package.module:name`. `concurrency`
    limits the attempts per worker or, with `fresh`, the number of processes; None means no limit. `python` is
    the interpreter of the agent's environment; empty is this process's. `env` None inherits this process's
    environment. Workers accept only requests signed by this runtime, and write
    `file:` outcomes only below `outcome_root`.
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
        python: str = "",
        poll_s: float = 0.1,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers {workers} must be at least 1")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency {concurrency} must be at least 1, or None for no bound")
        super().__init__()
        self._target = target
        self._command = worker_command(target, env, env_drop, start_timeout_s, outcome_root, python)
        self._log_dir = log_dir
        self._size = 0 if fresh else workers
        self._fresh = fresh
        self._concurrency = concurrency
        self._poll_s = poll_s
        self._workers: dict[AgentWorker, asyncio.Task[None]] = {}
        self._worker_of: dict[str, AgentWorker] = {}
        self._logs: dict[str, tuple[Path, int]] = {}
        self._started = 0
        self._failed_starts = 0
        self._backoff = Backoff(BACKOFF_S, MAX_BACKOFF_S)
        self._start_error: InfrastructureFailure | None = None
        self._retry_at = 0.0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        make_log_dir(self._log_dir)
        self._http = await invocations.http_session(KEEPALIVE_S).__aenter__()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        self._start_missing()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        try:
            for task in (*self._attempts.launches.values(), *self._workers.values()):
                task.cancel()
            await self._group.__aexit__(None, None, None)
        finally:
            for worker in self._workers:
                worker.kill()
            for session_id, worker in self._worker_of.items():
                self._record_log(worker, session_id)
            self._attempts.cancel_all()
            await self._http.close()

    @property
    def workers(self) -> tuple[AgentWorker, ...]:
        return tuple(self._workers)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="process")

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        """Wait until all workers, or one test process if `fresh`, are ready.

        Raises UsageError with the reason if one fails to start.
        """
        started = [w for w in self._workers if not w.retired] or [self._spawn(f"check-{os.getpid()}")]
        while not all(worker.ready or worker.start_error for worker in started):
            await self._changed.wait()
        for worker in started:
            if worker.start_error is not None:
                raise UsageError(f"{self._target} cannot be started: {worker.start_error}")
            if self._fresh:
                worker.retired = True
                worker.kill()

    async def adopt(self, attempt: Attempt) -> bool | None:
        """True only for attempts launched by this process: workers end with it."""
        return self._attempts.is_running(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        if worker := self._worker_of.get(session_id):
            worker.retired = True
            self._release(worker, session_id)
            self._start_missing()
        self._notify()

    async def status(self, attempt: Attempt) -> SessionStatus:
        return self._status(attempt.session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._status(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        """Log from the attempt's start; concurrent attempts of the same worker share a log."""
        log, start = self._logs.get(attempt.session_id, (self._log_dir / f"{attempt.session_id}.log", 0))
        return await asyncio.to_thread(tail, log, LOG_BYTES, start)

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        try:
            worker = await (self._new_worker(session_id) if self._fresh else self._warm_worker(session_id))
            await self._post(worker, attempt, payload)
        except RolloutFailure as failure:
            self._attempts.record_failed_launch(session_id, failure)
            if worker := self._worker_of.get(session_id):
                self._release(worker, session_id)
            raise
        worker.accepted.add(session_id)
        worker.served += 1
        self._failed_starts = 0
        self._backoff.reset()

    async def _warm_worker(self, session_id: str) -> AgentWorker:
        """Wait for a free slot and assign it in the least loaded worker."""
        missed = self._start_error
        if self._failed_starts == 0 or asyncio.get_running_loop().time() >= self._retry_at:
            self._start_missing()
        while True:
            self._attempts.check_not_stopped(session_id)
            able = [w for w in self._workers if w.ready and not w.retired and self._has_capacity(w)]
            if able:
                return self._assign(min(able, key=lambda w: len(w.sessions)), session_id)
            if not any(not w.retired for w in self._workers):
                if self._start_error is not None and self._start_error is not missed:
                    raise _copy(self._start_error)
                self._start_missing()
            await self._changed.wait()

    async def _new_worker(self, session_id: str) -> AgentWorker:
        """Start a process for this attempt and wait until it is ready."""
        while self._concurrency is not None and len(self._workers) >= self._concurrency:
            await self._changed.wait()
            self._attempts.check_not_stopped(session_id)
        worker = self._assign(self._spawn(session_id), session_id)
        while not worker.ready:
            self._attempts.check_not_stopped(session_id)
            if worker.start_error is not None:
                raise _copy(worker.start_error)
            await self._changed.wait()
        return worker

    def _has_capacity(self, worker: AgentWorker) -> bool:
        return self._concurrency is None or len(worker.sessions) < self._concurrency

    def _assign(self, worker: AgentWorker, session_id: str) -> AgentWorker:
        worker.sessions.add(session_id)
        self._worker_of[session_id] = worker
        self._logs[session_id] = (worker.log, worker.log_size)
        if len(self._logs) > REMEMBERED:
            del self._logs[next(iter(self._logs))]
        return worker

    def _status(self, session_id: str) -> SessionStatus:
        worker = self._worker_of.get(session_id)
        starting = worker is None or session_id not in worker.accepted
        if worker is None or not worker.pid:
            return self._attempts.status(session_id, starting=starting)
        where, log = f"pid {worker.pid} ({worker.log.name})", worker.log.name
        return self._attempts.status(session_id, where, pid=worker.pid, log=log, starting=starting)

    def _release(self, worker: AgentWorker, session_id: str) -> None:
        self._worker_of.pop(session_id, None)
        self._record_log(worker, session_id)
        worker.sessions.discard(session_id)
        worker.accepted.discard(session_id)
        if not worker.sessions and (self._fresh or worker.retired):
            worker.kill()
        self._notify()

    def _record_log(self, worker: AgentWorker, session_id: str) -> None:
        """Record which part of a shared log was written during the session."""
        log, start = self._logs.get(session_id, (worker.log, 0))
        if not self._fresh and log == worker.log:
            record_slice(self._log_dir, LogSlice(session_id, log.name, start, worker.log_size))

    async def _post(self, worker: AgentWorker, attempt: Attempt, payload: dict[str, Any]) -> None:
        """Post with one retry if the connection breaks; posting is idempotent."""
        for last in (False, True):
            try:
                await worker.post(self._http, attempt, payload)
                return
            except TimeoutError as error:
                # It is unknown whether the worker accepted the payload: give it no further attempts.
                worker.retired = True
                raise _rejected(worker, attempt, "it did not answer in time", Reason.LAUNCH) from error
            except (aiohttp.ClientError, OSError) as error:
                if (ended := await worker.wait_within(EXIT_NOTICE_S)) is not None:
                    raise _rejected(worker, attempt, f"it died with {ended}", Reason.DIED) from error
                if last:
                    raise _rejected(worker, attempt, str(error), Reason.LAUNCH) from error

    # --- workers ---------------------------------------------------------------------------------

    def _start_missing(self) -> None:
        """Start workers up to the configured number."""
        serving = sum(not worker.retired for worker in self._workers)
        for _ in range(self._size - serving if self._open else 0):
            self._started += 1
            # The process id separates the logs of a resumed run from those of earlier processes.
            self._spawn(f"worker-{os.getpid()}-{self._started}")

    def _spawn(self, name: str) -> AgentWorker:
        worker = AgentWorker(f"{name} of {self._target}", self._log_dir / f"{name}.log")
        self._workers[worker] = self._task(self._run_worker(worker))
        return worker

    async def _run_worker(self, worker: AgentWorker) -> None:
        """Run one worker from its start until its process has been reaped."""
        polling: asyncio.Task[None] | None = None
        try:
            await worker.start(self._command)
            self._notify()
            polling = self._task(self._poll(worker))
            ended = await worker.wait()
            self._fail_sessions(worker, ended)
        except InfrastructureFailure as problem:
            self._record_failed_start(worker, problem)
        finally:
            if polling is not None:
                polling.cancel()
            worker.kill()
            self._workers.pop(worker, None)
            self._notify()
            await worker.wait_within(REAP_S)
        # The next launch replaces a worker that never served: a target that always dies must not restart in a
        # loop.
        if worker.served:
            self._start_missing()

    def _record_failed_start(self, worker: AgentWorker, problem: InfrastructureFailure) -> None:
        """Store why a worker failed to start; consecutive failures back off exponentially."""
        self._start_error = worker.start_error = problem
        self._failed_starts += 1
        self._retry_at = asyncio.get_running_loop().time() + self._backoff.advance()

    def _fail_sessions(self, worker: AgentWorker, ended: str) -> None:
        tail = worker.tail()
        if not worker.served and not worker.retired:
            message = f"{worker.name} died with {ended} before it served; its log ends: {tail}"
            self._record_failed_start(worker, InfrastructureFailure(message, Reason.LAUNCH))
        for session_id in list(worker.sessions):
            message = f"{worker.name} (pid {worker.pid}) died with {ended} while {session_id} ran"
            self._attempts.record_exit(
                session_id, failed_exit(f"{message}; its log ends: {tail}", Reason.DIED, tail)
            )
            self._release(worker, session_id)

    async def _poll(self, worker: AgentWorker) -> None:
        """Detect ended attempts with one `/ping` for all attempts of a worker."""
        while True:
            await asyncio.sleep(self._poll_s)
            expected = set(worker.accepted)
            if not expected:
                continue
            try:
                active = await worker.active_sessions(self._http)
            except NO_ANSWER:
                # `_run_worker` handles a dead worker; a busy worker gets the next ping.
                continue
            for session_id in expected - active:
                self._attempts.record_exit(session_id, Exit())
                self._release(worker, session_id)

    # --- helpers ---------------------------------------------------------------------------------

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._group.create_task(work)

    def _notify(self) -> None:
        """Wake all tasks that wait for a change of workers or slots."""
        news, self._changed = self._changed, asyncio.Event()
        news.set()


def _rejected(worker: AgentWorker, attempt: Attempt, why: str, reason: Reason) -> InfrastructureFailure:
    message = f"{worker.name} did not take {attempt.session_id}: {why}; its log ends: {worker.tail()}"
    return InfrastructureFailure(message, reason)


def _copy(failure: InfrastructureFailure) -> InfrastructureFailure:
    """New exception with the same content: raising one instance repeatedly would accumulate tracebacks."""
    return InfrastructureFailure(str(failure), failure.reason)
