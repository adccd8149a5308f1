"""System calls without a Python wrapper: namespaces, mounts, privileges, loopback addresses.

Each function raises OSError with its arguments. Linux only.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct

NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NEW_CGROUP, NEW_TIME = 0x02000000, 0x00000080
ALL_NEW = NEW_NS | NEW_UTS | NEW_IPC | NEW_USER | NEW_PID | NEW_NET
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NO_ATIME, NO_DIRATIME = 1024, 2048
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    24,
    36,
    38,
)
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
IFF_UP, IFF_RUNNING = 0x1, 0x40
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments!r}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    mount(source, target, flags=BIND | REC)
    if read_only:
        mount("none", target, flags=BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV)


def make_read_only(place: str) -> None:
    """Remount read-only; keeps flags that the kernel does not allow to clear."""
    kept = os.statvfs(place).f_flag & (NO_SUID | NO_DEV | NO_EXEC | NO_ATIME | NO_DIRATIME)
    mount("none", place, flags=BIND | REMOUNT | READ_ONLY | kept)


def change_root(new: str) -> None:
    """Make `new` the root directory and detach the old one."""
    os.chdir(new)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    call("syscall", ctypes.c_long(number), b".", b".")
    call("umount2", b".", ctypes.c_int(DETACH))
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def map_ids(inside: int, outside: int) -> None:
    """Map one user id and group id in the user namespace that this process has just created."""
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside} {outside} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(fd, content.encode())
        finally:
            os.close(fd)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_privileges() -> None:
    """Drop all capabilities for good, also across exec."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the last capability
    header, none = _Header(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    call("capset", ctypes.byref(header), none)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP | IFF_RUNNING))


def add_address(address: str, number: int) -> None:
    """Add an address to the loopback interface; `number` is its alias. Loopback addresses need no entry."""
    ip = ipaddress.ip_address(address)
    if ip.is_loopback or ip.is_unspecified:
        return
    if ip.version == 6:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            index = socket.if_nametoindex("lo")
            fcntl.ioctl(sock, SIOCSIFADDR, struct.pack("16sIi", ip.packed, 128, index))
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for request, value in ((SIOCSIFADDR, ip.packed), (SIOCSIFNETMASK, b"\xff" * 4)):
            packed = struct.pack("16sHH4s16x", f"lo:{number}".encode(), socket.AF_INET, 0, value)
            fcntl.ioctl(sock, request, packed)
