"""Harness: runs a published coding agent headless as an afield agent.

1. Its client comes from the directory in AFIELD_PROGRAMS, from the PATH (of an image), or is installed into
   the cache at a pinned version. Another version on the PATH is used with a warning.
2. Every rollout has a fresh home directory and the workspace of its task.
3. The client and everything it started end with the rollout: when it exits, when its time is up, when the
   rollout is stopped, and when the agent's process dies.
4. Its exit becomes a submission for the verifier, or a failure of the right kind.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from afield.errors import InfrastructureFailure, PolicyFailure, RolloutFailure, TaskFailure, Unavailable
from afield.harnesses.workspace import prepare
from afield.sdk.agent import Context
from afield.settings.environment import PROGRAMS, agent_environment, cache_directory
from afield.types import Reason
from afield.utils.installations import interpreter, npm_environment, python_environment

log = logging.getLogger(__name__)

OUTPUT_BYTES = 1024 * 1024
LOG_CHARACTERS = 16_000
MESSAGE_CHARACTERS = 1_000
MAX_INSTRUCTION_BYTES = 100_000  # Linux limits one argument to 128 KiB
END_S = 15.0
VERSION_S = 60.0
"""Time limit of a client that prints its version, in seconds."""
_CHECKING = threading.Lock()
FOREIGN_PREFIXES = (
    *("AFIELD_", "ANTHROPIC_", "AZURE_OPENAI_", "CLAUDE", "CODEX_", "GEMINI_", "GOOGLE_", "LITELLM_", "LLM_"),
    *("MSWEA_", "OPENAI_", "OPENCODE", "OPENHANDS_", "OPENROUTER_", "PI_", "QWEN_"),
)
"""Variables that configure clients, which a rollout must not inherit."""
REFUSALS = {
    "takes no more model calls": (PolicyFailure, Reason.BUDGET),
    "budget_exhausted": (PolicyFailure, Reason.BUDGET),
    "maximum context length": (PolicyFailure, Reason.CONTEXT),
    "prompt is too long": (PolicyFailure, Reason.CONTEXT),
    "context_length_exceeded": (PolicyFailure, Reason.CONTEXT),
    "engine_unavailable": (InfrastructureFailure, Reason.ENGINE),
}
"""Failures by the text that the gateway's answer puts into a client's error."""


class Stage(Struct, frozen=True, kw_only=True):
    """Directories and session of one client run."""

    home: Path
    """Home directory of the client."""
    work: Path
    """Working directory of the client."""
    programs: Path
    """Directory of the installed programs."""
    base_url: str
    """Base URL of the session."""
    api_key: str
    """API key of the session."""
    model: str
    """Model name for requests."""
    path: str = ""
    """PATH of the machine, for clients that extend it."""
    context_tokens: int | None = None
    """Tokens of a conversation above which the client compacts it; None leaves that to the client."""

    @property
    def openai_base_url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.base_url}/v1"

    def write(self, name: str, text: str) -> Path:
        """Write a file below the home directory that only its owner can read."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
        return path


class ClientCommand(Struct, frozen=True):
    """Command line of a client."""

    argv: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str] = {}
    """Environment variables besides the common ones."""


class Npm(Struct, frozen=True):
    """Client on npm."""

    packages: tuple[str, ...]
    """Packages with pinned versions."""

    def install(self, cache: Path, name: str) -> Path:
        """Install into the cache once; returns the directory of the programs."""
        return npm_environment(cache, name, self.packages)

    def mounts(self, programs: Path) -> list[Path]:
        """Directories of this machine that the programs need."""
        node = shutil.which("node")
        return [programs.parents[1], *([Path(node).resolve().parents[1]] if node else [])]


class PyPI(Struct, frozen=True):
    """Client on PyPI, in a virtual environment of its own."""

    packages: tuple[str, ...]
    """Packages with pinned versions."""
    python: str | None = None
    """Python version, such as "3.12"; None takes python3."""

    def install(self, cache: Path, name: str) -> Path:
        """Install into the cache once; returns the directory of the programs."""
        python = interpreter(self.python) if self.python else "python3"
        return python_environment(cache, name, self.packages, python=python).parent

    def mounts(self, programs: Path) -> list[Path]:
        """Directories of this machine that the programs need."""
        return [programs.parent, (programs / "python").resolve().parents[1]]


