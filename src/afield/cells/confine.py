"""The walls around a nest: what of this machine its processes see, as a bubblewrap command.

They see the system's programs, this Python's environment and the agent's folder, all read-only, and nothing
else: no home, no run directory, no device of this machine, no network. Refuses an agent whose folder is also
home to everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from afield.cells.program import Program
from afield.errors import UsageError

WORK = "/work"
# Writable in a cell, each cell's own. What is mounted beneath them stays visible.
SCRATCH = ("/run", "/tmp", "/var/tmp", WORK)
IMAGE = "/.image"
STAGE = "/.stage"
HIDDEN_PROC = "/.hidden"
LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Programs want these; none has anything secret in it.
ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "fonts", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "localtime", "magic", "mime.types", "nsswitch.conf", "os-release", "pki", "protocols"),
    *("python3", "services", "shells", "ssl", "terminfo", "timezone"),
)
PASSWD = (
    f"agent:x:1000:1000:agent:{WORK}:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
GROUP = "agent:x:1000:\nnogroup:x:65534:\n"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
RUN = "import sys; sys.path[:] = {path!r}; from afield.cells.warm import main; main({fd})"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UNREADABLE_PROC = (
    "kallsyms",
    "kcore",
    "keys",
    "kmsg",
    "latency_stats",
    "modules",
    "sched_debug",
    "timer_list",
)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


class Walls(Struct, frozen=True):
    """`command` ends before the number of the descriptor; `mounted` are the host's paths that are visible."""

    command: tuple[str, ...]
    mounted: tuple[str, ...]


async def walls(program: Program, directory: Path) -> Walls:
    """Raises UsageError where there is no bubblewrap, or no such agent."""
    return _walls(program, directory, await asyncio.to_thread(_python_path))


def _walls(program: Program, directory: Path, path: list[str]) -> Walls:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise UsageError(
            "the sandbox needs bubblewrap, and there is no bwrap on PATH: apt-get install bubblewrap;"
            ' to run agents as plain processes all the same, set without_bubblewrap = "process"'
        )
    folders, more = _agent(program, path)
    path = [*more, *path]
    asked = [sys.prefix, sys.base_prefix, *path, *folders, *program.mounts]
    mounted = _outermost(asked)
    for place in program.mounts:
        if not Path(place).exists():
            raise UsageError(f"mounts: there is no {place} on this machine")
    command = [bubblewrap, *_namespaces(), *_system(directory)]
    for place in mounted:
        command += ["--ro-bind", place, place]
    for place in _sockets((*folders, *program.mounts)):
        command += ["--ro-bind", "/dev/null", place]
    for place in _within(program.hidden, mounted):
        command += ["--size", "4096", "--tmpfs", place, "--remount-ro", place]
    if program.root:
        if not Path(program.root).is_dir():
            raise UsageError(f"image {program.root!r} is no directory with a file system in it")
        command += ["--ro-bind", str(Path(program.root).resolve()), IMAGE]
    command += ["--remount-ro", "/", "--chdir", WORK, "--"]
    command += [sys.executable, "-I", "-u", "-c", RUN.replace("{path!r}", repr(path))]
    return Walls(tuple(command), tuple(mounted))


def environment(program: Program) -> dict[str, str]:
    """Nothing of ours: what every program expects, and what was asked for."""
    path = f"{Path(sys.executable).parent}:{PATH}"
    return {
        "PATH": path,
        "HOME": WORK,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **program.env,
    }


def _namespaces() -> list[str]:
    # Root within: the first thing the warm parent does is to mount what cells need, and to give it up.
    flags = "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    more = "--die-with-parent --new-session --hostname cell --uid 0 --gid 0"
    return [*flags.split(), *more.split(), "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETFCAP"]


