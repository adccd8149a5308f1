"""Memory of the collector over 20,000 simulated rollouts.

Outcomes are files, as with remote agents. After every step the resident memory and the number of objects that
Python's garbage collector tracks are sampled. Flat means that the last quarter of the run has no more than
the second.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from afield.orchestrator.state import RunDirectory
from afield.orchestrator.training_loop import StepMetrics
from afield.transports.stores.files import FilesTransport
from afield.utils.malloc import share_arena
from bench.collect.simulation.components import SimulatedTrainer
from bench.collect.simulation.run import Result, Setting, simulate

GROWTH = 0.05
PAGE = os.sysconf("SC_PAGESIZE")


class Sample(Struct, frozen=True):
    rollouts: int
    rss_mib: float
    objects: int


def watched(setting: Setting) -> tuple[Result, list[Sample]]:
    samples: list[Sample] = []

    def note(line: StepMetrics, record: RunDirectory, trainer: SimulatedTrainer) -> None:
        trainer.steps.clear()  # the bench's own records are not what is measured
        record.rollouts(line.step).unlink()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20
        done = line.step * setting.batch * setting.rollouts
        samples.append(Sample(done, round(resident, 1), len(gc.get_objects())))

    def files(directory: Path) -> FilesTransport:
        return FilesTransport(directory / "outcomes")

    return simulate(setting, transport=files, on_step=note), samples


def growth(samples: list[Sample], what: str) -> float:
    """How much more the last quarter holds than the second."""
    values = [getattr(sample, what) for sample in samples]
    quarter = len(values) // 4
    return median(values[-quarter:]) / median(values[quarter : 2 * quarter]) - 1


def measured(rollouts: int = 20_000) -> dict[str, Any]:
    share_arena()  # as the commands do
    began = time.monotonic()
    setting = Setting(mode="async", staleness=2, groups=rollouts // 8)
    _, samples = watched(setting)
    grown = {what: round(growth(samples, what), 4) for what in ("rss_mib", "objects")}
    return {
        "rollouts": rollouts,
        "growth": grown,
        "samples": [[s.rollouts, s.rss_mib, s.objects] for s in samples[:: max(1, len(samples) // 12)]],
        "ok": max(grown.values()) <= GROWTH,
        "seconds": round(time.monotonic() - began, 1),
    }
