"""The hostile agent against its machine: more than its share of it, and out of its place."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import afield

MB = 2**20
REFUSED = (errno.EPERM, errno.ENOSYS)
IN_SANDBOX = socket.gethostname() == "sandbox"  # elsewhere some things are not even tried: they would work
MANY = 5000
PLACES = ("/tmp", "/work", "/run", "/var/tmp", "/dev/shm")
libc = ctypes.CDLL(None, use_errno=True)
Loot = Iterator[str]


NEW = (0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x02000000, 0x80)
# Of x86_64, with arguments that are wrong.
NUMBERS: dict[str, tuple[int, ...]] = {
    "mount": (165, 0, 0, 0, 0, 0), "remount": (165, 0, 0, 0, 32 | 4096, 0), "umount": (166, 0, 0),
    "pivot_root": (155, 0, 0), "chroot": (161, 0), "setns": (308, -1, 0), "bpf": (321, -1, 0, 0),
    "open_by_handle_at": (304, -1, 0, 0), "name_to_handle_at": (303, -1, 0, 0, 0, 0),
    "keyctl": (250, -1, 0, 0, 0, 0), "add_key": (248, 0, 0, 0, 0, 0), "request_key": (249, 0, 0, 0, 0),
    "perf_event_open": (298, 0, 0, 0, 0, 0), "io_uring_setup": (425, 0, 0), "userfaultfd": (323, -1),
    "reboot": (169, 0, 0, 0, 0), "init_module": (175, 0, 0, 0), "kexec_load": (246, 0, -1, 0, 0),
    "clock_settime": (227, 0, 0), "settimeofday": (164, 1, 0), "sethostname": (170, 1, -1),
    "swapon": (167, 0, 0), "acct": (163, 1), "quotactl": (179, -1, 0, 0, 0), "iopl": (172, 4),
    "fsopen": (430, 0, -1), "open_tree": (428, -1, 0, -1), "move_mount": (429, -1, 0, -1, 0, 0),
    "mount_setattr": (442, -1, 0, 0, 0, 0), "pidfd_getfd": (438, -1, 0, 0), "clone3": (435, 0, 0),
    "io_setup": (206, -1, 0), "syslog": (103, 3, 0, -1), "ptrace": (101, 9999, 1, 0, 0),
}  # fmt: skip


# --- its share of the machine ----------------------------------------------------------------------


def forks(task: dict[str, Any], rollout: afield.Context) -> Loot:
    most = task["pids"] + 20
    pids: list[int] = []
    with contextlib.suppress(OSError):
        while len(pids) < most:
            if (pid := os.fork()) == 0:
                signal.pause()
            pids.append(pid)
    threads = 0
    with contextlib.suppress(RuntimeError):
        while threads < most:
            threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
            threads += 1
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if len(pids) + threads >= most:
        yield f"{len(pids)} processes and {threads} threads"


def memory_bomb(task: dict[str, Any], rollout: afield.Context) -> Loot:
    most = 2 * task["memory_mb"]
    for way in (anonymous, shared, in_memfd, in_tmpfs, in_sockets, in_pipes):
        if (held := in_a_child(way, most)) >= most:
            yield f"{held} MB by {way.__name__}"


def in_a_child(way: Callable[[int], Iterator[None]], most: int) -> int:
    """How many MB it had when it met its limit, or most."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        Path("/proc/self/oom_score_adj").write_text("1000")  # rather than its parent, who tells of it
        with contextlib.suppress(OSError, MemoryError, ValueError):
            for _ in way(most):
                os.write(writing, b".")
        os._exit(0)
    os.close(writing)
    told = b""
    while piece := os.read(reading, 65536):
        told += piece
    os.close(reading)
    os.waitpid(pid, 0)
    return len(told)


def anonymous(most: int) -> Iterator[None]:
    held = []
    for _ in range(most):
        held.append(b"\1" * MB)
        yield


def shared(most: int) -> Iterator[None]:
    held = []
    for _ in range(most):
        held.append(mmap.mmap(-1, MB, mmap.MAP_SHARED))
        held[-1].write(b"\1" * MB)
        yield


def in_memfd(most: int) -> Iterator[None]:
    held = []
    for n in range(most):
        held.append(os.memfd_create(str(n)))
        os.write(held[-1], b"\1" * MB)
        yield


def in_tmpfs(most: int) -> Iterator[None]:
    for n in range(most):
        Path(f"/dev/shm/{n}").write_bytes(b"\1" * MB)
        yield


def in_sockets(most: int) -> Iterator[None]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(500)
        held, sent = [], 0
        while sent < most * MB and len(held) < 800:
            held += [link := socket.create_connection(listener.getsockname()), listener.accept()[0]]
            link.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while sent < most * MB:
                    before, sent = sent // MB, sent + link.send(b"\1" * 65536)
                    if sent // MB > before:
                        yield


def in_pipes(most: int) -> Iterator[None]:
    held, sent = [], 0
    while sent < most * MB:
        reading, writing = os.pipe()
        held.append((reading, writing))
        os.set_blocking(writing, False)
        before, sent = sent // MB, sent + os.write(writing, b"\1" * 65536)
        if sent // MB > before:
            yield


