"""Run commands in the test process, which is faster than starting one for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from afield.cli.main import main

RunCommand = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunCommand:
    """Function that runs a command in `tmp_path`; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str, str]:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return code, *capsys.readouterr()

    return run
