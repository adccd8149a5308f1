"""Loss of a Ray node: which results are not accepted."""

from __future__ import annotations

import pytest

from bench.pool import node_loss

GOOD = {"sessions": 203, "rollouts": 200, "failed": 0, "lost": 0, "doubled": 0, "generated_twice": 0}


def test_result_without_losses_is_accepted() -> None:
    assert node_loss.exit_code(GOOD) == 0


@pytest.mark.parametrize("name", ["failed", "lost", "doubled", "generated_twice"])
def test_failed_lost_doubled_or_repeated_generation_is_not_accepted(name: str) -> None:
    assert node_loss.exit_code({**GOOD, name: 1}) == 1


def test_missing_rollout_is_not_accepted() -> None:
    assert node_loss.exit_code({**GOOD, "rollouts": 199}) == 1
