"""Test suites of other projects against the gateway: nothing fails but what is listed as not ours.

A suite that cannot be installed here skips with the reason; where `CI` is set it fails, unless its source is
only on GitHub.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from afield.conformance.suites.registry import SUITES
from afield.conformance.suites.runner import check_suite
from afield.settings.environment import Environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", SUITES)
def test_no_test_of_the_suite_fails_that_is_ours(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    result = asyncio.run(check_suite(suite, Environment.read().envs, tmp_path / name, os.environ["PATH"]))
    if result.unavailable and (suite.optional or not os.environ.get("CI")):
        pytest.skip(result.unavailable)
    assert result.problems == ()
    assert result.passed > 0
