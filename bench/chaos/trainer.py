"""The `afield` command with a trainer that records which rollouts it learned from.

Its weights are the ids of those rollouts, so the last checkpoint shows what was trained and how often,
whatever was killed. A step takes CHAOS_STEP_S seconds, so that kills hit it halfway.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from afield import factory
from afield.cli.main import main
from afield.interfaces import StepReport, Trainer
from afield.trainers.model_directory import replaced
from afield.types import Group
from bench.chaos.audit import LEARNED
from bench.chaos.processes import NOTES, STEP_S


class RecordingTrainer:
    context: int | None = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._learned: list[str] = []

    def step(self, groups: Sequence[Group]) -> StepReport:
        trained = [f for g in groups for f in g.finished if f.outcome.reward_or_floor(0.0) is not None]
        half = len(trained) // 2
        note("began")
        self._learned += [f.rollout.id for f in trained[:half]]
        time.sleep(self._step_s)
        self._learned += [f.rollout.id for f in trained[half:]]
        note("ended")
        return StepReport(rollouts=len(trained), tokens=sum(t.owned for f in trained for t in f.trajectories))

    def export(self, directory: Path) -> None:
        with replaced(directory) as fresh:
            (fresh / LEARNED).write_text(json.dumps(self._learned))

    def save(self, directory: Path) -> None:
        self.export(directory)

    def restore(self, directory: Path) -> None:
        self._learned = json.loads((directory / LEARNED).read_text())


def note(event: str) -> None:
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps({"what": event, "at": time.time()}) + "\n")


def recording_trainer(*_: object) -> Trainer:
    return RecordingTrainer(float(os.environ[STEP_S]))


if __name__ == "__main__":
    factory.trainer = recording_trainer
    sys.exit(main())
