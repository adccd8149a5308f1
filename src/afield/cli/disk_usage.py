"""`afield cleanup`: disk usage of runs and removal of their data."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from afield.cli.train import saved_config
from afield.errors import UsageError
from afield.orchestrator.state import RunDirectory, find_run
from afield.settings.environment import Environment

PARTS = ("rollouts", "checkpoints", "weights", "spool", "gateway", "outcomes", "logs", "validation")
KEPT_STEPS = 3
UNITS = ("B", "kB", "MB", "GB", "TB")


class Usage(Struct, frozen=True, kw_only=True):
    """Disk use of one run."""

    run: str
    """Name of the run."""
    bytes: dict[str, int]
    """Bytes of each part of the run's directory, and of the whole as `total`."""
    removed: dict[str, int | list[int] | list[str]] = {}
    """Removed data: step numbers for `rollouts`, number of sessions for `store`, names for `queues`."""


class Choice(Struct, frozen=True, kw_only=True):
    """Data to remove."""

    rollouts: bool = False
    """Rollouts of all steps but the newest three."""
    store: bool = False
    """Sessions that are over, in the store of the run's own gateway; the file shrinks."""
    queues: bool = False
    """SQS queues that were made for the run's experiment."""

    @property
    def any(self) -> bool:
        return self.rollouts or self.store or self.queues


def run_usage(name: str | None, choice: Choice) -> list[Usage]:
    """Remove the chosen data of one run or of all; returns the disk usage after it."""
    runs = Environment.read().runs
    if choice.any and name is None:
        raise UsageError("say which run to remove something of: afield cleanup RUN --rollouts")
    found = (
        [find_run(runs, name)] if name else [RunDirectory(p.parent) for p in sorted(runs.glob("*/run.json"))]
    )
    usages: list[Usage] = []
    for run in found:
        removed = remove(run, choice) if choice.any else {}
        usages.append(Usage(run=run.id, bytes=sizes(run), removed=removed))
    return usages


def remove(run: RunDirectory, choice: Choice) -> dict[str, int | list[int] | list[str]]:
    """Remove the chosen data of a run; refuses a run that is in use."""
    from afield import factory

    removed: dict[str, int | list[int] | list[str]] = {}
    with run.locked("collect", "learn"):
        if choice.rollouts:
            removed["rollouts"] = run.prune_rollouts(0, keep_steps=KEPT_STEPS)
        store = run.gateway / "gateway.sqlite"
        if choice.store and store.exists():
            removed["store"] = factory.remove_ended_sessions(store)
        if choice.queues:
            removed["queues"] = asyncio.run(_remove_queues(run))
    return removed


async def _remove_queues(run: RunDirectory) -> list[str]:
    from afield import factory

    config = saved_config(run)
    notifier: Any = getattr(factory.transport(config, run), "notifier", None)
    if not hasattr(notifier, "remove_queues"):
        return []
    async with notifier:
        return await notifier.remove_queues(config.exp_id or run.id)


def sizes(run: RunDirectory) -> dict[str, int]:
    parts = {part: _size(run.path / part) for part in PARTS}
    return {**{part: size for part, size in parts.items() if size}, "total": _size(run.path)}


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # removed since it was listed
                total += (Path(folder) / name).lstat().st_size
    return total


def lines(usages: Sequence[Usage]) -> list[str]:
    """Lines to print: runs by size, the largest first, and the free disk space."""
    told: list[str] = []
    for usage in sorted(usages, key=lambda one: -one.bytes["total"]):
        parts = [f"{part} {human(size)}" for part, size in usage.bytes.items() if part != "total"]
        told.append(f"{usage.run}  {human(usage.bytes['total'])}  ({', '.join(parts) or 'nothing large'})")
        for what, which in usage.removed.items():
            unit = {"rollouts": "steps", "store": "sessions", "queues": "queues"}[what]
            number = which if isinstance(which, int) else len(which)
            told.append(f"{usage.run}  removed {number} {unit}")
    if usages:
        with suppress(OSError):
            free = shutil.disk_usage(Environment.read().runs).free
            told.append(f"{human(sum(one.bytes['total'] for one in usages))} in all, {human(free)} free")
    return told


def human(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {UNITS[unit]}" if unit else f"{size:g} {UNITS[0]}"
