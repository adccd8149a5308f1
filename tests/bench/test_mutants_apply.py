"""Mutants of bench/gateway/mutants.py apply to the present source."""

from __future__ import annotations

import pytest

from bench.gateway.mutants import MUTANTS, Mutant, problem


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_to_the_present_source(mutant: Mutant) -> None:
    assert problem(mutant) == ""
    compile(mutant.patch, mutant.name, "exec")


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("trajectories:gone", "def mutant(original): pass", "target trajectories:gone does not exist"),
        ("trajectories:linear", "def mutant(original): gone()", "afield.trajectories has no gone"),
        ("trajectories:linear", "def mutant(original, t): t.gone_from_here", "no attribute gone_from_here"),
    ],
)
def test_mutant_of_missing_code_is_reported(target: str, code: str, message: str) -> None:
    assert message in problem(Mutant("stale", "nothing", target, code))
