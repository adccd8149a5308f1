"""AgentCore sandbox: runs commands in an AgentCore session of its own.

The service runs one command line at a time, of bounded length and without input. Files and input therefore
travel as base64 in several commands, up to `MOST_BYTES`. The session is stopped at the end; if that fails,
the idle timeout ends it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import math
import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

from msgspec.structs import replace

from afield.errors import AfieldError, InfrastructureFailure, NotFound, RateLimited, UsageError
from afield.interfaces.sandbox import ExecResult, OutputBuffer, build_argv, check_path, file_too_large
from afield.runtimes.agentcore.api import (
    AgentCoreApi,
    AgentCoreNoAnswer,
    AgentCoreRefused,
    launch_error,
    translate_errors,
)
from afield.runtimes.agentcore.deploy import deploy
from afield.settings.runtimes import AgentCoreOptions
from afield.types import Reason

log = logging.getLogger(__name__)

KEPT_BYTES = 256 * 1024
MOST_BYTES = 64 * 1024 * 1024
LONGEST_S = 3600
LONGEST_LINE = 60_000
PIECE = 36_000  # bytes of a file per command; base64 adds a third
NO_FILE = 44
# Time beyond a command's own timeout, in seconds, for network latency.
GRACE_S = 60.0
BUSY_S = 120.0
PAUSE_S = 1.0


class AgentCoreSandbox:
    """Sandbox on AgentCore.

    `arn` is the agent runtime; empty uses the one in the options, or deploys it. `keep_bytes` limits the
    output kept per stream.
    """

    def __init__(self, arn: str, options: AgentCoreOptions, *, keep_bytes: int = KEPT_BYTES) -> None:
        self._options = replace(options, arn=arn) if arn else options
        self._keep_bytes = keep_bytes
        self._name = f"afield-sandbox-{uuid4().hex}"
        self._api = AgentCoreApi(self._options, read_s=LONGEST_S + GRACE_S)
        self._arn = ""
        self._files = 0

    async def __aenter__(self) -> Self:
        try:
            await self._api.check()
            self._arn = (await deploy(self._api, self._options)).arn
            await self._begin()
        except BaseException:
            await self._stop()
            self._api.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self._stop())
        self._api.close()

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 600.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        if not 0 < timeout <= LONGEST_S:
            raise UsageError(
                f"timeout = {timeout:g}: a command on AgentCore takes from 1 to {LONGEST_S} seconds"
            )
        build_argv(command, timeout, cwd, env)
        line = command if isinstance(command, str) else shlex.join(command)
        if cwd:
            line = f"cd {shlex.quote(cwd)} || exit 1\n{line}"
        line = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items()) + line
        if stdin:
            line = f"exec < {await self._kept(stdin)}\n{line}"
        if len(shlex.quote(line)) > LONGEST_LINE:
            line = f". {await self._kept(line.encode())}"
        return await self._run(line, timeout, self._keep_bytes)

    async def upload(self, path: str, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise UsageError(f"{path} has {len(data)} bytes; {MOST_BYTES} can be put there at most")
        whole = _named(path)
        name, part = shlex.quote(whole), shlex.quote(f"{whole}.part")
        await self._done(f"mkdir -p {shlex.quote(posixpath.dirname(whole))} && : > {part}", path)
        for start in range(0, len(data), PIECE):
            piece = base64.b64encode(data[start : start + PIECE]).decode()
            await self._done(f"printf %s {piece} | base64 -d >> {part}", path)
        await self._done(f"[ ! -d {name} ] && mv {part} {name} || {{ rm {part}; false; }}", path)

    async def download(self, path: str) -> bytes:
        name = shlex.quote(_named(path))
        ran = await self._run(f"[ -f {name} ] || exit {NO_FILE}; base64 < {name}", LONGEST_S, 2 * MOST_BYTES)
        if ran.exit_code == NO_FILE:
            raise NotFound(f"there is no file {path} in the sandbox")
        if ran.truncated:
            raise file_too_large(path, "the sandbox", MOST_BYTES)
        try:
            if not ran.ok:
                raise ValueError(ran.stderr.strip())
            return base64.b64decode("".join(ran.stdout.split()), validate=True)
        except (ValueError, binascii.Error) as error:
            raise InfrastructureFailure(f"{path} was not read: {error}", Reason.UPLOAD) from error

    # --- session -----------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Run a first command, which starts the session."""
        ran = await self._run("true", GRACE_S, KEPT_BYTES)
        if not ran.ok:
            raise InfrastructureFailure(f"no command runs in {self._arn}: {ran}", Reason.LAUNCH)

    async def _stop(self) -> None:
        if not self._arn:
            return
        for last in (False, True):
            try:
                await self._api.ask(
                    "stop_runtime_session",
                    agentRuntimeArn=self._arn,
                    qualifier=self._options.qualifier,
                    runtimeSessionId=self._name,
                )
                return
            except (AgentCoreRefused, AgentCoreNoAnswer) as error:
                if isinstance(error, AgentCoreRefused) and error.status == 404:
                    return
                if last:
                    log.warning("%s could not be stopped: %s", self._name, error)
            await asyncio.sleep(PAUSE_S)

    async def _kept(self, data: bytes) -> str:
        """Upload data that does not fit into a command line; returns its path."""
        self._files += 1
        path = f"/tmp/.afield-{self._files}"
        await self.upload(path, data)
        return path

    async def _done(self, line: str, path: str) -> None:
        ran = await self._run(line, LONGEST_S, KEPT_BYTES)
        if not ran.ok:
            raise InfrastructureFailure(f"{path} was not written: {ran.stderr.strip()}", Reason.UPLOAD)

    async def _run(self, line: str, timeout: float, keep: int) -> ExecResult:
        """Run a command; repeats rate-limited calls, which did not run."""
        # Quoted so that the service gets the same three words whether or not it uses a shell.
        command = {"command": f"/bin/sh -c {shlex.quote(line)}", "timeout": math.ceil(timeout)}
        end = asyncio.get_running_loop().time() + BUSY_S
        while True:
            try:
                return await self._ran(command, keep)
            except RateLimited as error:
                if asyncio.get_running_loop().time() > end:
                    raise InfrastructureFailure(str(error), Reason.LAUNCH) from error
                await asyncio.sleep(error.retry_after_s or PAUSE_S)

    async def _ran(self, command: dict[str, Any], keep: int) -> ExecResult:
        try:
            async with asyncio.timeout(command["timeout"] + GRACE_S + self._options.cold_start_s):
                return await self._api.threaded("start", lambda: self._talk(command, keep))
        except TimeoutError as error:
            raise InfrastructureFailure(f"{self._name} does not answer", Reason.DIED) from error
        except (AgentCoreRefused, AgentCoreNoAnswer) as error:
            raise _broken(error, self._name, self._arn) from error

    def _talk(self, command: dict[str, Any], keep: int) -> ExecResult:
        def talk() -> ExecResult:
            answer = self._api.data.invoke_agent_runtime_command(
                agentRuntimeArn=self._arn,
                qualifier=self._options.qualifier,
                runtimeSessionId=self._name,
                contentType="application/json",
                accept="application/vnd.amazon.eventstream",
                body=command,
            )
            return _read(answer["stream"], keep)

        return translate_errors("invoke_agent_runtime_command", talk)


