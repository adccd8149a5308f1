"""`afield`, with a trainer for bench/chaos.py: its weights are the ids of the rollouts it learnt from.

So the last checkpoint tells, whatever was killed on the way, what was learnt and how often. A step takes
the seconds that CHAOS_STEP_S says, so that kills meet it half done. Everything else is the product's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chaos_audit import LEARNT
from chaos_parts import NOTES, STEP_S

from afield import factory
from afield.cli.main import main
from afield.interfaces import StepReport, Trainer
from afield.trainers.model_directory import replaced
from afield.types import Group


class Remembering:
    context: int | None = None

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._learnt: list[str] = []

    def step(self, groups: Sequence[Group]) -> StepReport:
        trained = [f for g in groups for f in g.finished if f.outcome.reward_or_floor(0.0) is not None]
        half = len(trained) // 2
        note("began")
        self._learnt += [f.rollout.id for f in trained[:half]]
        time.sleep(self._step_s)
        self._learnt += [f.rollout.id for f in trained[half:]]
        note("ended")
        return StepReport(rollouts=len(trained), tokens=sum(t.owned for f in trained for t in f.trajectories))

    def export(self, directory: Path) -> None:
        with replaced(directory) as fresh:
            (fresh / LEARNT).write_text(json.dumps(self._learnt))

    def save(self, directory: Path) -> None:
        self.export(directory)

    def restore(self, directory: Path) -> None:
        self._learnt = json.loads((directory / LEARNT).read_text())


def note(what: str) -> None:
    with Path(os.environ[NOTES]).open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time()}) + "\n")


def remembering(*_: object) -> Trainer:
    return Remembering(float(os.environ[STEP_S]))


if __name__ == "__main__":
    factory.trainer = remembering
    sys.exit(main())
