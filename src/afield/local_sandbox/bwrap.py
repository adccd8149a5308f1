"""Bubblewrap command of a fork server: the files that sandboxes see.

Visible, all read-only: system programs, this Python environment, the agent's file with the modules and
packages next to it that it imports, and the configured mounts. Not visible: home directories, the run
directory, stores, verifiers, task lists, devices and the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from afield.errors import UsageError
from afield.local_sandbox.imports import Closure, import_closure
from afield.local_sandbox.messages import BwrapArgs, Program
from afield.utils.interpreter import Interpreter, inspect_interpreter

WORK = "/work"
# Writable directories, separate for each sandbox. Mounts below them stay visible.
SCRATCH = ("/run", "/tmp", "/var/tmp", WORK)
IMAGE = "/.image"
LAYERS = "/.layers"
STAGE = "/.stage"
HIDDEN_PROC = "/.hidden"
EMPTY = "/.empty"
# Files that mark a directory as afield's own state, which is always hidden.
STATE_FILES = ("gateway.sqlite", "hints.sqlite", "run_state.sqlite", "run.json")
LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Entries of /etc that programs need; none contains secrets.
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
RUN = "import sys; sys.path[:] = {path!r}; from afield.local_sandbox.fork_parent import main; main({fd})"
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


async def bwrap_args(program: Program, directory: Path) -> BwrapArgs:
    """Build the bubblewrap command for a program; writes its /etc files to `directory`.

    Raises UsageError if bubblewrap, the agent or a mount does not exist.
    """
    return _build(program, directory, await asyncio.to_thread(inspect_interpreter, interpreter(program)))


def interpreter(program: Program) -> str:
    """Python interpreter of a program."""
    return program.python or sys.executable


def _build(program: Program, directory: Path, python: Interpreter) -> BwrapArgs:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise UsageError(
            "the sandbox needs bubblewrap, and there is no bwrap on PATH: apt-get install bubblewrap;"
            ' to run agents as plain processes instead, set without_bubblewrap = "process"'
        )
    path = [place for place in python.path if place and Path(place).exists()]
    agent, more = _agent(program, path)
    path = [*more, *path]
    paths = [*python.prefixes, *path, *agent, *program.mounts]
    mounts = _outermost(paths)
    folders = _folders(agent, mounts)
    sealed = [place for place in mounts if Path(place).is_dir() and place not in _outermost(python.prefixes)]
    for place in program.mounts:
        if not Path(place).exists():
            raise UsageError(
                f"mount {place} does not exist on this machine; create it, or remove it from mounts"
            )
    command = [bubblewrap, *_namespaces(), *_system(directory)]
    for place in folders:
        command += ["--size", str(2**20), "--tmpfs", place]
    for place in mounts:
        command += ["--ro-bind", place, place]
    sockets, states = _find_sockets_and_state(sealed)
    hidden = list(_hidden_mounts((*program.hidden, *states), mounts))
    command += _cover_args(hidden, sockets)
    for place in folders:
        command += ["--remount-ro", place]
    if program.root:
        if not Path(program.root).is_dir():
            raise UsageError(
                f"image {program.root!r} is not a directory; name a directory with a root file system"
            )
        command += ["--ro-bind", str(Path(program.root).resolve()), IMAGE]
    if program.layers:
        command += ["--ro-bind", str(Path(program.layers).resolve()), LAYERS]
    command += ["--remount-ro", "/", "--chdir", WORK, "--"]
    command += [python.executable, "-I", "-u", "-c", RUN.replace("{path!r}", repr(path))]
    mounted = _outermost((*mounts, *folders))
    return BwrapArgs(tuple(command), tuple(mounted), tuple(sealed), tuple(hidden))


def _folders(agent: Iterable[str], visible: Sequence[str]) -> list[str]:
    """Folder of the agent's file, mounted as an empty read-only directory around the agent's code.

    Empty list if the folder is already mounted or contains system directories.
    """
    file = next((Path(place) for place in agent if Path(place).is_file()), None)
    if file is None or any(file.parent.is_relative_to(place) for place in ("/usr", *visible)):
        return []
    shared = (Path("/etc"), Path("/usr"), Path("/dev"), Path("/proc"), *map(Path, SCRATCH))
    if any(place.is_relative_to(file.parent) for place in shared):
        return []
    return [str(file.parent)]


def _cover_args(hidden: Sequence[str], sockets: Iterable[str]) -> list[str]:
    command: list[str] = []
    for place in hidden:
        if Path(place).is_dir():
            command += ["--size", "4096", "--tmpfs", place, "--remount-ro", place]
        else:
            command += ["--ro-bind", "/dev/null", place]
    for place in sockets:
        if not any(Path(place).is_relative_to(covered) for covered in hidden):
            command += ["--ro-bind", "/dev/null", place]
    return command


def environment(program: Program) -> dict[str, str]:
    """Environment of sandboxed programs: basic variables and the program's own, none of this process."""
    path = f"{Path(interpreter(program)).parent}:{PATH}"
    return {
        "PATH": path,
        "HOME": WORK,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **program.env,
    }


