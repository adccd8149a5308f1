"""Limits that the kernel keeps for a whole cell: control groups of version 2 or 1, whichever can be written.

Groups are made beneath the one this process is in, so that they stay within its own limits. Their names
tell who made them; those of a maker that is gone are removed by the next one. Where no group can be made
nothing is limited here, and `kinds` says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from msgspec import Struct

from afield.process_tree import start_time
from afield.settings.runtimes import ResourceLimits

KINDS = ("cpu", "memory", "pids")
PREFIX = "afield-cells-"
PERIOD_US = 100_000
OWN_PIDS = 2  # the first process of a cell, and whoever sees to a command's end


class Groups:
    """Made beneath `homes`: a directory for each kind; with version 2 it is the same one for all."""

    def __init__(self, homes: dict[str, Path], version: int) -> None:
        self._homes = homes
        self._version = version
        self._name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._homes)

    def sweep(self) -> None:
        """What makers left behind that are gone, with all that may still run in there."""
        for home in set(self._homes.values()):
            for left in home.glob(f"{PREFIX}*"):
                pid, _, when = left.name.removeprefix(PREFIX).partition("-")
                if pid.isdigit() and start_time(int(pid)) != when:
                    _clear(left)

    def make(self, name: str, limits: ResourceLimits) -> Group:
        places = {kind: home / self._name / name for kind, home in self._homes.items()}
        for kind, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            if self._version == 2:
                _delegate(place.parent, [kind])
        group = Group(places, self._version)
        group.limit(limits)
        return group

    def close(self) -> None:
        for home in set(self._homes.values()):
            _clear(home / self._name)


class Group(Struct, frozen=True):
    places: dict[str, Path]
    version: int

    def limit(self, limits: ResourceLimits) -> None:
        quota = None if limits.cpus is None else round(limits.cpus * PERIOD_US)
        memory = None if limits.memory_mb is None else limits.memory_mb * 2**20
        if self.version == 2:
            self._set("cpu", "cpu.max", quota and f"{quota} {PERIOD_US}")
            self._set("memory", "memory.max", memory)
            self._set("memory", "memory.swap.max", 0)
        else:
            self._set("cpu", "cpu.cfs_quota_us", quota)
            self._set("memory", "memory.limit_in_bytes", memory)
            self._set("memory", "memory.memsw.limit_in_bytes", memory)
            self._set("memory", "memory.kmem.tcp.limit_in_bytes", memory)  # what sockets hold counts apart
        self._set("pids", "pids.max", limits.pids and limits.pids + OWN_PIDS)

    def add(self, pid: int) -> None:
        for place in set(self.places.values()):
            (place / "cgroup.procs").write_text(str(pid))

    def notes(self) -> tuple[bool, tuple[str, ...]]:
        """Whether something was killed for want of memory; and what the limits had to prevent."""
        killed = self._count(
            "memory", "memory.events" if self.version == 2 else "memory.oom_control", "oom_kill"
        )
        forks = self._count("pids", "pids.events", "max")
        notes = []
        if killed:
            notes.append(f"out of memory: the limit memory_mb was reached, {killed} process(es) were killed")
        if forks:
            notes.append(f"the limit pids was reached; {forks} new process(es) or thread(s) were refused")
        return bool(killed), tuple(notes)

    def processes(self) -> int:
        """How many are in it."""
        place = next(iter(self.places.values()), None)
        with contextlib.suppress(OSError):
            return len((place / "cgroup.procs").read_text().split()) if place else 0
        return 0

    def remove(self) -> bool:
        """False while something in it still ends."""
        gone = True
        for place in set(self.places.values()):
            try:
                place.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone

    def _set(self, kind: str, name: str, value: object) -> None:
        if value is None or kind not in self.places:
            return
        # Swap and sockets may not be counted; the rest was seen to be writable.
        optional = any(word in name for word in ("swap", "memsw", "tcp"))
        try:
            (self.places[kind] / name).write_text(str(value))
        except OSError:
            if not optional:
                raise

    def _count(self, kind: str, name: str, key: str) -> int:
        with contextlib.suppress(OSError, KeyError, ValueError):
            for line in (self.places[kind] / name).read_text().splitlines():
                found, _, value = line.partition(" ")
                if found == key:
                    return int(value)
        return 0


def found(proc: Path = Path("/proc/self")) -> Groups:
    """What this machine lets us limit."""
    mounts = (proc / "mountinfo").read_text().splitlines()
    paths = _own_paths((proc / "cgroup").read_text())
    for line in mounts:
        root, place, kind, _ = _mount(line)
        if kind == "cgroup2" and (home := _version_2(Path(place), _beneath(paths.get("", "/"), root))):
            return Groups(dict.fromkeys(KINDS, home), 2)
    homes: dict[str, Path] = {}
    for line in mounts:
        root, place, kind, options = _mount(line)
        for name in KINDS if kind == "cgroup" else ():
            home = Path(place) / _beneath(paths.get(name, "/"), root)
            if name in options and name not in homes and _writable(home):
                homes[name] = home
    return Groups(homes, 1)


def _version_2(place: Path, path: str) -> Path | None:
    """Our own group, or the one above it: one with processes in it cannot have limited groups beneath."""
    own = place / path
    for home in (own, own.parent):
        if home.is_relative_to(place) and _writable(home):
            _delegate(home, KINDS)
            with contextlib.suppress(OSError):
                if set(KINDS) <= set((home / "cgroup.subtree_control").read_text().split()):
                    return home
    return None


def _delegate(place: Path, kinds: list[str] | tuple[str, ...]) -> None:
    control = place / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if missing := set(kinds) - set(control.read_text().split()):
            control.write_text(" ".join(f"+{kind}" for kind in missing))


def _writable(home: Path) -> bool:
    return os.access(home, os.W_OK) and (home / "cgroup.procs").exists()


def _own_paths(text: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, kinds, path = line.split(":", 2)
        paths.update(dict.fromkeys(kinds.split(","), path))
    return paths


def _mount(line: str) -> tuple[str, str, str, list[str]]:
    """Root, place, kind and options of a line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, kinds = before.split(), after.split()
    return fields[3], fields[4], kinds[0], kinds[-1].split(",")


def _beneath(path: str, root: str) -> str:
    return path.removeprefix(root if root != "/" else "").lstrip("/")


def _clear(place: Path) -> None:
    """A group and those beneath it; what still runs in there is killed."""
    for directory, _, _ in os.walk(place, topdown=False):
        with contextlib.suppress(OSError, ValueError):
            for pid in (Path(directory) / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
