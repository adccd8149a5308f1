"""The decode step's Triton kernels without a GPU: the tests of `kernels_suite.py` under the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from afield.conformance.pins import TRITON
from afield.errors import Unavailable
from afield.settings.environment import Environment
from afield.utils.installations import python_environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
ROOT = Path(__file__).parent.parent.parent
SUITE = Path(__file__).parent / "kernels_suite.py"
LEAST = 59


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return python_environment(Environment.read().envs, "triton", TRITON)
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))


def test_every_kernel_is_what_plain_torch_says_on_odd_shapes(python: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [python, "-m", "pytest", SUITE, "--noconftest", "-m", "real", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= LEAST, done.stdout[-2000:]
