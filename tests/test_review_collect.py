"""Collecting under bad luck: threads that share a ledger, waits that must end, what a restart does again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from afield.errors import Unavailable
from afield.ledger import Ledger
from afield.types import Attempt

pytestmark = pytest.mark.anyio


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
