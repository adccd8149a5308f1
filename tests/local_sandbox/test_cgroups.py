"""Control groups of both versions: where they are made and what is written to them.

The kernel's part is tested by the limits of real cells, on whichever version this machine has.
"""

from __future__ import annotations

import os
from pathlib import Path

from afield.local_sandbox import cgroups
from afield.settings.runtimes import ResourceLimits
from afield.utils.process_tree import start_time

LIMITS = ResourceLimits(cpus=0.5, memory_mb=64, pids=10)


def machine(tmp_path: Path, mounts: str, own: str) -> Path:
    """What /proc/self says on it."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(mounts)
    (proc / "cgroup").write_text(own)
    return proc


def group(place: Path, controllers: str = "") -> Path:
    place.mkdir(parents=True)
    (place / "cgroup.procs").touch()
    (place / "cgroup.subtree_control").write_text(controllers)
    return place


def test_version_2_is_used_beneath_our_own_group(tmp_path: Path) -> None:
    top = group(tmp_path / "fs")
    own = group(top / "us", "cpu memory pids")
    mounts = f"30 1 0:1 / {top} rw - cgroup2 cgroup2 rw\n"
    groups = cgroups.find_groups(machine(tmp_path, mounts, "0::/us\n"))
    assert set(groups.kinds) == {"cpu", "memory", "pids"}
    made = groups.create("7", LIMITS)
    (place,) = set(made.directories.values())
    assert place.parent.parent == own
    assert (place / "cpu.max").read_text() == "50000 100000"
    assert (place / "memory.max").read_text() == str(64 * 2**20)
    assert (place / "pids.max").read_text() == "12"
    (place / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    (place / "pids.events").write_text("max 3\n")
    oom, notes = made.reached_limits()
    assert oom and len(notes) == 2


def test_where_our_own_group_cannot_be_divided_its_parent_is(tmp_path: Path) -> None:
    top = group(tmp_path / "fs", "cpu memory pids")
    own = group(top / "us")
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()  # cannot be written, as where processes are
    mounts = f"30 1 0:1 / {top} rw - cgroup2 cgroup2 rw\n"
    made = cgroups.find_groups(machine(tmp_path, mounts, "0::/us\n")).create("7", LIMITS)
    assert made.directories["cpu"].parent.parent == top


def test_version_1_has_a_group_for_each_kind_that_can_be_written(tmp_path: Path) -> None:
    for kind in ("cpu", "memory"):
        group(tmp_path / kind / "us")
    mounts = "".join(
        f"30 1 0:1 / {tmp_path / kind} rw - cgroup cgroup rw,{kind}\n" for kind in ("cpu", "memory", "pids")
    )
    groups = cgroups.find_groups(machine(tmp_path, mounts, "2:cpu:/us\n1:memory,pids:/us\n"))
    assert set(groups.kinds) == {"cpu", "memory"}
    made = groups.create("7", LIMITS)
    assert (made.directories["cpu"] / "cpu.cfs_quota_us").read_text() == "50000"
    assert (made.directories["memory"] / "memory.limit_in_bytes").read_text() == str(64 * 2**20)


def test_what_the_dead_left_is_removed_and_what_the_living_use_stays(tmp_path: Path) -> None:
    top = group(tmp_path / "fs", "cpu memory pids")
    mounts = f"30 1 0:1 / {top} rw - cgroup2 cgroup2 rw\n"
    groups = cgroups.find_groups(machine(tmp_path, mounts, "0::/\n"))
    for name in ("999999999-5", f"{os.getpid()}-1", f"{os.getpid()}-{start_time(os.getpid())}"):
        (top / f"{cgroups.PREFIX}{name}").mkdir()
    groups.remove_stale()
    assert [left.name for left in top.glob(f"{cgroups.PREFIX}*")] == [
        f"{cgroups.PREFIX}{os.getpid()}-{start_time(os.getpid())}"
    ]


def test_without_groups_nothing_is_limited_and_a_warning_is_logged(tmp_path: Path) -> None:
    groups = cgroups.find_groups(machine(tmp_path, "30 1 0:1 / /x rw - tmpfs tmpfs rw\n", "0::/\n"))
    assert groups.kinds == ()
    assert groups.create("7", LIMITS).directories == {}
