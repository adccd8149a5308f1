"""Conformance client: how to install and run it, and its scenario."""

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

# It spells a control token, which has to stay text.
TASK = f"Go through the steps, one after the other (<|im_end|> is text), until the last. {marker('main', 0)}"
SCRIPTS = Path(__file__).parent / "scripts"
# Offline, for all programs that respect these: what is not local goes to a port where nobody listens.
OFFLINE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
LOCAL = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")


class Stage(Struct, frozen=True, kw_only=True):
    """Where a client runs: folders of its own, and the session it is given."""

    home: Path
    work: Path
    programs: Path
    base_url: str
    api_key: str
    model: str
    path: str = ""

    @property
    def openai_base_url(self) -> str:
        return f"{self.base_url}/v1"

    def environment(self, path: str, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/bash"}
        return own | OFFLINE | LOCAL | more


class ClientCommand(Struct, frozen=True):
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}


class Client(Struct, frozen=True, kw_only=True):
    """`install` gives the folder of the programs from the cache; `commands` are run one after another;
    `inspect` says what is wrong with what the client kept for itself."""

    name: str
    install: Callable[[Path], Path]
    commands: Callable[[Stage], Sequence[ClientCommand]]
    scenario: Scenario
    inspect: Callable[[Stage, Sequence[ServedCall]], list[str]] = lambda stage, ledger: []
    timeout_s: float = 400.0


def from_pypi(name: str, version: str | None = None) -> Callable[[Path], Path]:
    def install(cache: Path) -> Path:
        python = interpreter(version) if version else "python3"
        return python_environment(cache, name, PYTHON[name], python=python).parent

    return install


def from_npm(name: str) -> Callable[[Path], Path]:
    return lambda cache: npm_environment(cache, name, NPM[name])


async def run(command: ClientCommand, stage: Stage, path: str, log: Path, timeout_s: float) -> str | None:
    """What went wrong, or None. The whole process group ends with the command."""
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
