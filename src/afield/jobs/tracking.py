"""Tracking: sends the metrics of a run to experiment trackers.

1. Each tracker has a thread of its own, so that a slow one delays neither training nor the others.
2. `trackers.json` in the run directory keeps the id of each tracker's run, and what was sent. A resumed run
   continues it, and sends the lines of metrics.jsonl that were not sent.
3. Whatever a tracker raises is logged, counted and shown at the end; the run goes on.
"""

from __future__ import annotations

import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from afield import factory
from afield.jobs.evaluation import EvalSummary
from afield.orchestrator.state import RunDirectory
from afield.settings.train import RuntimeTables, TrainConfig
from afield.trackers.base import RunStatus, TrackedRun, Tracker
from afield.utils.durable_files import write_whole

log = logging.getLogger(__name__)
FILE = "trackers.json"
CLOSE_TIMEOUT_S = 30.0
"""Seconds that a tracker has at the end of a run to send what is left."""
RESTART_S = 30.0
"""Seconds between two attempts to open a tracker that refused."""
MAX_QUEUED = 10_000
"""Records that wait for a tracker; further ones are counted as failed."""
SECRET = re.compile(r"(^|_)(key|secret|password|passwd|token|credentials|authorization)$", re.IGNORECASE)
HIDDEN = "(not sent)"


class TrackerState(Struct, kw_only=True):
    """State of one tracker, in trackers.json."""

    id: str = ""
    """Id of the run in the tracker; empty before it was opened."""
    step: int = 0
    """Last step whose metrics were sent."""
    validations: int = 0
    """Validations that were sent."""
    sent: int = 0
    """Records that were sent."""
    failed: int = 0
    """Records that could not be sent, and failed attempts to open or close the tracker's run."""
    error: str = ""
    """Last error; empty without one."""


class MetricsRecord(Struct, frozen=True):
    """Metrics to send."""

    metrics: dict[str, float]
    """Values by name."""
    step: int
    """Step that they belong to."""
    validations: int = 0
    """Validations that are sent with this record."""


class TrackerThread:
    """Sends records to one tracker, in order."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        state: TrackerState,
        save: Callable[[], None],
    ) -> None:
        self.name = name
        self.state = state
        self._make = make
        self._run = run
        self._save = save
        self._tracker: Tracker | None = None
        self._retry_at = 0.0
        self._status: RunStatus = "finished"
        self._queue: queue.Queue[MetricsRecord | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, record: MetricsRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._count(f"{MAX_QUEUED} records wait to be sent")

    def close(self, status: RunStatus, timeout_s: float) -> None:
        """Send what is left, for at most `timeout_s`."""
        self._status = status
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._count(f"{MAX_QUEUED} records wait to be sent")
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._count(f"{self._queue.qsize() + 1} records were not sent within {timeout_s:g} s")
        self._save()

    def _work(self) -> None:
        self._open()
        while (record := self._queue.get()) is not None:
            if self._tracker is None and time.monotonic() >= self._retry_at:
                self._open()
            self._send(record)
            self._save()
        if self._tracker is not None:
            try:
                self._tracker.finish(self._status)
            except Exception as error:
                self._count(f"{type(error).__name__}: {error}")

    def _open(self) -> None:
        try:
            tracker = self._make()
            self.state.id = tracker.start(self._run, self.state.id)
        except Exception as error:
            self._retry_at = time.monotonic() + RESTART_S
            self._count(f"{type(error).__name__}: {error}")
            return
        self._tracker = tracker
        self._save()

    def _send(self, record: MetricsRecord) -> None:
        if self._tracker is None:
            self._count(self.state.error)
            return
        try:
            self._tracker.log(record.metrics, record.step)
        except Exception as error:
            self._count(f"{type(error).__name__}: {error}")
            return
        self.state.sent += 1
        if record.validations:
            self.state.validations += record.validations
        else:
            self.state.step = record.step

    def _count(self, error: str) -> None:
        error = (error.strip().splitlines() or ["no message"])[0][:500]
        if error != self.state.error:
            log.warning("tracker: not sent tracker=%s run=%s error=%s", self.name, self._run.name, error)
        self.state.failed += 1
        self.state.error = error


class Tracking:
    """Trackers of one run; a context in which `start` opens them. Without trackers nothing happens."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, kind: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        self._config = config
        self._run = run
        self._kind = kind
        self._close_timeout_s = close_timeout_s
        self._states = read_states(run.path)
        self._threads: list[TrackerThread] = []
        self._lock = threading.Lock()
        self._queued: dict[str, int] = {}  # validations that were given to each tracker

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        status: RunStatus = (
            "finished" if kind is None else "failed" if issubclass(kind, Exception) else "stopped"
        )
        self.close(status)

    def close(self, status: RunStatus) -> None:
        """Send what is left and close the trackers' runs. Repeating is harmless."""
        threads, self._threads = self._threads, []
        if threads:
            self._catch_up_validations(threads)
        for thread in threads:
            thread.close(status, self._close_timeout_s)
        for line in describe_failures({thread.name: thread.state for thread in threads}):
            log.warning("tracker: %s", line)

    def start(self) -> None:
        """Open the trackers' runs, and send what an earlier process did not."""
        for name in self._config.track:
            state = self._states.setdefault(name, TrackerState())
            run = TrackedRun(
                name=self._config.track_name or self._run.id,
                project=self._config.track_project,
                kind=self._kind,
                directory=self._run.path,
                uri=self._config.track_uri.get(name, ""),
                config=public_settings(self._config),
                step=state.step,
            )
            make = factory.tracker(name)
            self._threads.append(TrackerThread(name, make, run, state, self._save))
        if not self._threads:
            return
        lines = self._run.read_metrics()
        for thread in self._threads:
            sent = min(thread.state.step, len(lines))
            for line in lines[sent:]:
                thread.put(MetricsRecord(step_values(line), line["step"]))
        self._catch_up_validations(self._threads)

    def step_done(self, line: Struct) -> None:
        """Send the metrics of a step, and the validations since the last one."""
        if not self._threads:
            return
        values = msgspec.to_builtins(line)
        for thread in self._threads:
            thread.put(MetricsRecord(step_values(values), values["step"]))
        self._catch_up_validations(self._threads)

    def evaluated(self, summary: EvalSummary) -> None:
        """Send the result of an evaluation."""
        for thread in self._threads:
            thread.put(MetricsRecord(evaluation_values(summary), 0))

    def _catch_up_validations(self, threads: Sequence[TrackerThread]) -> None:
        """Send validations that were written since; the process that collects may be another one."""
        lines = self._run.read_validation()
        for thread in threads:
            queued = self._queued.setdefault(thread.name, thread.state.validations)
            for line in lines[queued:]:
                values = {f"validation/{name}": value for name, value in step_values(line).items()}
                values.pop("validation/step", None)
                thread.put(MetricsRecord(values, line["step"], validations=1))
            self._queued[thread.name] = max(queued, len(lines))

    def _save(self) -> None:
        with self._lock:
            text = msgspec.json.format(msgspec.json.encode(self._states))
            try:
                write_whole(self._run.path / FILE, text)
            except OSError as error:
                log.warning("tracker: state not saved run=%s error=%s", self._run.id, error)


