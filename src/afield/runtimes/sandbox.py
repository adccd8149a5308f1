"""Sandbox runtime: one sandboxed process per attempt, forked from a fork server.

1. An agent reaches only the gateway and the addresses in `allow`, and sees its own code read-only.
2. Outcomes go to the gateway, because directories of this machine are not visible in the sandbox.
3. A sandbox ends with its rollout, including all processes that the agent started. No process outlives the
runtime, even after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from afield import wire
from afield.errors import (
    InfrastructureFailure,
    RateLimited,
    RolloutFailure,
    TaskFailure,
    UsageError,
    WireError,
)
from afield.interfaces.runtime import Capabilities, Exit, Limit, SessionStatus
from afield.local_sandbox import cgroups
from afield.local_sandbox.fork_server import ForkServer, new_socket_directory
from afield.local_sandbox.local_sandbox import address
from afield.local_sandbox.messages import Layer, ProcessExit, Program
from afield.local_sandbox.process import SandboxProcess
from afield.runtimes import invocations
from afield.runtimes.base import BaseRuntime, failed_exit, make_log_dir
from afield.settings.runtimes import SandboxOptions
from afield.types import Attempt, Reason, Task
from afield.utils.log_tail import tail
from afield.wire import Invocation

# Time to notice that a sandbox died after its connection broke, in seconds.
EXIT_NOTICE_S = 5.0
STOP_S = 10.0
LOG_BYTES = 256 * 1024
PORTS = {"http": 80, "https": 443}
T = TypeVar("T")


class LayerSource(Protocol):
    """Builds the environments of tasks as layers, all in one directory."""

    @property
    def layers(self) -> Path: ...

    async def layer(self, task: Task) -> Layer: ...

    async def close(self) -> None: ...


class SandboxRuntime(BaseRuntime):
    """Runs agents in sandboxes of this machine.

    `target` is a target of `afield.sdk.serve`: `path/to/file.py:name` or `package.module:name`. Each attempt
    logs to `log_dir/SESSION_ID.log`. The agent sees its file, the modules and packages next to it that it
    imports, and `options.mounts`; it never sees `log_dir`, the run directory or `hidden`. A task whose row
    has an `environment` runs in the layer that `environments` builds for it. `python` is the interpreter of
    the agent's environment; empty is this process's.
    """

    def __init__(
        self,
        target: str,
        options: SandboxOptions,
        *,
        log_dir: Path,
        hidden: Sequence[str] = (),
        environments: LayerSource | None = None,
        python: str = "",
        start_timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._target = target
        self._hidden = tuple(hidden)
        self._environments = environments
        self._python = python
        self._layers: dict[str, Layer] = {}
        self._options = options
        self._allow = tuple(address(text) for text in options.allow)
        self._log_dir = log_dir.absolute()
        self._timeout_s = start_timeout_s
        self._processes: dict[str, SandboxProcess] = {}
        self._opening: asyncio.Task[ForkServer | UsageError] | None = None

    @property
    def capabilities(self) -> Capabilities:
        limits = self._options.limits
        kinds = cgroups.find_groups().kinds
        enforced: dict[Limit, bool] = {
            "cpu": limits.cpus is not None and "cpu" in kinds,
            # Without control groups, RLIMIT_AS limits the address space of each process instead.
            "memory": limits.memory_mb is not None,
            # Without control groups, RLIMIT_NPROC applies, which the kernel ignores for root.
            "pids": limits.pids is not None and ("pids" in kinds or os.geteuid() != 0),
            "disk": limits.disk_mb is not None,
            "network": True,
        }
        named: list[Limit] = [kind for kind, is_so in enforced.items() if is_so]
        return Capabilities(isolation="sandbox", limits=frozenset(named), exec=True)

    async def __aenter__(self) -> Self:
        make_log_dir(self._log_dir)
        self._group = await asyncio.TaskGroup().__aenter__()
        self._open = True
        self._opening = self._task(self._start_server())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._open:
            return
        try:
            for task in self._attempts.launches.values():
                task.cancel()
            self._attempts.cancel_all()
            if self._environments is not None:
                await self._environments.close()
            if self._opening is not None:
                await self._close(self._opening)
            await self._group.__aexit__(None, None, None)
        finally:
            self._open, self._opening = False, None

    # --- runtime interface -----------------------------------------------------------------------

    async def check(self) -> None:
        """Wait until the fork server has imported the agent; raises UsageError if that fails."""
        server = await asyncio.shield(self._opening or self._current())
        if isinstance(server, UsageError):
            raise UsageError(str(server))

    async def prepare(self, task: Task) -> None:
        """Build the layer of a task whose row has an `environment`."""
        if (name := _environment(task.input)) is None:
            return
        if self._environments is None:
            message = f"there is no directory for the environment of task {task.id!r}; set XDG_CACHE_HOME"
            raise TaskFailure(f"{message} to one that can be written", Reason.LAUNCH)
        self._layers[name] = await self._environments.layer(task)

    async def adopt(self, attempt: Attempt) -> bool | None:
        """True only for attempts launched by this process: sandboxes end with it."""
        return self._attempts.is_running(attempt.session_id)

    async def stop(self, attempt: Attempt) -> None:
        session_id = attempt.session_id
        self._attempts.record_stop(session_id)
        if process := self._processes.get(session_id):
            process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.ended()

    async def status(self, attempt: Attempt) -> SessionStatus:
        return self._status(attempt.session_id)

    async def list(self) -> list[SessionStatus]:
        return [self._status(session_id) for session_id in self._attempts]

    async def logs(self, attempt: Attempt) -> str:
        return await asyncio.to_thread(tail, self._log_dir / f"{attempt.session_id}.log", LOG_BYTES)

    # --- fork server -----------------------------------------------------------------------------

    async def _start_server(self) -> ForkServer | UsageError:
        """Start the fork server. Returns errors instead of raising them: a later launch retries."""
        options = self._options
        try:
            target, hidden = resolve_target(self._target, self._log_dir)
            program = Program(
                target=target,
                python=self._python,
                env=options.env,
                mounts=options.mounts,
                hidden=(*hidden, *self._hidden),
                layers=str(self._environments.layers) if self._environments else "",
                once=True,
            )
            server = ForkServer(
                program,
                options.limits,
                directory=new_socket_directory(),
                log_dir=self._log_dir,
                start_timeout_s=self._timeout_s,
            )
            return await server.__aenter__()
        except (UsageError, OSError) as error:
            return UsageError(f"{self._target} cannot be started: {error}")

    def _current(self) -> asyncio.Task[ForkServer | UsageError]:
        """Task of the current fork server; starts a new one if the last one failed or died."""
        if self._opening is None:
            raise RuntimeError("a runtime is used inside 'async with'")
        if self._opening.done():
            server = self._opening.result()
            if isinstance(server, UsageError):
                self._opening = self._task(self._start_server())
            elif not server.alive:
                self._opening = self._task(self._reopen(server))
        return self._opening

    async def _reopen(self, server: ForkServer) -> ForkServer | UsageError:
        await server.__aexit__()
        return await self._start_server()

    async def _close(self, opening: asyncio.Task[ForkServer | UsageError]) -> None:
        if not opening.done():
            opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            if isinstance(server := await opening, ForkServer):
                await server.__aexit__()

    # --- launching -------------------------------------------------------------------------------

    async def _launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        session_id = attempt.session_id
        try:
            reachable = self._allowed_addresses(_invocation(attempt, payload))
            process = await self._start(session_id, reachable, self._layer(payload))
            await self._post(process, attempt, payload)
        except RolloutFailure as failure:
            self._attempts.record_failed_launch(session_id, failure)
            if process := self._processes.get(session_id):
                process.kill()
            raise

    def _allowed_addresses(self, invocation: Invocation) -> list[tuple[str, int]]:
        urls = [invocation.base_url]
        if invocation.outcome_url is not None:
            if invocation.outcome_url.startswith("file:"):
                message = f"the outcome of {invocation.session_id} goes to {invocation.outcome_url}"
                raise TaskFailure(
                    f'{message}, which no sandbox can reach; set deliver = "gateway"', Reason.LAUNCH
                )
            urls.append(invocation.outcome_url)
        elif not self._allow:
            message = f"the outcome of {invocation.session_id} goes to the bucket {invocation.s3_bucket}"
            raise TaskFailure(
                f'{message}, which the sandbox cannot reach; set deliver = "gateway", or allow its address',
                Reason.LAUNCH,
            )
        return [*map(_address_of, urls), *self._allow]

    def _layer(self, payload: dict[str, Any]) -> Layer | None:
        if (name := _environment(payload)) is None:
            return None
        if name not in self._layers:
            raise TaskFailure(f"the environment {name} of the task was not built", Reason.LAUNCH)
        return self._layers[name]

    async def _start(
        self, session_id: str, reachable: list[tuple[str, int]], layer: Layer | None
    ) -> SandboxProcess:
        server = await asyncio.shield(self._current())
        if isinstance(server, UsageError):
            raise InfrastructureFailure(str(server), Reason.LAUNCH)
        self._attempts.check_not_stopped(session_id)
        try:
            process = await server.start(session_id, allow=reachable, layer=layer)
        except UsageError as error:
            raise TaskFailure(str(error), Reason.LAUNCH) from error
        self._processes[session_id] = process
        self._task(self._watch(session_id, process))
        self._attempts.check_not_stopped(session_id)
        return process

    async def _post(self, process: SandboxProcess, attempt: Attempt, payload: dict[str, Any]) -> None:
        try:
            connector = aiohttp.UnixConnector(path=str(process.socket), force_close=True)
            async with aiohttp.ClientSession(connector=connector) as http:
                await invocations.post(http, "http://sandbox", attempt, payload)
        except RateLimited as error:
            raise InfrastructureFailure(str(error), Reason.LAUNCH) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"the sandbox of {attempt.session_id} did not take its payload"
            try:
                async with asyncio.timeout(EXIT_NOTICE_S):
                    ended = await process.ended()
            except TimeoutError:
                raise InfrastructureFailure(
                    f"{message}: {error!r}; {_tail(process)}", Reason.LAUNCH
                ) from error
            raise InfrastructureFailure(f"{message}: it died: {_describe(ended)}", Reason.DIED) from error

    async def _watch(self, session_id: str, process: SandboxProcess) -> None:
        ended = await process.ended()
        if ended.clean and not ended.oom:
            end = Exit(log=ended.log)
        else:
            message = f"the sandbox of {session_id} (pid {process.pid}) died: {_describe(ended)}"
            end = failed_exit(message, Reason.DIED, ended.log)
        # A failing launch records a more specific failure than this exit.
        if task := self._attempts.launches.get(session_id):
            await asyncio.wait([task])
        self._attempts.record_exit(session_id, end)
        self._processes.pop(session_id, None)

    # --- helpers ---------------------------------------------------------------------------------

    def _status(self, session_id: str) -> SessionStatus:
        process = self._processes.get(session_id)
        pid = process.pid if process else None
        return self._attempts.status(session_id, pid=pid, starting=process is None)

    def _task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._group.create_task(work)


def resolve_target(target: str, log_dir: Path) -> tuple[str, tuple[str, ...]]:
    """Return the target with an absolute path, and the paths to hide from the agent."""
    place, _, name = target.rpartition(":")
    logs = log_dir.resolve()
    hidden = [logs]
    for run in logs.parents:
        if (run / "run.json").is_file():
            # The run directory holds keys and outcomes; its parent holds other runs.
            hidden += [run, run.parent]
    if not place.endswith(".py"):
        return target, tuple(map(str, hidden))
    file = Path(place).resolve()
    if logs.is_relative_to(file.parent) and logs != file.parent:
        hidden.append(file.parent / logs.relative_to(file.parent).parts[0])
    return f"{file}:{name}", tuple(map(str, hidden))


def _environment(row: Mapping[str, Any]) -> str | None:
    """Name of the environment of a task row; None if the row has none."""
    environment = row.get("environment")
    is_one = isinstance(environment, dict) and {"workdir", "digest"} <= environment.keys()
    return json.dumps(environment, sort_keys=True) if is_one else None


def _invocation(attempt: Attempt, payload: dict[str, Any]) -> Invocation:
    try:
        return wire.read_payload(payload)
    except WireError as error:
        raise TaskFailure(
            f"the payload of {attempt.session_id} is not a rollout: {error}", Reason.LAUNCH
        ) from error


def _address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or PORTS[parts.scheme]


def _describe(ended: ProcessExit) -> str:
    return f"{ended}; its log ends: {ended.log or '(empty)'}"


def _tail(process: SandboxProcess) -> str:
    return f"its log is {process.log}"