def memory_of_its_own(task: dict[str, Any], rollout: afield.Context) -> Loot:
    for _ in anonymous(4 * task["memory_mb"]):
        pass
    yield f"{4 * task['memory_mb']} MB"


def disk(task: dict[str, Any], rollout: afield.Context) -> Loot:
    most, held, made = 2 * task["disk_mb"] * MB, 0, 0
    places = [Path(place) for place in (PLACES if IN_SANDBOX else (task["scratch"],))]
    for place in places:
        with contextlib.suppress(OSError), (place / "big").open("wb", 0) as file:
            while held < most:
                held += file.write(b"\1" * MB)
    for place in places:
        (place / "big").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        for n in range(MANY):
            (places[0] / f"small-{n}").touch()
            made += 1
    if held >= most:
        yield f"{held // MB} MB"
    if made == MANY:
        yield f"{made} files"


def noise(task: dict[str, Any], rollout: afield.Context) -> Loot:
    for _ in range(24):
        os.write(1, (b"noise " * 20 + b"\n") * (MB // 121))
    yield from ()


# --- out of its place ------------------------------------------------------------------------------


def outside(task: dict[str, Any], rollout: afield.Context) -> Loot:
    for place in filter(os.path.exists, task["outside"]):
        with contextlib.suppress(OSError), Path(place).open("a") as file:
            file.write(" and changed")
            yield f"wrote to {place}"
    if IN_SANDBOX:
        yield from others_files()
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.close(os.open("../../../../etc/shadow", os.O_RDONLY, dir_fd=fd))
            yield f"a way out through descriptor {fd}"


def others_files() -> Loot:
    here = Path(__file__).parent
    places = ["/etc/cron.d/x", "/usr/bin/x", "/usr/local/bin/python3", "~root/.bashrc", "/x", "/dev/x"]
    places += ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/overcommit_memory"]
    places += ["/proc/1/root/x", "/sys/fs/cgroup/pids/pids.max", "/etc/hosts", f"{here}/x", __file__]
    for place in places:
        with contextlib.suppress(OSError):
            os.close(os.open(Path(place).expanduser(), os.O_WRONLY | os.O_CREAT, 0o600))
            yield f"opened {place} to write"
    for path in map(Path, ("/dev/null", "/dev/full", "/dev/tty", "/usr/bin", "/proc/kmsg", __file__)):
        with contextlib.suppress(OSError):
            path.chmod(path.stat().st_mode & 0o7777)
            yield f"changed the mode of {path}"
        with contextlib.suppress(OSError):
            os.utime(path)
            yield f"touched {path}"
    for call, *arguments in ((os.unlink, __file__), (os.rename, str(here), f"{here}-x"), (os.mkdir, "/x")):
        with contextlib.suppress(OSError):
            call(*arguments)
            yield f"{call.__name__} {arguments}"
    with contextlib.suppress(OSError):
        os.mknod("/tmp/mem", 0o020600, os.makedev(1, 1))
        yield "made a device"


def kernel(task: dict[str, Any], rollout: afield.Context) -> Loot:
    """Wrong arguments: whoever may not ask is told so, whoever may is told what is wrong."""
    if os.uname().machine != "x86_64":
        return
    calls = NUMBERS | {f"unshare {flag:x}": (272, flag | 1) for flag in NEW}
    for name, (number, *arguments) in calls.items():
        ctypes.set_errno(0)
        answer = libc.syscall(number, *(ctypes.c_long(a) for a in arguments))
        if answer >= 0 or ctypes.get_errno() not in REFUSED:
            yield f"{name}: {answer}, {errno.errorcode.get(ctypes.get_errno())}"
    if IN_SANDBOX:
        yield from privileges()


def privileges() -> Loot:
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (hard + 1, hard + 1))
            yield f"raised the limit {kind}"
    tries: dict[str, Callable[[], object]] = {
        "became root": lambda: os.setuid(0),
        "went before others": lambda: os.nice(-1),
        "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "is spared": lambda: Path("/proc/self/oom_score_adj").write_text("-500"),
    }
    for name, attempt in tries.items():
        with contextlib.suppress(OSError):
            attempt()
            yield name
    watchers = 0
    while watchers < 200 and libc.inotify_init1(0) >= 0:
        watchers += 1
    if watchers > 20:
        yield f"{watchers} of the user's watchers"


def signals(task: dict[str, Any], rollout: afield.Context) -> Loot:
    for pid in task["victims"]:
        for number in (signal.SIGSTOP, signal.SIGTERM):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                yield f"signal {number} for a victim"
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGTERM)
            yield "signal by descriptor"
        if libc.syscall(129, pid, signal.SIGTERM, bytes(128)) == 0:
            yield "queued signal"
    if IN_SANDBOX:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT):
            os.kill(1, number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def outlive(task: dict[str, Any], rollout: afield.Context) -> Loot:
    """Out of the group, out of the session, nobody's child, deaf to what can be ignored."""
    source = (
        "import os, signal, sys, time\n"
        "for n in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(n, signal.SIG_IGN)\n"
        "os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)\n"
        "sys.stdout.close(); os.closerange(0, 1000); time.sleep(120)\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", source, task["mark"]], check=True)
    time.sleep(3)
    yield from ()
