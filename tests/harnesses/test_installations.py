"""Installations of clients: failures, interruptions and several processes at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from afield.errors import Unavailable
from afield.utils.installations import npm_environment

INSTALLER = """#!/bin/sh
echo $$ >> {log}
mkdir -p node_modules/.bin
echo half > node_modules/.bin/client
{step}
echo whole > node_modules/.bin/client
"""
INSTALL = "import sys, pathlib; from afield.utils.installations import npm_environment as n; "
INSTALL += "print(n(pathlib.Path(sys.argv[1]), 'client', ['client@1']))"


def npm(folder: Path, step: str) -> Path:
    """An installer on the PATH; returns the file in which it notes its starts."""
    program, log = folder / "npm", folder / "starts"
    program.write_text(INSTALLER.format(log=log, step=step))
    program.chmod(0o755)
    return log


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_installation_that_fails_half_way_is_repeated_from_the_start(tmp_path: Path) -> None:
    npm(tmp_path, "echo 'no space left' >&2; exit 1")
    with pytest.raises(Unavailable, match="no space left"):
        npm_environment(tmp_path / "cache", "client", ["client@1"])
    npm(tmp_path, "true")
    programs = npm_environment(tmp_path / "cache", "client", ["client@1"])
    assert (programs / "client").read_text() == "whole\n"


def test_installation_of_a_killed_process_is_repeated_from_the_start(tmp_path: Path) -> None:
    log = npm(tmp_path, "exec sleep 600")
    command = [sys.executable, "-c", INSTALL, str(tmp_path / "cache")]
    with subprocess.Popen(command) as process:
        while not log.exists() or not log.read_text().endswith("\n"):
            time.sleep(0.02)
        process.kill()
    subprocess.run(["kill", log.read_text().strip()], check=True)
    npm(tmp_path, "true")
    programs = npm_environment(tmp_path / "cache", "client", ["client@1"])
    assert (programs / "client").read_text() == "whole\n"


def test_processes_that_need_a_client_at_once_install_it_once(tmp_path: Path) -> None:
    log = npm(tmp_path, "sleep 0.5")
    command = [sys.executable, "-c", INSTALL, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate(timeout=60)[0] for process in processes}
    assert len(printed) == 1
    assert Path(printed.pop().strip(), "client").read_text() == "whole\n"
    assert len(log.read_text().splitlines()) == 1


def test_installer_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm(tmp_path, "exec sleep 600")
    monkeypatch.setattr("afield.utils.installations.INSTALL_S", 0.5)
    with pytest.raises(Unavailable, match=r"took more than 0\.5 s"):
        npm_environment(tmp_path / "cache", "client", ["client@1"])
