"""What a cell's program was refused, said in its log: forbidden system calls; addresses, processes and
files out of reach.

The program's filter tells the first process of such calls before they are answered. Only what is written down
depends on what is read here; the walls hold without it. After a number of lines there is silence.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from afield.sandbox import seccomp as calls

RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
ASKED = struct.Struct("QIIiIQ6Q")
ANSWER = struct.Struct("QqiI")
CONTINUE = 1
INET, INET6 = 2, 10
MOST_LINES = 50


class Notices:
    """`reached` are the addresses behind doors; `listens` says whether anybody in the cell serves a port."""

    def __init__(
        self,
        fd: int,
        reached: set[tuple[str, int]],
        listens: Callable[[int], bool],
        write: Callable[[bytes], None],
    ) -> None:
        self.fd = fd
        self._reached = reached
        self._listens = listens
        self._write = write
        self._lines = 0
        self._refused = calls.refused()
        self._told = calls.told()

    def answer(self) -> bool:
        """One call; False when there is nobody left to ask."""
        asked = bytearray(ASKED.size)
        try:
            fcntl.ioctl(self.fd, RECEIVE, asked)
        except OSError as error:
            # The caller may be gone by now.
            return error.errno in (errno.ENOENT, errno.EINTR)
        caller, pid, _, number, _, _, *arguments = ASKED.unpack(asked)
        if number in self._told:
            self._consider(self._told[number], pid, arguments)
            answer = ANSWER.pack(caller, 0, 0, CONTINUE)
        else:
            self._tell(f"{self._refused.get(number, 'clone or ioctl')} (call {number}) was refused")
            answer = ANSWER.pack(caller, 0, -errno.EPERM, 0)
        try:
            fcntl.ioctl(self.fd, SEND, answer)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINPROGRESS)
        return True

    def _consider(self, name: str, pid: int, arguments: list[int]) -> None:
        match name:
            case "connect":
                self._tell_address(pid, arguments[1], min(arguments[2], 128))
            case "kill":
                self._tell_signal(arguments[0], arguments[1])
            case "open":
                self._tell_path(pid, arguments[0])
            case _:
                self._tell_path(pid, arguments[1])

    def _tell_path(self, pid: int, place: int) -> None:
        path = _memory(pid, place, os.pathconf("/", "PC_PATH_MAX")).partition(b"\0")[0]
        # A name that counts from another directory than the root is not followed.
        if path.startswith(b"/") and _unwritable(Path(os.fsdecode(path))):
            self._tell(f"{path.decode('utf-8', 'backslashreplace')!r} cannot be written: it is read-only")

    def _tell_address(self, pid: int, place: int, size: int) -> None:
        found = _address(_memory(pid, place, size))
        if found is None or found in self._reached:
            return
        host, port = found
        if ipaddress.ip_address(host).is_loopback and self._listens(port):
            return
        self._tell(f"{host}:{port} cannot be reached from here: it is not allowed")

    def _tell_signal(self, argument: int, number: int) -> None:
        pid = ctypes.c_int(argument & 0xFFFFFFFF).value
        if pid == 1:
            self._tell(f"the first process of the cell takes no signal {number & 0xFF}")
        elif pid == -1:
            self._tell(f"signal {number & 0xFF} for all processes reaches those of the cell alone")
        elif pid > 1 and not Path(f"/proc/{pid}").exists():
            self._tell(f"signal {number & 0xFF} for process {pid}: there is none in the cell")

    def _tell(self, what: str) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            self._write(f"[cell] {what}\n".encode())
        elif self._lines == MOST_LINES + 1:
            self._write(b"[cell] more refusals are not told\n")


def _unwritable(path: Path) -> bool:
    """Whether a file lies, or would lie, in what is read-only here; devices can be written all the same."""
    while True:
        try:
            status, kind = os.statvfs(path), path.stat().st_mode
        except FileNotFoundError:
            path = path.parent
        except (OSError, ValueError):
            return False
        else:
            return bool(status.f_flag & os.ST_RDONLY) and not stat.S_ISCHR(kind)


def _memory(pid: int, place: int, size: int) -> bytes:
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(fd, size, place)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(fd)


def _address(data: bytes) -> tuple[str, int] | None:
    """Of a socket address of the internet families."""
    if len(data) < 8:
        return None
    family, port = struct.unpack("=H", data[:2])[0], struct.unpack("!H", data[2:4])[0]
    if family == INET:
        return str(ipaddress.IPv4Address(data[4:8])), port
    if family == INET6 and len(data) >= 24:
        ip = ipaddress.IPv6Address(data[8:24])
        return str(ip.ipv4_mapped or ip), port
    return None
