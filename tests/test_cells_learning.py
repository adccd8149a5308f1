"""Sandboxes are forked from a parent that learns what they import late, and nothing else."""

from pathlib import Path

import pytest

from afield.options import SandboxOptions
from afield.runtimes.sandbox import SandboxRuntime
from afield.seams.runtime import Exit
from afield.transports.files import FilesTransport
from agents.places import Place
from agents.sink import Sink
from isolation import needs_bubblewrap

pytestmark = [pytest.mark.anyio, needs_bubblewrap]
LATE = f"{Path(__file__).parent / 'agents' / 'late_importer.py'}:agent"


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


async def test_what_the_first_one_imports_late_the_next_ones_find_imported(place: Place) -> None:
    assert await rewards(place, [{}] * 4) == [0.0, 1.0, 1.0, 1.0]


async def test_names_that_are_no_modules_do_no_harm(place: Place) -> None:
    assert await rewards(place, [{"lie": True}] * 3 + [{}] * 2) == [0.0] * 5
