"""Real clients at pinned versions against the gateway: every token they sampled is recorded once.

A client that cannot be installed here skips with the reason; where `CI` is set it fails.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from afield.config import Environment
from afield.conformance.clients import CLIENTS
from afield.conformance.suite import check

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", CLIENTS)
def test_what_the_client_sampled_is_recorded_once_and_exactly(name: str, tmp_path: Path):
    verdict = asyncio.run(check(CLIENTS[name], Environment.read().envs, tmp_path / name, os.environ["PATH"]))
    skipped = [problem for problem in verdict.problems if problem.startswith("skipped: ")]
    if skipped and not os.environ.get("CI"):
        pytest.skip(skipped[0])
    assert verdict.problems == ()
    assert verdict.matched == verdict.calls
    assert verdict.duplicates == 0
