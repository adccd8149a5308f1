"""Records of training steps for trainers that are not afield's.

Writes the lines of metrics.jsonl and validation.jsonl and the events of a run as `afield train` writes them,
so that `afield show`, `afield ui` and `afield why` see steps, the trainer and versions. veRL and TRL use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from afield.orchestrator.state import RunDirectory
from afield.orchestrator.step_totals import StepTotals
from afield.orchestrator.training_loop import account_metrics, wasted_tokens
from afield.runs.token_account import TokenAccount
from afield.types import Group, Split

KEPT_STEPS = 64
"""Newest steps whose groups still count in their line; with an asynchronous trainer, groups may end late."""


class _Step:
    """Totals of a step or validation, and what is known of its times."""

    def __init__(self) -> None:
        self.totals = StepTotals()
        self.account = TokenAccount()
        self.trained = self.wasted = 0
        self.versions: list[int] = []
        self.version: int | None = None
        self.extra: dict[str, Any] = {}
        self.began = time.monotonic()
        self.ended: float | None = None


class StepRecorder:
    """Writes steps, validations and events of one run. Thread-safe.

    A line that is known better later is written again; readers take the last line of a step.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._steps: dict[tuple[Split, int], _Step] = {}
        self._idle_since = time.monotonic()
        self._published: int | None = None
        self._last_trained = 0

    def add(
        self,
        step: int,
        group: Group,
        *,
        version: int | None,
        account: TokenAccount,
        trained: int = 0,
        dropped: str | None = None,
        wasted: int = 0,
    ) -> None:
        """Add a group of a step.

        `version` is the policy version that trains on it, None if engines do not report theirs; `trained`
        the number of its rollouts with rows; `wasted` the tokens of failed attempts.
        """
        with self._lock:
            found = self._step(group.split, step)
            found.totals.add(group, version=version, dropped=dropped)
            found.version = version
            found.account += account
            found.trained += trained
            found.wasted += wasted + wasted_tokens([group], {group.id: dropped} if dropped else {})
            spans = [span for f in group.finished for turn in f.turns for span in turn.versions]
            found.versions = [*found.versions, *(s.low for s in spans), *(s.high for s in spans)]
            found.versions = [min(found.versions), max(found.versions)] if found.versions else []
            if found.extra:  # the line is written already
                self._write(step, found, group.split)

    def begin(self, step: int, split: Split = Split.TRAIN) -> None:
        """Begin to count the seconds of collecting a step."""
        with self._lock:
            self._step(split, step)

    def collected(self, step: int, split: Split = Split.TRAIN, **extra: Any) -> None:
        """Write the line of a step whose groups have all ended; `extra` are fields of its trainer alone."""
        with self._lock:
            found = self._step(split, step)
            found.ended = time.monotonic()
            found.extra |= {"collect_s": round(found.ended - found.began, 3), **extra}
            self._write(step, found, split)

    def trained(self, step: int) -> None:
        """Record that the trainer has just ended a step, which it began when the step's groups had ended, or
        when the version before was published."""
        with self._lock:
            now = time.monotonic()
            found = self._steps.get((Split.TRAIN, step))
            ready = found.ended if found and found.ended is not None else self._idle_since
            seconds = now - max(ready, self._idle_since)
            self._idle_since, self._last_trained = now, step
            self._run.append_event("trained", value=step, seconds=seconds)
            if found is not None:
                found.extra["train_s"] = round(seconds, 3)
                self._write(step, found)

    def published(
        self, version: int, *, seconds: float = 0.0, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Record that engines serve a version since now; a version that is not newer was recorded before.

        `metrics` are those of the written weights, and belong to the step that was trained last.
        """
        with self._lock:
            if self._published is not None and version <= self._published:
                return
            self._published, self._idle_since = version, time.monotonic()
            self._run.append_event("published", value=version, seconds=seconds)
            if metrics and (found := self._steps.get((Split.TRAIN, self._last_trained))):
                found.extra["trainer"] = dict(metrics)
                self._write(self._last_trained, found)

    def _step(self, split: Split, step: int) -> _Step:
        if (split, step) not in self._steps:
            self._steps[split, step] = _Step()
            for old in list(self._steps)[:-KEPT_STEPS]:
                del self._steps[old]
        return self._steps[split, step]

    def _write(self, step: int, found: _Step, split: Split = Split.TRAIN) -> None:
        totals = found.totals
        if split is Split.VAL:
            self._run.append_validation(
                {
                    "step": step,
                    "versions": found.versions or None,
                    "reward": totals.reward,
                    "rollouts": totals.rollouts,
                    "failed": totals.failed,
                    "agent": totals.agent,
                }
            )
        if split is Split.VAL or not totals.rollouts:
            return
        self._run.append_metrics(
            {
                "step": step,
                "version": step if found.version is None else found.version + 1,
                "trained": found.trained,
                "wasted_tokens": found.wasted,
                "trainer": {},
                **totals.metrics(),
                **account_metrics(found.account),
                **found.extra,
            }
        )
