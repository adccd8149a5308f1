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

from afield.settings.runtimes import ResourceLimits
from afield.utils.process_tree import start_time

KINDS = ("cpu", "memory", "pids")
PREFIX = "afield-sandboxes-"
PERIOD_US = 100_000
OWN_PIDS = 2  # init process of the sandbox, and the supervising process of a command


class CgroupParents:
    """Factory of control groups.

    `parents` maps each kind of limit to its parent directory; with version 2 all kinds share one.
    """

    def __init__(self, parents: dict[str, Path], version: int) -> None:
        self._parents = parents
        self._version = version
        self._name = f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of limits that can be enforced: cpu, memory, pids."""
        return tuple(self._parents)

    def remove_stale(self) -> None:
        """Remove groups of dead creators, and kill the processes in them."""
        for parent in set(self._parents.values()):
            for left in parent.glob(f"{PREFIX}*"):
                pid, _, when = left.name.removeprefix(PREFIX).partition("-")
                if pid.isdigit() and start_time(int(pid)) != when:
                    _remove_tree(left)

    def create(self, name: str, limits: ResourceLimits) -> Cgroup:
        """Create a group with limits."""
        directories = {kind: parent / self._name / name for kind, parent in self._parents.items()}
        for kind, directory in directories.items():
            directory.mkdir(parents=True, exist_ok=True)
            if self._version == 2:
                _delegate(directory.parent, [kind])
        group = Cgroup(directories, self._version)
        group.limit(limits)
        return group

    def close(self) -> None:
        """Remove all groups of this process, and kill the processes in them."""
        for parent in set(self._parents.values()):
            _remove_tree(parent / self._name)


class Cgroup(Struct, frozen=True):
    """Control group of one sandbox."""

    directories: dict[str, Path]
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
        for directory in set(self.directories.values()):
            (directory / "cgroup.procs").write_text(str(pid))

    def reached_limits(self) -> tuple[bool, tuple[str, ...]]:
        """Report limits that were reached.

        Returns whether the kernel killed a process for lack of memory, and messages.
        """
        killed = self._count(
            "memory", "memory.events" if self.version == 2 else "memory.oom_control", "oom_kill"
        )
        forks = self._count("pids", "pids.events", "max")
        reached_limits = []
        if killed:
            reached_limits.append(f"out of memory: limit memory_mb reached, {killed} process(es) killed")
        if forks:
            reached_limits.append(f"limit pids reached; {forks} new process(es) or thread(s) refused")
        return bool(killed), tuple(reached_limits)

    def processes(self) -> int:
        """Number of processes in the group."""
        directory = next(iter(self.directories.values()), None)
        with contextlib.suppress(OSError):
            return len((directory / "cgroup.procs").read_text().split()) if directory else 0
        return 0

    def remove(self) -> bool:
        """Remove the group; returns False while processes in it are still ending."""
        gone = True
        for directory in set(self.directories.values()):
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                gone = False
        return gone

    def _set(self, kind: str, name: str, value: object) -> None:
        if value is None or kind not in self.directories:
            return
        # Kernels may lack accounting of swap and socket buffers; all other files exist.
        optional = any(word in name for word in ("swap", "memsw", "tcp"))
        try:
            (self.directories[kind] / name).write_text(str(value))
        except OSError:
            if not optional:
                raise

    def _count(self, kind: str, name: str, key: str) -> int:
        with contextlib.suppress(OSError, KeyError, ValueError):
            for line in (self.directories[kind] / name).read_text().splitlines():
                find_groups, _, value = line.partition(" ")
                if find_groups == key:
                    return int(value)
        return 0


def find_groups(proc: Path = Path("/proc/self")) -> CgroupParents:
    """Find the hierarchies in which this process can create groups."""
    mounts = (proc / "mountinfo").read_text().splitlines()
    paths = _parse_cgroups((proc / "cgroup").read_text())
    for line in mounts:
        root, directory, kind, _ = _parse_mount(line)
        if kind == "cgroup2" and (parent := _version_2(Path(directory), _relative(paths.get("", "/"), root))):
            return CgroupParents(dict.fromkeys(KINDS, parent), 2)
    parents: dict[str, Path] = {}
    for line in mounts:
        root, directory, kind, options = _parse_mount(line)
        for name in KINDS if kind == "cgroup" else ():
            parent = Path(directory) / _relative(paths.get(name, "/"), root)
            if name in options and name not in parents and _writable(parent):
                parents[name] = parent
    return CgroupParents(parents, 1)


def _version_2(directory: Path, path: str) -> Path | None:
    """Directory for new groups: this process's group, or its parent if it cannot have limited subgroups.

    A version 2 group with processes in it cannot have limited subgroups.
    """
    own = directory / path
    for parent in (own, own.parent):
        if parent.is_relative_to(directory) and _writable(parent):
            _delegate(parent, KINDS)
            with contextlib.suppress(OSError):
                if set(KINDS) <= set((parent / "cgroup.subtree_control").read_text().split()):
                    return parent
    return None


def _delegate(directory: Path, kinds: list[str] | tuple[str, ...]) -> None:
    control = directory / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if missing := set(kinds) - set(control.read_text().split()):
            control.write_text(" ".join(f"+{kind}" for kind in missing))


def _writable(parent: Path) -> bool:
    return os.access(parent, os.W_OK) and (parent / "cgroup.procs").exists()


def _parse_cgroups(text: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, kinds, path = line.split(":", 2)
        paths.update(dict.fromkeys(kinds.split(","), path))
    return paths


def _parse_mount(line: str) -> tuple[str, str, str, list[str]]:
    """Root, mount point, type and options from a line of mountinfo."""
    before, _, after = line.partition(" - ")
    fields, kinds = before.split(), after.split()
    return fields[3], fields[4], kinds[0], kinds[-1].split(",")


def _relative(path: str, root: str) -> str:
    return path.removeprefix(root if root != "/" else "").lstrip("/")


def _remove_tree(directory: Path) -> None:
    """Remove a group and its subgroups, and kill the processes in them."""
    for group, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError, ValueError):
            for pid in (Path(group) / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path(group).rmdir()