def _namespaces() -> list[str]:
    # The fork parent starts as root of the namespace, mounts what sandboxes need, and then drops privileges.
    flags = "--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    more = "--die-with-parent --new-session --hostname sandbox --uid 0 --gid 0"
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
    command += _dev_and_proc()
    for place in SCRATCH:
        command += ["--size", str(256 * 2**20), "--tmpfs", place]
    for place in (EMPTY, IMAGE, LAYERS, STAGE, f"{HIDDEN_PROC}/proc"):
        command += ["--dir", place]
    return command


def _dev_and_proc() -> list[str]:
    command = ["--dev", "/dev", "--proc", "/proc"]
    covered, unreadable = sensitive(Path("/proc"))
    for name in covered:
        command += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
    for name in unreadable:
        command += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    # Sandboxes share this /dev: a writable one would leak data between them.
    return [*command, "--remount-ro", "/dev"]


def sensitive(proc: Path) -> tuple[list[str], list[str]]:
    """Names below /proc to mount read-only, and names to hide.

    File modes do not protect them: the sandbox's user may be root outside, who owns them.
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
    """Files and packages of the agent, and directories to add to `path`."""
    place = program.script or program.target.rpartition(":")[0]
    if place.endswith(".py") or program.script:
        file = Path(place).resolve()
        if not file.is_file():
            raise UsageError(f"there is no file {file}")
        return list(_closure(file, program.hidden).files), []
    top = place.partition(".")[0]
    if top and importlib.machinery.PathFinder.find_spec(top, path) is None:
        # Like `python -m`, find the module in the current directory, but mount only the module.
        package, file = Path.cwd() / top, Path.cwd() / f"{top}.py"
        if package.exists():
            return [str(package)], [str(Path.cwd())]
        if file.exists():
            return list(_closure(file, program.hidden).files), [str(Path.cwd())]
    return [], []


def _closure(file: Path, hidden: Iterable[str]) -> Closure:
    """Import closure of a file; raises UsageError if the agent imports a hidden module."""
    closure = import_closure(file)
    for place in map(Path, hidden):
        if place.suffix != ".py" or not place.is_relative_to(file.parent):
            continue
        if ".".join(place.relative_to(file.parent).with_suffix("").parts) in closure.modules:
            raise UsageError(
                f"{file.name} imports the verifier {place.name}, which is hidden from agents in a sandbox;"
                " move code that both need into a third module"
            )
    return closure


def _outermost(places: Iterable[str]) -> list[str]:
    """Paths that are neither inside another one nor inside /usr."""
    kept: list[str] = []
    for place in sorted({str(path) for p in places for path in (Path(p).resolve(), Path(p).absolute())}):
        if not any(Path(place).is_relative_to(outer) for outer in ("/usr", *kept)):
            kept.append(place)
    return kept


def _hidden_mounts(hidden: Iterable[str], mounted: Iterable[str]) -> Iterator[str]:
    """Hidden paths that are inside a mount and contain no mount."""
    done: list[Path] = []
    for place in sorted({Path(h).resolve() for h in hidden}):
        inside = any(place.is_relative_to(outer) for outer in mounted)
        needed = any(Path(mount).is_relative_to(place) for mount in mounted)
        if inside and not needed and place.exists() and not any(map(place.is_relative_to, done)):
            done.append(place)
            yield str(place)


def _find_sockets_and_state(folders: Iterable[str]) -> tuple[list[str], list[str]]:
    """Find Unix sockets and afield's state in folders.

    A listening Unix socket is reachable through a read-only mount, too.
    """
    sockets: list[str] = []
    states: list[str] = []
    for folder in folders:
        for directory, within, names in os.walk(folder):
            if directory != folder and any(name in names for name in STATE_FILES):
                states.append(directory)
                within.clear()
                continue
            states += [f"{directory}/{name}" for name in names if name.startswith(STATE_FILES)]
            sockets += [f"{directory}/{name}" for name in names if _is_socket(f"{directory}/{name}")]
    return sockets, states


def _is_socket(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    return False
