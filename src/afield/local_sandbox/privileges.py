"""Privileges of sandboxed programs: resource limits, no capabilities, a seccomp filter."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from pathlib import Path

from afield.local_sandbox import seccomp as seccomp
from afield.local_sandbox.messages import StartSandbox
from afield.local_sandbox.syscalls import PR_SET_DUMPABLE, drop_privileges, prctl

MB = 2**20


def become_program(start: StartSandbox, *, output: int, listener: socket.socket | None = None) -> None:
    """Turn this process into the program's: session, standard streams, environment, then `confine`.

    The seccomp listener's descriptor is sent over `listener`.
    """
    os.setsid()
    devnull = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((devnull, 0), (output, 1), (output, 2)):
        os.dup2(fd, to)
    os.close(devnull)
    os.close(output)
    os.environ.update(start.env)  # noqa: TID251 - environment of the sandbox
    _reseed()
    confine(start, listener)


def confine(start: StartSandbox, listener: socket.socket | None = None) -> None:
    """Apply resource limits, drop privileges and install the filter, irrevocably. Closes `listener`."""
    prctl(PR_SET_DUMPABLE, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _limit(start)
    drop_privileges()
    fd = seccomp.install(listen=listener is not None) if seccomp.supported() else -1
    if listener is not None:
        if fd >= 0:
            socket.send_fds(listener, [b"."], [fd])
            os.close(fd)
        listener.close()


def _limit(start: StartSandbox) -> None:
    limits = start.limits
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_FSIZE, limits.disk_mb and limits.disk_mb * MB)
    _set(resource.RLIMIT_NOFILE, limits.files)
    _set(resource.RLIMIT_NPROC, limits.pids)
    if start.rlimit_memory and limits.memory_mb is not None:
        # On top of the memory that the fork parent has already mapped.
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _set(resource.RLIMIT_AS, mapped + limits.memory_mb * MB)


def _set(kind: int, value: int | None) -> None:
    if value is not None:
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _reseed() -> None:
    """Reseed numpy, whose random state all forks share; `random` reseeds itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
