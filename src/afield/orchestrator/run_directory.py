"""A run on disk: where everything lies, and the records people read.

    runs/<id>/
      run.json          the values it was started with, for --resume
      tasks.jsonl       the tasks, each with its id and input
      metrics.jsonl     one line per step
      rollouts/         step-0001.jsonl: one line per rollout, with outcome, turns and trajectories
      checkpoints/      step-0001/: all the trainer needs to go on; the newest few are kept
      weights/          v1/: what the engine loads
      validation/       step-0010.jsonl: the rollouts of a validation; validation.jsonl has a line for each
      ledger.sqlite     attempts, finished rollouts, groups, what was trained at which step
      spool/            finished rollouts until a step has taken them
      sessions.sqlite   the roster: which sessions run now, and where
      gateway/ outcomes/ logs/ verifiers/
      summary.json rewards.png

A step is done when its checkpoint directory has its name; everything else can be brought back to it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import re
import shutil
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from afield.durable_files import write_whole
from afield.errors import DamagedFile, UsageError
from afield.private_files import private_directory
from afield.types import RolloutResult, Task

log = logging.getLogger("afield.run")
STEP_STATE_FILE = "state.json"
T = TypeVar("T")


class StepState(Struct, frozen=True):
    """Beside a checkpoint: which step it ends, which policy it is, what it learnt from."""

    step: int
    version: int
    trained_rollouts: tuple[str, ...]
    metrics: dict[str, Any]
    groups: tuple[str, ...] = ()


class RunDirectory:
    """`durable`: what is written survives a power cut, too, at the price of an fsync per file."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path.absolute()
        self.durable = durable
        self._identity: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "run.json"

    @property
    def tasks(self) -> Path:
        return self.path / "tasks.jsonl"

    @property
    def run_state(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def rollout_store(self) -> Path:
        return self.path / "spool"

    @property
    def limiter(self) -> Path:
        return self.path / "limiter.sqlite"

    @property
    def sessions(self) -> Path:
        """The roster of what runs."""
        return self.path / "sessions.sqlite"

    @property
    def gateway(self) -> Path:
        return self.path / "gateway"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to lose: learning begins by writing its metrics, empty as they are, and
        collecting leaves rollouts in the spool."""
        return self.metrics.exists() or self.rollout_store.exists()

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "rewards.png"

    @contextmanager
    def locked(self, *parts: str, wait: bool = False) -> Generator[None]:
        """One process at a time works on each part of a run."""
        with ExitStack() as locks:
            for part in parts:
                try:
                    private_directory(self.path, (self.config.name, self.run_state.name))
                    lock = locks.enter_context((self.path / f"{part}.lock").open("w"))
                except OSError as error:
                    told = f"a run cannot be kept in {self.path}: {error}"
                    raise UsageError(f"{told}; AFIELD_RUNS names another place for runs") from error
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError as error:
                    raise UsageError(
                        f"another process is working on run {self.id}: wait for it or stop it"
                    ) from error
            self._identity = _identity_of(self.path)
            yield

    def check_present(self) -> None:
        """Whether the directory is still the one that was locked; else an error that says what is lost."""
        if self._identity is not None and _identity_of(self.path) != self._identity:
            raise UsageError(
                f"the run's directory {self.path} was removed or replaced while the run was going on:"
                " checkpoints, rollouts and weights in it are lost; start the run again"
            )

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:04d}"

    def weights(self, version: int) -> Path:
        return self.path / "weights" / f"v{version}"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step:04d}.jsonl"

    # --- checkpoints -----------------------------------------------------------------------------

    def last_state(self) -> StepState | None:
        """The newest step that is done. Of a damaged checkpoint, that of the one before."""
        while steps := self._checkpoints():
            path = self.checkpoint(steps[-1]) / STEP_STATE_FILE
            try:
                return msgspec.json.decode(path.read_bytes(), type=StepState)
            except (OSError, msgspec.MsgspecError) as error:
                self.quarantine(steps[-1], f"{path} cannot be read: {error}")
        return None

    def quarantine(self, step: int, reason: str) -> None:
        """Keep a damaged checkpoint under another name, so that the one before is the newest."""
        older = [known for known in self._checkpoints() if known < step]
        if not older:
            raise DamagedFile(
                f"checkpoint {self.checkpoint(step)} is damaged ({reason}) and there is no older one;"
                " restore it from a copy, or start a new run"
            )
        damaged = self.checkpoint(step).with_name(f"step-{step:04d}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        self.checkpoint(step).rename(damaged)
        log.warning(
            "checkpoint of step %d is damaged: %s; it is kept as %s, and the run goes on from step %d",
            *(step, reason, damaged.name, older[-1]),
        )

    def _checkpoints(self) -> list[int]:
        found = (self.path / "checkpoints").glob("step-*")
        steps = [re.fullmatch(r"step-(\d+)", path.name) for path in found]
        return sorted(int(step[1]) for step in steps if step)

    def prune(self, *, keep_checkpoints: int, keep_weights: int | None) -> None:
        for step in self._checkpoints()[:-keep_checkpoints]:
            _remove(self.checkpoint(step))
        if keep_weights is not None:
            found = (self.path / "weights").iterdir()
            versions = sorted(int(p.name[1:]) for p in found if re.fullmatch(r"v\d+", p.name))
            for version in versions[:-keep_weights]:
                _remove(self.weights(version))

    def prune_rollouts(self, most: int, *, least: int) -> list[int]:
        """Remove the oldest steps' rollouts while all have over `most` bytes; the newest `least` stay."""
        sizes = {step: self.rollouts(step).stat().st_size for step in self.steps()}
        total, removed = sum(sizes.values()), []
        for step in list(sizes)[: max(0, len(sizes) - least)]:
            if total <= most:
                break
            self.rollouts(step).unlink()
            total -= sizes[step]
            removed.append(step)
        return removed

    # --- records ---------------------------------------------------------------------------------

    def _write(self, path: Path, data: bytes) -> None:
        write_whole(path, data, durable=self.durable)

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """A line that a crash cut short is left out; its step is in its checkpoint."""
        return _whole_lines(self.metrics)

    def rewind(self, state: StepState | None) -> None:
        """Drop what was written about steps that are not done, and add what is missing of the last one."""
        done = state.step if state else 0
        kept = [line for line in self.read_metrics() if line["step"] < done]
        lines = [*kept, *([state.metrics] if state else [])]
        self._write(self.metrics, "".join(json.dumps(line) + "\n" for line in lines).encode())
        for step in self.steps():
            if step > done:
                self.rollouts(step).unlink()

    def write_tasks(self, tasks: Iterable[Task]) -> None:
        self._write(self.tasks, b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))

    def read_tasks(self) -> list[Task]:
        return _read_lines(self.tasks, Task)

    def write_rollouts(self, step: int, finished: Iterable[RolloutResult]) -> None:
        lines = [msgspec.json.encode(f) for f in finished]
        self.rollouts(step).parent.mkdir(exist_ok=True)
        self._write(self.rollouts(step), b"".join(line + b"\n" for line in lines))

    def write_validation(self, line: dict[str, Any], finished: Iterable[RolloutResult]) -> None:
        """Once for a step; a validation that was written already is left as it is."""
        if line["step"] in {known["step"] for known in self.read_validation()}:
            return
        folder = self.path / "validation"
        folder.mkdir(exist_ok=True)
        data = b"".join(msgspec.json.encode(f) + b"\n" for f in finished)
        self._write(folder / f"step-{line['step']:04d}.jsonl", data)
        with (self.path / "validation.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def read_validation(self) -> list[dict[str, Any]]:
        return _whole_lines(self.path / "validation.jsonl")

    def read_rollouts(self, step: int) -> list[RolloutResult]:
        return _read_lines(self.rollouts(step), RolloutResult)

    def steps(self) -> list[int]:
        """Steps with rollouts on disk."""
        found = (self.path / "rollouts").glob("step-*.jsonl")
        return sorted(int(path.stem.removeprefix("step-")) for path in found)


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read_lines(path: Path, kind: type[T]) -> list[T]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DamagedFile(f"cannot read {path}: {error}; restore it from a copy, or start anew") from error
    records: list[T] = []
    for number, line in enumerate(lines, 1):
        try:
            records += [msgspec.json.decode(line, type=kind)] if line else []
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problem = f"{path} is damaged in line {number}: {error}"
            raise DamagedFile(f"{problem}; restore the file from a copy, or start anew") from error
    return records


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _remove(directory: Path) -> None:
    """Renamed first, so that nobody takes a half-removed one for whole."""
    going = directory.with_name(directory.name + ".removed")
    shutil.rmtree(going, ignore_errors=True)
    directory.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def find_run(runs: Path, name: str, kind: str = "") -> RunDirectory:
    """A run by its id or path; `latest` is the newest of its kind under `runs`."""
    if name == "latest":
        found = sorted(runs.glob(f"{kind}*/run.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UsageError(f"there is no run under {runs} yet: start one with `afield demo`")
        return RunDirectory(found[-1].parent)
    for path in (Path(name), runs / name):
        if (path / "run.json").exists():
            return RunDirectory(path)
    known = sorted(path.parent.name for path in runs.glob("*/run.json"))
    choices = f"; under {runs} there are: {', '.join(known)}" if known else f"; there are none under {runs}"
    raise UsageError(f"unknown run {name!r}{choices}")
