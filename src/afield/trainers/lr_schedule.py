"""Learning-rate schedules: constant, linear and cosine decay after a warm-up."""

from __future__ import annotations

import math
from typing import NamedTuple

from afield.errors import UsageError
from afield.settings.trainer import LRScheduleName


class LRSchedule(NamedTuple):
    """Learning rate of each training step, as a multiple of the highest one."""

    name: LRScheduleName = "constant"
    """Shape of the schedule after the warm-up."""
    warmup_steps: int = 0
    """Steps of a linear warm-up; the last of them has the full rate."""
    total_steps: int | None = None
    """Steps of the whole run, at whose end a decay arrives; None for a constant rate."""
    min_ratio: float = 0.0
    """Multiple at which a decay ends."""

    def check(self) -> None:
        """Refuse a decay without an end."""
        if self.name != "constant" and self.total_steps is None:
            raise UsageError(f"lr_schedule {self.name!r} needs the number of steps that it decays over")

    def factor(self, step: int) -> float:
        """Multiple of the learning rate in a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant" or self.total_steps is None:
            return 1.0
        # The step after the last one has the smallest rate, so that every step trains.
        progress = min((step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1), 1.0)
        left = 1.0 - progress if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * left
