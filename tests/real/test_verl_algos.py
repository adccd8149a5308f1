"""Advantages against those of a stock veRL."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from afield.advantage import How
from afield.errors import Unavailable
from verl_env import verl_environment, verl_python

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).parent / "verl_algos.py"


@pytest.fixture(scope="module")
def apart() -> dict[str, float]:
    try:
        python = verl_python()
    except Unavailable as error:
        pytest.fail(str(error)) if os.environ.get("CI") else pytest.skip(str(error))
    done = subprocess.run(
        [python, SCRIPT], env=verl_environment(), capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", get_args(How))
def test_advantages_are_those_of_verl(apart: dict[str, float], how: str) -> None:
    assert apart[how] < 1e-6


def test_a_batch_comes_back_from_verls_own_tensordict(apart: dict[str, float]) -> None:
    assert apart["tensordict"] == 0