def _named(path: str) -> str:
    """Path relative to the working directory, with a prefix so that it is never mistaken for an option."""
    check_path(path)
    return posixpath.join(".", path)


def _read(stream: Any, keep: int) -> ExecResult:
    out, err = OutputBuffer(keep), OutputBuffer(keep)
    add: dict[str, Callable[[bytes], None]] = {"stdout": out.add, "stderr": err.add}
    stop: dict[str, Any] | None = None
    for event in stream:
        chunk = event.get("chunk", {})
        for channel, text in chunk.get("contentDelta", {}).items():
            if channel in add:
                add[channel](text.encode())
        stop = chunk.get("contentStop", stop)
    if stop is None:
        raise AgentCoreNoAnswer("the answer broke off before the command had ended")
    timed_out = stop["status"] == "TIMED_OUT"
    return ExecResult(
        exit_code=None if timed_out else stop["exitCode"],
        stdout=out.text,
        stderr=err.text,
        timed_out=timed_out,
        truncated=bool(out.omitted or err.omitted),
    )


def _broken(error: AgentCoreRefused | AgentCoreNoAnswer, name: str, arn: str) -> AfieldError:
    meant = launch_error(error, name, arn)
    if isinstance(meant, (RateLimited, InfrastructureFailure)):
        return meant
    return InfrastructureFailure(str(meant), Reason.DIED)
