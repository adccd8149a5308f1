"""Collecting under bad luck: threads that share a ledger, waits that must end, what a restart does again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from afield.cli.main import main
from afield.errors import Unavailable
from afield.ledger import Ledger
from afield.rundir import RunDir
from afield.spool import Spool
from afield.types import Attempt, Finished, Outcome, Rollout, Task
from gateways import POLICY
from processes import AGENTS, write_tasks

pytestmark = pytest.mark.anyio


def rollout(name: str = "r", **rest: Any) -> Rollout:
    return Rollout(id=name, exp_id="exp", group_id="g", task=Task("t0", {"n": 0}), **rest)


def outcome(name: str = "r", attempt: int = 1) -> Outcome:
    return Outcome(rollout_id=name, attempt=attempt, reward=1.0)


# --- the ledger ----------------------------------------------------------------------------------


def test_one_ledger_may_be_written_by_the_loop_and_by_a_thread_at_once(tmp_path: Path) -> None:
    """A step is noted from a thread, in one transaction, while the loop notes attempts and groups."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        rollouts = [f"g-r{k}" for k in range(200)]
        errors: list[BaseException] = []

        def learn() -> None:
            try:
                for step in range(1, 40):
                    ledger.take(step, [f"t{step}"], [f"{r}-{step}" for r in rollouts])
            except BaseException as error:  # noqa: BLE001  told below
                errors.append(error)

        learning = threading.Thread(target=learn)
        learning.start()
        position = 0
        while learning.is_alive():
            ledger.admit(f"g{position}", position, 0)
            ledger.begin(Attempt(f"g{position}-r0", 1))
            ledger.ready(f"g{position}", [f"g{position}-r0"], None, None)
            position += 1
        learning.join()
        assert not errors
        assert len(ledger.trained()) == 39 * 200
        assert len(ledger.untaken()) == position


def test_a_ledger_that_cannot_be_written_says_so_with_the_remedy(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger._db.execute("PRAGMA max_page_count = 1")  # a disk without room
        ledger._db.execute("PRAGMA query_only = 1")
        with pytest.raises(Unavailable, match="make room"):
            ledger.begin(Attempt("r", 1))
        with pytest.raises(Unavailable):
            ledger.ready("g", ["r"], None, None)
        ledger._db.execute("PRAGMA query_only = 0")
        assert not ledger._db.in_transaction


# --- a run on disk -------------------------------------------------------------------------------


def test_what_a_collector_has_collected_survives_a_wrong_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFIELD_ADMIN_KEY", raising=False)
    write_tasks(tmp_path / "tasks.jsonl", [{"id": "q"}])
    made = ["train", f"{AGENTS / 'slow_agent.py'}:agent", "--tasks", "tasks.jsonl", "--model", str(POLICY)]
    made += ["--run", "one", "--gateway", "http://127.0.0.1:9"]
    assert main([*made, "--part", "collect"]) == 2  # no admin key
    run = RunDir(tmp_path / "runs" / "one")
    Spool(run.spool).put(Finished(rollout=rollout("one-e0-q-r0"), outcome=outcome("one-e0-q-r0")))
    assert main([*made]) == 2
    assert "AFIELD_ADMIN_KEY" in capsys.readouterr().err
    assert len(Spool(run.spool)) == 1
