"""`afield why` on runs that are really broken; `bench/why.py` breaks one for every class."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import why

pytestmark = pytest.mark.real
CHEAP = (
    "unreachable_gateway",
    "infrastructure_zeros",
    "lost_tool_results",
    "empty_tool_schema",
    "refused_calls",
)
CASES = [next(case for case in why.CASES if case.name == name) for name in CHEAP]
HEALTHY = [case for case in why.HEALTHY if case.make is why.client_run]


@pytest.mark.parametrize("case", [*CASES, *HEALTHY], ids=lambda case: case.name)
def test_the_broken_part_is_ranked_first(case: why.Case, tmp_path: Path) -> None:
    outcome = why.run_case(case, tmp_path)
    assert outcome.names == ([] if case.name == "healthy" else [case.name])