class ClientExit(Struct, frozen=True):
    """Exit of a client."""

    code: int
    """Exit code; negative for a signal."""
    output: str
    """End of its standard output."""
    errors: str
    """End of its standard error."""


class ClientReport(Struct, frozen=True, kw_only=True):
    """Report of a client about its run."""

    answer: str = ""
    """Last message of the agent."""
    error: str = ""
    """Error that ended the run; empty if the client ended well."""
    metrics: dict[str, float] = {}
    """Numbers to log with the rollout."""


def read_output(end: ClientExit) -> ClientReport:
    """Report of a client that prints its last message and exits with 0 if it ended well."""
    if end.code == 0:
        return ClientReport(answer=end.output.strip())
    return ClientReport(answer=end.output.strip(), error=end.errors.strip() or end.output.strip())


class Harness(Struct, frozen=True, kw_only=True):
    """A published coding agent, called as an afield agent."""

    name: str
    """Name after `--agent`."""
    program: str
    """Name of its program."""
    package: Npm | PyPI
    """Where the client comes from."""
    protocol: str
    """Model API that it speaks."""
    command: Callable[[Stage, str], ClientCommand]
    """Command line for an instruction; writes the configuration files below `Stage.home`."""
    report: Callable[[ClientExit, Stage], ClientReport] = lambda end, stage: read_output(end)
    """Reads the client's report."""

    def install(self, cache: Path) -> Path:
        """Install the client into the cache once; returns the directory of its programs."""
        return self.package.install(cache, self.name)

    @property
    def pinned(self) -> str:
        """Version of the client that the harness is written for."""
        return re.split("==|@", self.package.packages[0])[-1]

    def programs(self) -> tuple[Path, str]:
        """Directory and version of the client: AFIELD_PROGRAMS, the PATH's, or a new installation."""
        if PROGRAMS in (environment := agent_environment()):
            return Path(environment[PROGRAMS]), self.pinned
        if program := shutil.which(self.program):
            with _CHECKING:  # rollouts that start at once check it once
                return Path(program).parent, _found_version(self.name, program, self.pinned)
        log.info("harness %s: installing %s", self.name, ", ".join(self.package.packages))
        return self.install(cache_directory() / "envs"), self.pinned

    async def __call__(self, task: dict[str, Any], rollout: Context) -> dict[str, Any]:
        """Run the client on a task; returns the submission for the verifier."""
        try:
            programs, version = await asyncio.to_thread(self.programs)
        except Unavailable as error:
            raise InfrastructureFailure(f"{self.name} cannot be installed: {error}", Reason.LAUNCH) from error
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="afield-"))
        try:
            workspace = await asyncio.to_thread(prepare, task, scratch)
            (scratch / "home").mkdir()
            stage = Stage(
                home=scratch / "home",
                work=workspace.directory,
                programs=programs,
                base_url=rollout.base_url,
                api_key=rollout.api_key,
                model=rollout.model_id,
                path=agent_environment().get("PATH", ""),
                context_tokens=argument(rollout, "context_tokens", int),
            )
            limit_s = argument(rollout, "agent_timeout_s", float) or task.get("agent_timeout_s")
            command = self.command(stage, instruction_of(task))
            end = await self.run(command, stage, limit_s)
            report = self.report(end, stage)
            if failure := failure_of(self.name, end, report):
                raise failure
            submission = await asyncio.to_thread(workspace.submission)
            client = f"{self.name} {version}"
            return {**submission, "answer": report.answer, "metrics": report.metrics, "client": client}
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def run(self, command: ClientCommand, stage: Stage, limit_s: float | None) -> ClientExit:
        """Run the client to its end; raises PolicyFailure when its time is up."""
        process = await asyncio.create_subprocess_exec(
            # Ends the client and everything it started when its standard input closes.
            *(sys.executable, "-P", "-m", "afield.sdk.parent_watch", *command.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=stage.work,
            env={**client_environment(stage), **command.environment},
        )
        assert process.stdin and process.stdout and process.stderr
        output, errors = bytearray(), bytearray()
        reading = asyncio.gather(_tail(process.stdout, output), _tail(process.stderr, errors))
        try:
            async with asyncio.timeout(limit_s):
                await process.wait()
        except TimeoutError:
            message = f"{self.name} did not end within its time limit of {limit_s:g} s (agent_timeout_s)"
            raise PolicyFailure(message, Reason.TIMEOUT) from None
        finally:
            process.stdin.close()
            ending = asyncio.gather(reading, process.wait())
            await asyncio.shield(asyncio.wait([ending], timeout=END_S))
            ending.cancel()
            for name, text in (("stdout", output), ("stderr", errors)):
                tail = text.decode("utf-8", "replace")[-LOG_CHARACTERS:]
                log.info("harness %s: end of its %s:\n%s", self.name, name, tail.strip())
        code = process.returncode
        assert code is not None
        return ClientExit(code, output.decode("utf-8", "replace"), errors.decode("utf-8", "replace"))


@functools.cache
def _found_version(name: str, program: str, pinned: str) -> str:
    """Version of a program on the PATH; warns, once per process, if it is not the pinned one."""
    with tempfile.TemporaryDirectory(prefix="afield-") as home:
        try:
            result = subprocess.run(
                [program, "--version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**agent_environment(), "HOME": home, "MSWEA_CONFIGURED": "true"},
                timeout=VERSION_S,
                check=False,
            )
            versions = re.findall(r"\d+(?:\.\d+)+[\w.+-]*", result.stdout.decode(errors="replace"))
        except (OSError, subprocess.TimeoutExpired):
            versions = []
    if pinned in versions:
        return pinned
    version = versions[0] if versions else "unknown"
    log.warning(
        "harness %s: %s on the PATH has version %s, but the harness is written for %s: its command line and"
        " its reports may differ; install that version in the image",
        *(name, program, version, pinned),
    )
    return version


def instruction_of(task: Mapping[str, Any]) -> str:
    """Instruction of a task: `instruction`, or `prompt` as text or chat messages."""
    for key in ("instruction", "prompt"):
        value = task.get(key)
        if isinstance(value, list):
            texts = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
            value = "\n\n".join(text for text in texts if isinstance(text, str))
        if isinstance(value, str) and value.strip():
            if (size := len(value.encode())) > MAX_INSTRUCTION_BYTES:
                message = f"{key} has {size} bytes; a harness takes at most {MAX_INSTRUCTION_BYTES}"
                raise TaskFailure(f"{message}; put the rest into 'files'", Reason.LAUNCH)
            # Clients read a text that begins with a dash as an option, with / as a command, with @ as a file.
            return f"\n{value}" if value.startswith(("-", "/", "@")) else value
    raise TaskFailure(
        f"the task has no instruction: its keys are {', '.join(map(repr, task)) or 'none'}; a harness reads"
        " 'instruction', or 'prompt' as text or chat messages",
        Reason.LAUNCH,
    )


def argument(rollout: Context, name: str, kind: type[Any]) -> Any:
    """Value of a run-wide agent argument; None if it is not set."""
    value = rollout.args.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0):
        return None if value is None else kind(value)
    raise TaskFailure(f"agent argument {name} = {value!r} must be a positive number", Reason.LAUNCH)


def client_environment(stage: Stage) -> dict[str, str]:
    """Environment of a client: this process's without settings of clients, with a home of its own."""
    inherited = {k: v for k, v in agent_environment().items() if not k.startswith(FOREIGN_PREFIXES)}
    host = urlsplit(stage.base_url).hostname or ""
    direct = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), host)))
    return {
        **{k: v for k, v in inherited.items() if not k.startswith("XDG_")},
        "HOME": str(stage.home),
        "PWD": str(stage.work),
        "PATH": f"{stage.programs}:{stage.path}",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "SHELL": "/bin/bash",
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def failure_of(name: str, end: ClientExit, report: ClientReport) -> RolloutFailure | None:
    """Failure that a client's exit counts as; None if it ended well."""
    if end.code < 0:
        number = signal.Signals(-end.code).name
        message = f"{name} was killed by {number}; its memory limit may be too small"
        return InfrastructureFailure(message, Reason.DIED)
    if not report.error and end.code == 0:
        return None
    error = report.error or end.errors.strip() or end.output.strip()
    excerpt = error if len(error) <= MESSAGE_CHARACTERS else f"...{error[-MESSAGE_CHARACTERS:]}"
    for text, (kind, reason) in REFUSALS.items():
        if text in error:
            return kind(f"{name} ended because the gateway refused a call: {excerpt}", reason)
    return TaskFailure(f"{name} ended with code {end.code}: {excerpt or 'it printed nothing'}", Reason.RAISED)


async def _tail(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while data := await stream.read(65_536):
        kept += data
        del kept[:-OUTPUT_BYTES]
