"""Python interpreters of other environments: their paths, and their afield."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert

from afield.errors import UsageError

PATHS = """
import json, sys
print(json.dumps({"executable": sys.executable, "prefixes": [sys.prefix, sys.base_prefix], "path": sys.path}))
"""
VERSION = """
import json
try:
    import afield, afield.sdk.serve
    print(json.dumps({"version": afield.__version__}))
except Exception as error:
    print(json.dumps({"problem": f"{type(error).__name__}: {error}"}))
"""
TIMEOUT_S = 60.0


class Interpreter(Struct, frozen=True, kw_only=True):
    """A Python interpreter and the directories that it imports from."""

    executable: str
    """Path of the interpreter."""
    prefixes: tuple[str, str]
    """Directory of its environment, and of the installation that the environment is made from."""
    path: tuple[str, ...]
    """Its sys.path, without the directory of a script."""


def inspect_interpreter(python: str) -> Interpreter:
    """Ask an interpreter for its paths; raises UsageError if it cannot be run."""
    return convert(_answer(python, PATHS), Interpreter)


def check_interpreter(python: str, version: str, env: Mapping[str, str]) -> None:
    """Check that an interpreter imports the SDK of this version of afield.

    Raises UsageError with the command that installs it.
    """
    answer = _answer(python, VERSION, env)
    if (found := answer.get("version")) == version:
        return
    has = f"has afield {found}, not {version}" if found else f"cannot import afield: {answer['problem']}"
    raise UsageError(f"python {python} {has}; install it there: {python} -m pip install 'afield=={version}'")


def _answer(python: str, code: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    remedy = "name the interpreter of the agent's virtualenv, such as agent-env/bin/python"
    try:
        run = subprocess.run(
            [python, "-P", "-c", code],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"python {python} cannot be run: {error}; {remedy}") from error
    try:
        return json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        end = run.stderr.decode(errors="replace").strip()[-500:] or f"exit code {run.returncode}"
        raise UsageError(f"python {python} is no Python 3.11 or newer: {end}; {remedy}") from error