def read_states(directory: Path) -> dict[str, TrackerState]:
    """State of a run's trackers by name; empty without any."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=dict[str, TrackerState])
    except (OSError, msgspec.MsgspecError):
        return {}


def describe_failures(states: Mapping[str, TrackerState]) -> list[str]:
    """Messages, one for each tracker that failed."""
    return [
        f"{name} failed {state.failed} times and got {state.sent} records; last error: {state.error}"
        for name, state in states.items()
        if state.failed
    ]


def step_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a line of metrics.jsonl or validation.jsonl, with `/` between tables.

    Tables of texts, such as the reasons of dropped groups, count their entries. Other texts are left out.
    """
    values: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            texts = any(isinstance(part, str) for part in value.values())
            inner = {name: float(len(value))} if texts or name == "dropped_groups" else {}
            inner = inner or {f"{name}/{key}": v for key, v in step_values(value).items()}
            values |= inner
        elif isinstance(value, int | float) and math.isfinite(value):
            values[name] = float(value)
    return values


def evaluation_values(summary: EvalSummary) -> dict[str, float]:
    """Numbers of an evaluation: mean reward and pass@k with intervals, and counts."""
    estimates = {f"pass_at_{k}": estimate for k, estimate in summary.pass_at.items()}
    if summary.reward is not None:
        estimates["reward"] = summary.reward
    values: dict[str, float] = {}
    for name, estimate in estimates.items():
        bounds = {f"{name}": estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        values |= {f"eval/{key}": value for key, value in bounds.items() if value is not None}
    for name in ("tasks", "attempts", "requested", "sampled_tokens", "seconds"):
        if (value := getattr(summary, name)) is not None:
            values[f"eval/{name}"] = float(value)
    return values | {f"eval/left_out/{what}": float(n) for what, n in summary.left_out.items()}


def public_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings by dotted key, without secrets: no runtime tables, passwords in addresses, or keys."""
    values = msgspec.to_builtins(config)
    for table in RuntimeTables.__struct_fields__:
        del values[table]
    return dict(_flat(values))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}.")
        elif SECRET.search(key) and value:
            flat.append((prefix + key, HIDDEN))
        elif isinstance(value, str) and "://" in value:
            flat.append((prefix + key, _without_password(value)))
        else:
            flat.append((prefix + key, value))
    return flat


def _without_password(text: str) -> str:
    """Address without user, password and query."""
    head, _, address = text.rpartition("://")
    parts = urlsplit(f"//{address}")
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return HIDDEN
    return f"{head}://{parts.hostname or ''}{port}{parts.path}"
