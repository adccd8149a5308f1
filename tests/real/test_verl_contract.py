"""Stock veRL's own classes, field by field: the suites beside this file, in an environment that has veRL."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from afield.errors import Unavailable
from support.verl_env import ROOT, verl_environment, verl_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
RUN_S = 1700


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return verl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


@pytest.mark.parametrize(
    ("suite", "least"),
    [("verl_contract_suite.py", 43), ("verl_images_suite.py", 12), ("verl_manager_suite.py", 8)],
)
def test_rows_and_manager_keep_veRLs_contract(python: Path, suite: str, least: int, tmp_path: Path) -> None:
    # veRL and what it brings warn of much that is not ours.
    command = [python, "-m", "pytest", HERE / suite, "-m", "real", "-q", "--timeout", "400"]
    command += ["-o", "filterwarnings=default", "-p", "no:cacheprovider", "--basetemp", tmp_path / "made"]
    done = subprocess.run(
        command, cwd=ROOT, env=verl_environment(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least, done.stdout[-2000:]
