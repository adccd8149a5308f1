"""Reference Harbor server: runs trials that clients submit and poll.

    python -m afield.harbor.server --port 8080 --directory state

It has the published protocol of Harbor agent-run servers and the additions that `ServerCapabilities` lists.
Tasks are kept by digest, runs by key; both survive a restart. Runs that a restart interrupts have failed with
InfrastructureFailure. Ended runs with their files, and tasks that nobody uses, are deleted after a day. Needs
the `harbor` package, as `trial` does, and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import io
import logging
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from msgspec import structs

from afield.datasets.harbor import HarborTask, digest_of, is_task, read_task
from afield.errors import UsageError
from afield.harbor.server_client import (
    CAPABILITIES,
    ENDED,
    RUNS,
    TASKS,
    RunRequest,
    RunResponse,
    ServerCapabilities,
)
from afield.harbor.trial import environment_config, run_trial
from afield.types import check_id
from afield.utils.durable_files import write_whole
from afield.utils.private_files import read_private

log = logging.getLogger(__name__)
MAX_ARCHIVE_BYTES = 2**30
KEEP_HOURS = 24.0
"""Hours for which ended runs, and tasks that nobody uses, are kept."""
DELETE_INTERVAL_S = 600.0
"""Seconds between two deletions of what is no longer kept."""
RunTrial = Callable[[HarborTask, RunRequest, Path], Awaitable[Mapping[str, Any]]]
"""Runs the trial of a request, with its files below a directory; returns Harbor's trial result as JSON."""


async def harbor_trial(task: HarborTask, request: RunRequest, folder: Path) -> Mapping[str, Any]:
    """Run a trial with the harbor package, the environment in a sandbox of this machine."""
    config = {
        "task": {"path": str(task.path)},
        "trial_name": request.task_id,
        "trials_dir": str(folder),
        "timeout_multiplier": request.timeout_multiplier,
        "agent": request.agent,
        **environment_config(task, request.llm_proxy_url),
    }
    return await run_trial(config)


