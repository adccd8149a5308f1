"""A second user of this machine, as whom commands are run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

UID = GID = 64_233  # of nobody on this machine; the kernel needs no entry in /etc/passwd

needs_other_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a command as another user")


def run_as_other_user(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    """Run `command` with the rights of a user who owns nothing here."""
    return subprocess.run(  # type: ignore[call-overload]
        command,
        user=UID,
        group=GID,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
        timeout=60,
        **more,
    )


def python_as_other_user(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with the system's Python: our own may lie in a home that others cannot enter."""
    python = Path("/usr/bin/python3")
    program = str(python) if python.exists() else sys.executable
    return run_as_other_user([program, "-c", code, *arguments])


def open_folder() -> Path:
    """A new folder that every user can enter and read, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="afield-open-", dir="/tmp"))
    folder.chmod(0o755)
    return folder


READ_ALL = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(folder, name)
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError:
            continue
        print(path)
"""


def readable_files(folder: Path) -> list[str]:
    """Files below `folder` that the other user can read, and what that user can list of the rest."""
    return python_as_other_user(READ_ALL, str(folder)).stdout.split()
