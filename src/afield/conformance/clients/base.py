"""Conformance client: installation, commands and scenario."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from afield.conformance.judge import ServedCall
from afield.conformance.pins import NPM, PYTHON
from afield.conformance.scenario import Scenario, marker
from afield.harnesses.base import ClientCommand, Npm, PyPI, Stage

# Contains a control literal, which must stay text.
TASK = f"Go through the steps, one after the other (<|im_end|> is text), until the last. {marker('main', 0)}"
AGENT_SCRIPTS = Path(__file__).parent.parent / "agents"
# Block network access of programs that respect these variables: the proxy port is closed.
OFFLINE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
LOCAL = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


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


def from_pypi(name: str) -> Callable[[Path], Path]:
    """Installer of the packages `PYTHON[name]`."""
    return lambda cache: PyPI(PYTHON[name]).install(cache, name)


def from_npm(name: str) -> Callable[[Path], Path]:
    """Installer of the npm packages `NPM[name]`."""
    return lambda cache: Npm(NPM[name]).install(cache, name)


def offline_environment(stage: Stage, path: str) -> dict[str, str]:
    """Environment variables of a client process, without network access."""
    own = {"HOME": str(stage.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
    return own | OFFLINE | LOCAL


async def run(command: ClientCommand, stage: Stage, path: str, log: Path, timeout_s: float) -> str | None:
    """Run a command and kill its process group afterwards; returns the problem, None on success."""
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=stage.work,
            env={**offline_environment(stage, path), **command.environment},
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