class HarborRuns:
    """Tasks and runs of a server, kept in a directory."""

    def __init__(
        self, directory: Path, run: RunTrial, *, concurrency: int = 8, keep_hours: float = KEEP_HOURS
    ) -> None:
        self._tasks = directory / "tasks"
        self._runs = directory / "runs"
        self._trials = directory / "trials"
        self._run = run
        self._slots = asyncio.Semaphore(concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._used: dict[str, str] = {}  # digest of the task by run
        self._keep_s = keep_hours * 3600.0

    def open(self) -> None:
        """Create the directories; end runs that an earlier process left."""
        for folder in (self._tasks, self._runs, self._trials):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for partial in self._tasks.glob(".partial-*"):
            shutil.rmtree(partial, ignore_errors=True)
        for file in self._runs.glob("*.json"):
            run = self._load(file)
            if run.status not in ENDED:
                message = "the server was restarted during the run"
                kind = "InfrastructureFailure"
                self._save(structs.replace(run, status="failed", error=message, exception_type=kind))

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def delete_old(self) -> None:
        """Delete ended runs with the files of their trials, and tasks, that are no longer kept."""
        oldest = time.time() - self._keep_s
        for file in self._runs.glob("*.json"):
            if file.stem not in self._running and file.stat().st_mtime < oldest:
                await asyncio.to_thread(shutil.rmtree, self._trials / file.stem, ignore_errors=True)
                file.unlink()
        for folder in self._tasks.glob("[!.]*"):
            if folder.name not in self._used.values() and folder.stat().st_mtime < oldest:
                expired = folder.rename(self._tasks / f".partial-{folder.name}")
                await asyncio.to_thread(shutil.rmtree, expired, ignore_errors=True)

    def has_task(self, digest: str) -> bool:
        """Whether the task is there; it is kept from now on as if it were new."""
        if not is_task(self._tasks / digest):
            return False
        os.utime(self._tasks / digest)
        return True

    def add_task(self, archive: bytes, digest: str = "") -> str:
        """Unpack a task, check it and keep it by its digest; returns the digest."""
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._tasks))  # uploads may be concurrent
        try:
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(partial, filter="data")
            folders = [path for path in partial.iterdir() if path.is_dir()]
            if len(folders) != 1:
                raise UsageError("the archive must have one folder, the task directory")
            read_task(folders[0])
            unpacked = digest_of(folders[0])
            if digest not in ("", unpacked):
                raise UsageError(f"the archive has digest {unpacked}, not {digest}")
            try:
                folders[0].rename(self._tasks / unpacked)
            except OSError:
                if not self.has_task(unpacked):
                    raise
            return unpacked
        except (tarfile.TarError, OSError, EOFError) as error:
            raise UsageError(f"the archive cannot be unpacked: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def submit(self, request: RunRequest) -> str:
        """Start a run; the run of a key that was submitted before is returned as it is."""
        check_id(request.task_id, "task_id")
        run_id = request.task_id
        if (self._runs / f"{run_id}.json").exists():
            return run_id
        if not self.has_task(request.task_digest):
            raise UsageError(f"there is no task {request.task_digest!r}; upload it first")
        self._save(RunResponse(run_id=run_id, status="pending"))
        self._used[run_id] = request.task_digest
        self._running[run_id] = asyncio.create_task(self._execute(request))
        return run_id

    def get(self, run_id: str) -> RunResponse | None:
        with suppress(ValueError):
            check_id(run_id, "run id")
            file = self._runs / f"{run_id}.json"
            return self._load(file) if file.is_file() else None
        return None

    async def cancel(self, run_id: str) -> None:
        """Cancel a run and wait for its end; one that has ended stays as it is.

        A run that is cancelled before its submission arrives never starts.
        """
        check_id(run_id, "run id")
        if task := self._running.get(run_id):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._used.pop(run_id, None)
            if self._running.pop(run_id, None):  # cancelled before its first step
                self._save(_cancelled(run_id))
        elif self.get(run_id) is None:
            self._save(_cancelled(run_id))

    async def _execute(self, request: RunRequest) -> None:
        run = RunResponse(run_id=request.task_id, status="running")
        try:
            async with self._slots:
                self._save(run)  # not in a thread, which could write it after the end of a cancelled run
                task = await asyncio.to_thread(read_task, self._tasks / request.task_digest)
                result = await self._run(task, request, self._trials)
            ended = response_of(run.run_id, result)
        except asyncio.CancelledError:
            ended = _cancelled(run.run_id)
        except Exception as error:  # noqa: BLE001 - whatever a trial raises is the failure of its run
            kind = type(error).__name__
            ended = structs.replace(run, status="failed", error=str(error), exception_type=kind)
        self._save(ended)
        self._used.pop(run.run_id, None)
        self._running.pop(run.run_id, None)

    def _load(self, file: Path) -> RunResponse:
        return msgspec.json.decode(file.read_bytes(), type=RunResponse)

    def _save(self, run: RunResponse) -> None:
        write_whole(self._runs / f"{run.run_id}.json", msgspec.json.encode(run), private=True)


def _cancelled(run_id: str) -> RunResponse:
    return RunResponse(run_id=run_id, status="cancelled", exception_type="CancelledError")


def response_of(run_id: str, result: Mapping[str, Any]) -> RunResponse:
    """Result of a run from Harbor's trial result."""
    problem = result.get("exception_info") or {}
    rewards = (result.get("verifier_result") or {}).get("rewards")
    kind = str(problem.get("exception_type", ""))
    status = "completed" if rewards else "timeout" if kind == "AgentTimeoutError" else "failed"
    return RunResponse(
        run_id=run_id,
        status=status,
        rewards=rewards,
        error=problem.get("exception_message"),
        exception_type=kind,
        rollout_details=(result.get("agent_result") or {}).get("rollout_details"),
    )


# --- HTTP ----------------------------------------------------------------------------------------


class HarborApi:
    """HTTP routes over the runs of a server; with a `token`, every request needs it."""

    def __init__(self, runs: HarborRuns, token: str = "") -> None:
        self._runs = runs
        self._token = token

    def application(self) -> web.Application:
        @web.middleware
        async def check(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._check(request, handler)

        app = web.Application(middlewares=[check], client_max_size=MAX_ARCHIVE_BYTES)
        app.cleanup_ctx.append(self._lifetime)
        app.add_routes(
            [
                web.get(CAPABILITIES, self.capabilities),
                web.head(TASKS + "/{digest}", self.task_known),
                web.put(TASKS + "/{digest}", self.task_upload),
                web.post(RUNS, self.submit),
                web.post(RUNS + "/batch", self.submit_batch),
                web.get(RUNS + "/{run_id}/status", self.status),
                web.get(RUNS + "/{run_id}/result", self.result),
                web.delete(RUNS + "/{run_id}", self.cancel),
            ]
        )
        return app

    async def _lifetime(self, app: web.Application) -> AsyncIterator[None]:
        self._runs.open()
        deleting = asyncio.create_task(self._delete_old())
        yield
        deleting.cancel()
        await asyncio.gather(deleting, return_exceptions=True)
        await self._runs.close()

    async def _delete_old(self) -> None:
        while True:
            try:
                await self._runs.delete_old()
            except OSError as error:
                log.warning("harbor server: old runs were not deleted: %s", error)
            await asyncio.sleep(DELETE_INTERVAL_S)

    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        header = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(header.encode(), f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="a bearer token is needed")
        try:
            return await handler(request)
        except (UsageError, ValueError, msgspec.MsgspecError) as error:
            raise web.HTTPUnprocessableEntity(text=str(error)) from error

    async def capabilities(self, request: web.Request) -> web.Response:
        return _json(ServerCapabilities(tasks=True, keys=True, cancel=True, batch=True))

    async def task_known(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._runs.has_task(_digest(request)) else 404)

    async def task_upload(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._runs.add_task, await request.read(), _digest(request))
        return web.Response(status=201)

    async def submit(self, request: web.Request) -> web.Response:
        form = await request.post()
        metadata = form.get("metadata", "")
        if isinstance(metadata, web.FileField):
            raise UsageError("'metadata' must be a field with JSON, not a file")
        run = msgspec.json.decode(metadata, type=RunRequest)
        archive = form.get("task_archive")
        if isinstance(archive, web.FileField):
            digest = await asyncio.to_thread(self._runs.add_task, archive.file.read())
            run = structs.replace(run, task_digest=digest)
        return _json({"run_id": self._runs.submit(run), "status": "pending"})

    async def submit_batch(self, request: web.Request) -> web.Response:
        requests = msgspec.json.decode(await request.read(), type=list[RunRequest])
        return _json([{"task_id": run.task_id, "run_id": self._runs.submit(run)} for run in requests])

    async def status(self, request: web.Request) -> web.Response:
        return _json(structs.replace(_found(self._runs, request), rollout_details=None))

    async def result(self, request: web.Request) -> web.Response:
        run = _found(self._runs, request)
        if run.status not in ENDED:
            raise web.HTTPConflict(text=f"run {run.run_id} is {run.status}")
        return _json(run)

    async def cancel(self, request: web.Request) -> web.Response:
        await self._runs.cancel(request.match_info["run_id"])
        return _json(_found(self._runs, request))


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _digest(request: web.Request) -> str:
    digest = request.match_info["digest"]
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise UsageError(f"digest {digest!r} must be a SHA-256 in hexadecimal")
    return digest


def _found(runs: HarborRuns, request: web.Request) -> RunResponse:
    run = runs.get(request.match_info["run_id"])
    if run is None:
        raise web.HTTPNotFound(text=f"there is no run {request.match_info['run_id']!r}")
    return run


async def serve(runs: HarborRuns, host: str, port: int, token: str = "") -> None:
    """Serve until cancelled; prints the address."""
    runner = web.AppRunner(HarborApi(runs, token).application())
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
        address = runner.addresses[0]
        sys.stdout.write(f"http://{address[0]}:{address[1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m afield.harbor.server", description="Serve Harbor trials."
    )
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    arguments.add_argument(
        "--port", type=int, default=8080, help="port; 0 selects a free port (default: 8080)"
    )
    arguments.add_argument(
        "--directory", type=Path, required=True, help="directory of tasks, runs and trials"
    )
    arguments.add_argument("--token-file", type=Path, help="file with the token of clients, mode 0600")
    arguments.add_argument("--concurrency", type=int, default=8, help="trials at once (default: 8)")
    arguments.add_argument(
        "--keep-hours",
        type=float,
        default=KEEP_HOURS,
        help="hours for which ended runs, the files of their trials, and unused tasks are kept (default:"
        f" {KEEP_HOURS:g})",
    )
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    options = arguments.parse_args(argv)
    if options.host not in ("127.0.0.1", "localhost", "::1") and not options.token_file:
        arguments.error(f"--host {options.host} can be reached by others: give --token-file")
    if not options.keep_hours > 0:
        arguments.error(f"--keep-hours {options.keep_hours:g} must be positive")
    token = read_private(options.token_file).decode().strip() if options.token_file else ""
    limits = {"concurrency": options.concurrency, "keep_hours": options.keep_hours}
    runs = HarborRuns(options.directory, harbor_trial, **limits)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(runs, options.host, options.port, token))
    return 0


if __name__ == "__main__":
    sys.exit(main())
