"""Verifiers that break in the places where they really run are followed by others, in places of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.orchestrator.test_verifier import half, hand_in, verified_collection

from afield.runtimes.process import ProcessRuntime
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.runtimes import SandboxOptions
from afield.types import Attempt, FailureKind
from support.processes import AGENTS
from support.sandboxes import needs_bubblewrap

pytestmark = pytest.mark.anyio
GRADER = f"{AGENTS / 'grading.py'}:grade"


class Processes(ProcessRuntime):
    def __init__(self, logs: Path) -> None:
        super().__init__(GRADER, log_dir=logs, workers=1, fresh=True)
        self.launched: list[Attempt] = []

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        self.launched.append(attempt)
        await super().launch(attempt, {**payload, "nth": len(self.launched)})


class Sandboxes(SandboxRuntime):
    def __init__(self, logs: Path) -> None:
        super().__init__(GRADER, SandboxOptions(), log_dir=logs)
        self.launched: list[Attempt] = []

    async def launch(self, attempt: Attempt, payload: dict[str, Any]) -> None:
        self.launched.append(attempt)
        await super().launch(attempt, {**payload, "nth": len(self.launched)})


@pytest.mark.parametrize("place", [Processes, pytest.param(Sandboxes, marks=needs_bubblewrap)])
async def test_a_verifier_that_raises_dies_or_hangs_is_followed_by_one_that_grades(
    tmp_path: Path, place: type[Processes | Sandboxes]
) -> None:
    plan = {
        "deliver": "gateway",
        "separate_verifier": True,
        "rollouts": 1,
        "quorum": 1,
        "verifier_timeout_s": 5.0,
        "attempt_timeout_s": 50.0,
    }
    async with (
        verified_collection(tmp_path, hand_in, half) as (b, _),
        place(tmp_path / "logs") as verifiers,
    ):
        groups = await b.collect(**plan, verifiers=verifiers, retries={FailureKind.VERIFIER: 3})
        (one,) = groups[0].finished
        state = await b.up.client.state(one.outcome.session_id)
        left = [live for live in await verifiers.list() if live.phase in ("starting", "running")]
    assert (one.outcome.reward, one.attempts, len(one.turns)) == (0.5, 1, 1)
    assert [attempt.n for attempt in verifiers.launched] == [1, 1001, 2001, 3001]
    assert "no answer sheet" in state.failed_verdicts[0].message
    assert not left


@pytest.mark.parametrize("place", [Processes, pytest.param(Sandboxes, marks=needs_bubblewrap)])
async def test_broken_verifiers_are_reported_as_verifier_failures(
    tmp_path: Path, place: type[Processes | Sandboxes]
) -> None:
    plan = {
        "deliver": "gateway",
        "separate_verifier": True,
        "rollouts": 1,
        "quorum": 1,
        "attempt_timeout_s": 50.0,
    }
    async with (
        verified_collection(tmp_path, hand_in, half) as (b, _),
        place(tmp_path / "logs") as verifiers,
    ):
        groups = await b.collect(**plan, verifiers=verifiers, retries={FailureKind.VERIFIER: 1})
    (one,) = groups[0].finished
    failure = one.outcome.failure
    assert failure and failure.kind is FailureKind.VERIFIER and one.attempts == 1
    assert "exit code 3" in failure.message and len(verifiers.launched) == 2
