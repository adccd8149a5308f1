"""Losses, corrections and penalties against those of a stock veRL."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.verl_env import figures

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).parent / "verl_losses.py"


@pytest.fixture(scope="module")
def apart() -> dict[str, float]:
    return figures(SCRIPT)


@pytest.mark.parametrize("what", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("aggregate", ["rollout", "token", "constant"])
def test_a_loss_and_its_gradient_are_those_of_verl(apart: dict[str, float], what: str, aggregate: str):
    for part in ("value", "gradient", "clipped"):
        assert apart[f"{what} {aggregate} {part}"] < 1e-6, part


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_stale_tokens_are_corrected_for_as_verl_does(apart: dict[str, float], kind: str):
    assert apart[f"importance {kind}"] < 1e-9
    assert apart[f"importance {kind} cuts nothing"] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_and_its_gradient_are_those_of_verl(apart: dict[str, float], estimator: str):
    assert apart[f"kl {estimator}"] < 1e-9
    assert apart[f"kl {estimator} gradient"] < 1e-9
