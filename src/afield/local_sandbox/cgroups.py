"""Control groups (v2 or v1): CPU, memory and process limits per sandbox.

1. Groups are created below this process's own group and stay within its limits.
2. Group names contain process id and start time of their creator. The next creator removes groups of dead
ones.
3. If no group can be created, `kinds` is empty and this module limits nothing.
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
OWN_PIDS = 2  # init process of the sandbox, and the supervising process of a command


class Groups:
    """Factory of control groups.

    `homes` maps each kind of limit to its parent directory; with version 2 all kinds share one.
    """

    def __init__(self, homes: dict[str, Path], version: int) -> None:
        self._homes = homes
        self._version = version
        self._name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of limits that can be enforced: cpu, memory, pids."""
        return tuple(self._homes)

    def sweep(self) -> None:
        """Remove groups of dead creators, and kill the processes in them."""
        for home in set(self._homes.values()):
            for left in home.glob(f"{PREFIX}*"):
                pid, _, when = left.name.removeprefix(PREFIX).partition("-")
                if pid.isdigit() and start_time(int(pid)) != when:
                    _clear(left)

    def make(self, name: str, limits: ResourceLimits) -> Group:
        """Create a group with limits."""
        places = {kind: home / self._name / name for kind, home in self._homes.items()}
        for kind, place in places.items():
            place.mkdir(parents=True, exist_ok=True)
            if self._version == 2:
                _delegate(place.parent, [kind])
        group = Group(places, self._version)
        group.limit(limits)
        return group

    def close(self) -> None:
        """Remove all groups of this process, and kill the processes in them."""
        for home in set(self._homes.values()):
            _clear(home / self._name)


class Group(Struct, frozen=True):
    """Control group of one sandbox."""

    places: dict[str, Path]
    """Directory of the group for each kind of limit."""
    version: int
    """Version of the control group hierarchy, 1 or 2."""

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
            # socket buffers are counted separately
            self._set("memory", "memory.kmem.tcp.limit_in_bytes", memory)
        self._set("pids", "pids.max", limits.pids and limits.pids + OWN_PIDS)

    def add(self, pid: int) -> None:
        for place in set(self.places.values()):
            (place / "cgroup.procs").write_text(str(pid))

    def notes(self) -> tuple[bool, tuple[str, ...]]:
        """Report limits that were reached.

        Returns whether the kernel killed a process for lack of memory, and messages.
        """
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
        """Number of processes in the group."""
        place = next(iter(self.places.values()), None)
        with contextlib.suppress(OSError):
            return len((place / "cgroup.procs").read_text().split()) if place else 0
        return 0

    def remove(self) -> bool:
        """Remove the group; returns False while processes in it are still ending."""
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
        # Kernels may lack accounting of swap and socket buffers; all other files exist.
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
    """Find the hierarchies in which this process can create groups."""
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
    """Directory for new groups: this process's group, or its parent if it cannot have limited subgroups.

    A version 2 group with processes in it cannot have limited subgroups.
    """
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
    """Root, mount point, type and options from a line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, kinds = before.split(), after.split()
    return fields[3], fields[4], kinds[0], kinds[-1].split(",")


def _beneath(path: str, root: str) -> str:
    return path.removeprefix(root if root != "/" else "").lstrip("/")


def _clear(place: Path) -> None:
    """Remove a group and its subgroups, and kill the processes in them."""
    for directory, _, _ in os.walk(place, topdown=False):
        with contextlib.suppress(OSError, ValueError):
            for pid in (Path(directory) / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path(directory).rmdir()