def _system(directory: Path) -> list[str]:
    command = ["--ro-bind", "/usr", "/usr"]
    for place in map(Path, LINKED):
        if place.is_symlink():
            command += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            command += ["--ro-bind", str(place), str(place)]
    for name in ETC:
        command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, content in (("passwd", PASSWD), ("group", GROUP), ("hosts", HOSTS)):
        (directory / name).write_text(content)
        command += ["--ro-bind", str(directory / name), f"/etc/{name}"]
    command += _special()
    for place in SCRATCH:
        command += ["--size", str(256 * 2**20), "--tmpfs", place]
    return [*command, "--dir", IMAGE, "--dir", STAGE, "--dir", f"{HIDDEN_PROC}/proc"]


def _special() -> list[str]:
    command = ["--dev", "/dev", "--proc", "/proc"]
    covered, unreadable = sensitive(Path("/proc"))
    for name in covered:
        command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in unreadable:
        command += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    # One file system for all cells: what could be written there would reach the others.
    return [*command, "--remount-ro", "/dev"]


def sensitive(proc: Path) -> tuple[list[str], list[str]]:
    """What of the kernel's own files is made read-only, and what is hidden.

    A cell's user may be root outside, to whom these belong: their modes keep nobody out.
    """
    covered, unreadable = [], []
    for entry in sorted(os.scandir(proc), key=lambda entry: entry.name):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        mode = entry.stat(follow_symlinks=False).st_mode
        if entry.name in UNREADABLE_PROC or (entry.is_file() and not mode & 0o044):
            unreadable.append(entry.name)
        elif entry.is_dir() or mode & 0o222:
            covered.append(entry.name)
    return covered, unreadable


def _agent(program: Program, path: list[str]) -> tuple[list[str], list[str]]:
    """Folders to show, and where modules are found beside `path`."""
    if program.script:
        script = Path(program.script).resolve()
        if not script.is_file():
            raise UsageError(f"there is no file {script}")
        return [str(_own_folder(script))], []
    place = program.target.rpartition(":")[0]
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"there is no file {Path(place).resolve()}")
        return [str(_own_folder(Path(place).resolve()))], []
    top = place.partition(".")[0]
    if top and importlib.machinery.PathFinder.find_spec(top, path) is None:
        # What `python -m` would find: modules of the current directory, but not all that lies there.
        here = [str(found) for found in (Path.cwd() / top, Path.cwd() / f"{top}.py") if found.exists()]
        return here, [str(Path.cwd())] if here else []
    return [], []


def _own_folder(file: Path) -> Path:
    folder = file.parent
    shared = [Path.home(), Path("/tmp"), Path("/etc"), Path("/usr"), Path("/var")]
    if any(place == folder or folder in place.parents for place in shared):
        raise UsageError(
            f"{file} lies in {folder}, all of which the agent could read: give it a folder of its own"
        )
    return folder


def _python_path() -> list[str]:
    """Where modules are found, without the folder of whatever happens to run here."""
    say = "import json, sys; print(json.dumps(sys.path))"
    run = subprocess.run([sys.executable, "-P", "-c", say], stdout=subprocess.PIPE, check=True)
    return _existing(json.loads(run.stdout))


def _existing(places: Iterable[str]) -> list[str]:
    return [place for place in places if place and Path(place).exists()]


def _outermost(places: Iterable[str]) -> list[str]:
    """Without what lies within another, or within the system."""
    kept: list[str] = []
    for place in sorted({str(shown(Path(p))) for p in places for shown in (Path.resolve, Path.absolute)}):
        if not any(Path(place).is_relative_to(outer) for outer in ("/usr", *kept)):
            kept.append(place)
    return kept


def _within(hidden: Iterable[str], mounted: Iterable[str]) -> Iterator[str]:
    done: list[Path] = []
    for place in sorted({Path(h).resolve() for h in hidden}):
        inside = any(place.is_relative_to(outer) for outer in mounted)
        needed = any(Path(shown).is_relative_to(place) for shown in mounted)
        if inside and not needed and place.is_dir() and not any(map(place.is_relative_to, done)):
            done.append(place)
            yield str(place)


def _sockets(folders: Iterable[str]) -> Iterator[str]:
    """Whoever listens there can be reached through a file system that is read-only, too."""
    for folder in folders:
        for directory, _, names in os.walk(folder):
            for name in names:
                path = f"{directory}/{name}"
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.lstat(path).st_mode):
                        yield path
