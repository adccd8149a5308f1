"""Real clients at pinned versions against the gateway: every token they sampled is recorded once.

All clients run on one template family, some on the second one; `make accept PART=gateway` runs all on both.
A client that cannot be installed here skips with the reason; where `CI` is set it fails.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from afield.conformance.clients import CLIENTS
from afield.conformance.model import CHATML, QWEN, TemplateFamily
from afield.conformance.runner import check
from afield.settings.environment import Environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


ON_QWEN = ("claude-code", "codex", "langgraph", "google-adk")
RUNS = [(name, CHATML) for name in CLIENTS] + [(name, QWEN) for name in ON_QWEN]


@pytest.mark.parametrize(("name", "family"), RUNS, ids=[f"{name}-{family.name}" for name, family in RUNS])
def test_what_the_client_sampled_is_recorded_once_and_exactly(
    name: str, family: TemplateFamily, tmp_path: Path
):
    cache = Environment.read().envs
    verdict = asyncio.run(check(CLIENTS[name], cache, tmp_path / name, os.environ["PATH"], family))
    skipped = [problem for problem in verdict.problems if problem.startswith("skipped: ")]
    if skipped and not os.environ.get("CI"):
        pytest.skip(skipped[0])
    assert verdict.problems == ()
    assert verdict.matched == verdict.calls
    assert verdict.duplicates == 0
