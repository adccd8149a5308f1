"""Seccomp filter of sandboxed programs, and log lines about denied calls.

1. The filter denies namespaces and mounts, tracing, keys, kernel interfaces, and socket families that no
network namespace isolates. The caller gets an ordinary error.
2. With a listener, the init process is notified of denied calls, and of each connect, kill and open for
writing, before the kernel answers. It logs those that will fail. Isolation does not depend on it.
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

from afield.local_sandbox.syscalls import ALL_NEW, NEW_CGROUP, NEW_TIME, call

# Numbers of denied system calls by machine.
_NUMBERS = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "uselib": 134, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155,
        "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount": 166,
        "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212,
        "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
        "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "lookup_dcookie": 18, "umount": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58,
        "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105,
        "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142,
        "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "add_key": 217,
        "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238,
        "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}  # fmt: skip
_EVERYWHERE = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
# Answered with ENOSYS, so that callers fall back to older calls.
_UNKNOWN = {  # clone3, io_uring_setup, _enter, _register; io_setup, whose number differs by machine
    "x86_64": (435, 425, 426, 427, 206),
    "aarch64": (435, 425, 426, 427, 0),
}
_SPECIAL = {
    "x86_64": {
        "open": 2, "ioctl": 16, "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "kill": 62,
        "openat": 257,
    },
    "aarch64": {
        "ioctl": 29, "openat": 56, "kill": 129, "socket": 198, "socketpair": 199, "connect": 203,
        "clone": 220,
    },
}  # fmt: skip
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
FAMILIES = (1, 2, 10)  # unix, inet, inet6: each is bound to the network namespace
NETLINK, ROUTE = 16, 0  # the only netlink protocol allowed; it tells programs their own addresses
TERMINAL = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX inject input into a terminal
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16
ALLOW, ERROR, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
REPORTED = ("connect", "kill")
OPENING = {"open": 1, "openat": 2}  # index of the flags argument
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SET_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 8, 32

Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def denied() -> dict[int, str]:
    """Denied system calls of this machine: names by number."""
    machine = os.uname().machine
    return {n: name for name, n in (*_NUMBERS[machine].items(), *_EVERYWHERE.items())}


def reported() -> dict[int, str]:
    """Allowed system calls that are first reported to the listener: names by number."""
    special = _SPECIAL[os.uname().machine]
    return {special[name]: name for name in (*REPORTED, *OPENING) if name in special}


def supported() -> bool:
    return os.uname().machine in _NUMBERS


def install(*, listen: bool) -> int:
    """Install the filter for this process and its descendants.

    Returns the listener's descriptor, or -1 without `listen`.
    """
    steps = _program(os.uname().machine, listen)
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(buffer))
    number = ctypes.c_long(_SECCOMP[os.uname().machine])
    if not listen:
        call("syscall", number, ctypes.c_uint(SET_FILTER), ctypes.c_uint(0), program)
        return -1
    try:
        flags = ctypes.c_uint(NEW_LISTENER | WAIT_KILLABLE)
        return call("syscall", number, ctypes.c_uint(SET_FILTER), flags, program)
    except OSError:  # Kernels before 5.19 do not support WAIT_KILLABLE.
        return call("syscall", number, ctypes.c_uint(SET_FILTER), ctypes.c_uint(NEW_LISTENER), program)


def _program(machine: str, listen: bool) -> list[Step]:
    special, no_such = _SPECIAL[machine], _return(ERROR | errno.ENOSYS)
    no = _return(NOTIFY if listen else ERROR | errno.EPERM)
    steps = [_load(ARCH), (EQUAL, 1, 0, _ARCH[machine]), no_such, _load(NUMBER)]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), no_such]
    for number in _UNKNOWN[machine]:
        steps += [(EQUAL, 0, 1, number), no_such]
    for number in (*_NUMBERS[machine].values(), *_EVERYWHERE.values()):
        steps += [(EQUAL, 0, 1, number), no]
    if listen:
        steps += [step for name in REPORTED for step in ((EQUAL, 0, 1, special[name]), no)]
        for name, flags in OPENING.items():
            if name in special:
                steps += _when(special[name], flags, [(ANY_BIT, 0, 1, WRITING), no])
    steps += _when(special["socket"], 0, _sockets())
    steps += _when(
        special["socketpair"], 0, [(EQUAL, 1, 0, FAMILIES[0]), _return(ERROR | errno.EAFNOSUPPORT)]
    )
    others = ALL_NEW | NEW_CGROUP | NEW_TIME
    steps += _when(special["clone"], 0, [(ANY_BIT, 0, 1, others & ~0xFF), no])
    injecting = [step for request in TERMINAL for step in ((EQUAL, 0, 1, request), no)]
    steps += _when(special["ioctl"], 1, injecting)
    return [*steps, _return(ALLOW)]


def _sockets() -> list[Step]:
    no = _return(ERROR | errno.EAFNOSUPPORT)
    netlink = [_load(ARGUMENTS + 8 * 2), (EQUAL, 0, 1, ROUTE), _return(ALLOW), no]
    others = [(EQUAL, len(FAMILIES) - n, 0, family) for n, family in enumerate(FAMILIES)]
    return [(EQUAL, 0, len(netlink), NETLINK), *netlink, *others, no]


def _when(number: int, argument: int, then: list[Step]) -> list[Step]:
    """Instructions for one system call that test the lower half of an argument.

    The call is allowed if `then` falls through.
    """
    inner = [_load(ARGUMENTS + 8 * argument), *then, _return(ALLOW)]
    return [(EQUAL, 0, len(inner), number), *inner]


def _load(offset: int) -> Step:
    return (LOAD, 0, 0, offset)


def _return(value: int) -> Step:
    return (RETURN, 0, 0, value)


RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
NOTIFICATION = struct.Struct("QIIiIQ6Q")
RESPONSE = struct.Struct("QqiI")
CONTINUE = 1
INET, INET6 = 2, 10
MAX_LINES = 50


class SeccompListener:
    """Answers the filter's notifications and logs denied calls, up to MOST_LINES lines.

    `reached` are the allowed addresses; `listens` tells whether a process in the sandbox serves a port.
    """

    def __init__(
        self,
        fd: int,
        allowed: set[tuple[str, int]],
        listens: Callable[[int], bool],
        write: Callable[[bytes], None],
    ) -> None:
        self.fd = fd
        self._allowed = allowed
        self._listens = listens
        self._write = write
        self._lines = 0
        self._denied = denied()
        self._reported = reported()

    def respond(self) -> bool:
        """Answer one notification; returns False if the filter is gone."""
        notification = bytearray(NOTIFICATION.size)
        try:
            fcntl.ioctl(self.fd, RECEIVE, notification)
        except OSError as error:
            # The calling process may have ended.
            return error.errno in (errno.ENOENT, errno.EINTR)
        caller, pid, _, number, _, _, *arguments = NOTIFICATION.unpack(notification)
        if number in self._reported:
            self._log_if_failing(self._reported[number], pid, arguments)
            respond = RESPONSE.pack(caller, 0, 0, CONTINUE)
        else:
            self._log(f"{self._denied.get(number, 'clone or ioctl')} (call {number}) was denied")
            respond = RESPONSE.pack(caller, 0, -errno.EPERM, 0)
        try:
            fcntl.ioctl(self.fd, SEND, respond)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINPROGRESS)
        return True

    def _log_if_failing(self, name: str, pid: int, arguments: list[int]) -> None:
        match name:
            case "connect":
                self._log_address(pid, arguments[1], min(arguments[2], 128))
            case "kill":
                self._log_signal(arguments[0], arguments[1])
            case "open":
                self._log_path(pid, arguments[0])
            case _:
                self._log_path(pid, arguments[1])

    def _log_path(self, pid: int, place: int) -> None:
        path = _memory(pid, place, os.pathconf("/", "PC_PATH_MAX")).partition(b"\0")[0]
        # Relative paths are not resolved.
        if path.startswith(b"/") and _unwritable(Path(os.fsdecode(path))):
            self._log(f"{path.decode('utf-8', 'backslashreplace')!r} cannot be written: it is read-only")

    def _log_address(self, pid: int, place: int, size: int) -> None:
        address = _address(_memory(pid, place, size))
        if address is None or address in self._allowed:
            return
        host, port = address
        if ipaddress.ip_address(host).is_loopback and self._listens(port):
            return
        self._log(f"{host}:{port} is not an allowed address")

    def _log_signal(self, argument: int, number: int) -> None:
        pid = ctypes.c_int(argument & 0xFFFFFFFF).value
        if pid == 1:
            self._log(f"signal {number & 0xFF} for the init process was ignored")
        elif pid == -1:
            self._log(f"signal {number & 0xFF} for all processes reaches only those of the sandbox")
        elif pid > 1 and not Path(f"/proc/{pid}").exists():
            self._log(f"signal {number & 0xFF} for process {pid}: no such process in the sandbox")

    def _log(self, what: str) -> None:
        self._lines += 1
        if self._lines <= MAX_LINES:
            self._write(f"[sandbox] {what}\n".encode())
        elif self._lines == MAX_LINES + 1:
            self._write(b"[sandbox] further denied calls are not logged\n")


def _unwritable(path: Path) -> bool:
    """Whether a path, or its nearest existing parent, is on a read-only mount.

    Character devices stay writable.
    """
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
    """Host and port of an IPv4 or IPv6 socket address; None for other families."""
    if len(data) < 8:
        return None
    family, port = struct.unpack("=H", data[:2])[0], struct.unpack("!H", data[2:4])[0]
    if family == INET:
        return str(ipaddress.IPv4Address(data[4:8])), port
    if family == INET6 and len(data) >= 24:
        ip = ipaddress.IPv6Address(data[8:24])
        return str(ip.ipv4_mapped or ip), port
    return None
