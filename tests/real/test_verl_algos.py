"""Advantages against those of a stock veRL."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from afield.advantages import AdvantageEstimator
from support.verl_env import figures

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).parent / "verl_algos.py"


@pytest.fixture(scope="module")
def apart() -> dict[str, float]:
    return figures(SCRIPT)


@pytest.mark.parametrize("how", get_args(AdvantageEstimator))
def test_advantages_are_those_of_verl(apart: dict[str, float], how: str) -> None:
    assert apart[how] < 1e-6


def test_a_batch_comes_back_from_verls_own_tensordict(apart: dict[str, float]) -> None:
    assert apart["tensordict"] == 0
