"""Warm parents import what the agent's own code names, and nothing that a session says."""

from pathlib import Path

import pytest

from afield.interfaces.runtime import Exit
from afield.runtimes.sandbox import SandboxRuntime
from afield.settings.runtimes import SandboxOptions
from afield.transports.stores.files import FilesTransport
from agents.places import Place
from agents.sink import Sink
from support.paths import TESTS
from support.sandboxes import needs_bubblewrap

pytestmark = [pytest.mark.anyio, needs_bubblewrap]
LATE = f"{TESTS / 'agents' / 'late_importer.py'}:agent"


@pytest.fixture
async def place(tmp_path: Path):
    runtime = SandboxRuntime(LATE, SandboxOptions(), log_dir=tmp_path / "logs")
    async with FilesTransport(tmp_path / "store") as transport, Sink(transport).running() as sink, runtime:
        yield Place(runtime, transport, sink)


async def rewards(place: Place, rows: list[dict]) -> list[float | None]:
    told: list[float | None] = []
    for n, row in enumerate(rows):
        attempt = await place.launch(row, f"r{n}")
        assert await place.wait(attempt) == Exit()
        told.append(await place.reward(attempt))
    return told


async def test_what_an_agents_function_imports_is_imported_before_the_first_attempt(place: Place) -> None:
    assert await rewards(place, [{}] * 2) == [1.0, 1.0]


async def test_a_module_that_hangs_fails_or_ends_its_process_is_left_to_the_attempts(place: Place) -> None:
    """The agent names them all, in code that these attempts do not reach."""
    assert await rewards(place, [{"had": "fractions"}, {"had": "late_broken"}]) == [1.0, 0.0]


async def test_names_that_an_attempt_writes_make_the_parent_import_nothing(place: Place) -> None:
    lies = [{"lie": True}] * 3
    assert await rewards(place, [*lies, {"had": "sched"}, {"had": "idlelib"}]) == [1.0] * 3 + [0.0] * 2
