"""Conformance client: installation, commands and scenario."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from afield.conformance.environments import interpreter, npm_environment, python_environment
from afield.conformance.judge import ServedCall
from afield.conformance.pins import NPM, PYTHON
from afield.conformance.scenario import Scenario, marker

# Contains a control literal, which must stay text.
TASK = f"Go through the steps, one after the other (<|im_end|> is text), until the last. {marker('main', 0)}"
AGENT_SCRIPTS = Path(__file__).parent.parent / "agents"
# Block network access of programs that respect these variables: the proxy port is closed.
OFFLINE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
LOCAL = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


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

    @property
    def openai_base_url(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.base_url}/v1"

    def environment(self, path: str, **more: str) -> dict[str, str]:
        """Environment variables of a client process, without network access."""
        own = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
        return own | OFFLINE | LOCAL | more


class ClientCommand(Struct, frozen=True):
    """Command line of a client."""

    argv: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str] = {}
    """Environment variables besides those of `Stage.environment`."""


class Client(Struct, frozen=True, kw_only=True):
    """Client program under test."""

    name: str
    """Name on the command line and in results."""
    install: Callable[[Path], Path]
    """Installs the client into the cache directory; returns the directory of its programs."""
    commands: Callable[[Stage], Sequence[ClientCommand]]
    """Commands to run in order."""
    scenario: Scenario
    """Model replies and network faults."""
    inspect: Callable[[Stage, Sequence[ServedCall]], list[str]] = lambda stage, calls: []
    """Checks files that the client wrote against the engine calls; returns problems. Default: none."""
    timeout_s: float = 400.0
    """Time limit of each command, in seconds."""


def from_pypi(name: str, version: str | None = None) -> Callable[[Path], Path]:
    """Installer of the packages `PYTHON[name]`, with this Python version ("3.12") or python3."""

    def install(cache: Path) -> Path:
        python = interpreter(version) if version else "python3"
        return python_environment(cache, name, PYTHON[name], python=python).parent

    return install


def from_npm(name: str) -> Callable[[Path], Path]:
    """Installer of the npm packages `NPM[name]`."""
    return lambda cache: npm_environment(cache, name, NPM[name])


async def run(command: ClientCommand, stage: Stage, path: str, log: Path, timeout_s: float) -> str | None:
    """Run a command and kill its process group afterwards; returns the problem, None on success."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=stage.work,
            env=stage.environment(path, **command.environment),
            start_new_session=True,
        )
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return f"{Path(command.argv[0]).name} did not end within {timeout_s:g} s; see {log}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return f"{Path(command.argv[0]).name} ended with code {code}; see {log}" if code else None
