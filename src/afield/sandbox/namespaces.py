"""The namespaces of one cell, and what is in them: a fresh /proc, scratch space, a network with doors.

A door is a listening socket on an address that the cell may reach; whoever holds it outside accepts
there. Everything else is unreachable, because there is nothing else in the cell's network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from afield.sandbox import syscalls
from afield.sandbox.bwrap import GROUP, HOSTS, IMAGE, PASSWD, SCRATCH, STAGE, sensitive
from afield.sandbox.messages import Address
from afield.settings.runtimes import ResourceLimits

USER = 1000
INODES_PER_MB = 128
BACKLOG = 128
# What the kernel counts for a user, who is the same one in all cells: no cell may have all of it.
TERMINALS = 64
COUNTED = {"max_inotify_instances": 16, "max_inotify_watches": 16_384, "max_user_namespaces": 0}
QUIET = syscalls.NO_SUID | syscalls.NO_DEV


def enter() -> None:
    """New namespaces of every kind; the next process that is forked is the first one in them."""
    syscalls.unshare(syscalls.ALL_NEW)
    syscalls.map_ids(USER, USER)


def furnish(limits: ResourceLimits, mounted: Sequence[str], hosts: str, *, image: bool) -> None:
    syscalls.mount("none", "/", flags=syscalls.REC | syscalls.PRIVATE)
    size = (
        ""
        if limits.disk_mb is None
        else f",size={limits.disk_mb}m,nr_inodes={limits.disk_mb * INODES_PER_MB}"
    )
    syscalls.mount("cell", STAGE, "tmpfs", QUIET, f"mode=755{size}")
    root = _own_root(mounted) if image else ""
    # One file system for all of them, so that the limit is one as well.
    for number, place in enumerate((*SCRATCH, "/dev/shm")):
        made = f"{STAGE}/{number}"
        Path(made).mkdir()
        Path(made).chmod(0o1777)
        if not image:
            _keep_visible(place, made, mounted)
        _mount_point(f"{root}{place}")
        syscalls.bind(made, f"{root}{place}")
    syscalls.mount(
        "devpts",
        f"{root}/dev/pts",
        "devpts",
        syscalls.NO_SUID | syscalls.NO_EXEC,
        f"newinstance,ptmxmode=0666,max={TERMINALS}",
    )
    _fresh_proc(f"{root}/proc")
    Path(f"{STAGE}/hosts").write_text(hosts)
    syscalls.bind(f"{STAGE}/hosts", f"{root}/etc/hosts", read_only=True)
    if image:
        syscalls.change_root(root)
    else:
        syscalls.call("umount2", STAGE.encode(), syscalls.DETACH)
    socket.sethostname("cell")


def hosts_and_doors(doors: Sequence[Address]) -> tuple[str, list[socket.socket]]:
    """What /etc/hosts says, and a listening socket for each door, in order."""
    syscalls.loopback_up()
    hosts, listening = HOSTS, []
    for number, (host, port) in enumerate(doors):
        address = _address(host, number)
        if address != host:
            hosts += f"{address} {host}\n"
        syscalls.add_address(address, number)
        listening.append(listener(address, port))
    return hosts, listening


def listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen(BACKLOG)
    return made


def keep_only(kept: set[int]) -> None:
    """Of the descriptors above stderr. Plain files are opened anew to be read, the rest is emptied:

    an object that believes it owns a descriptor must not close another one with its number.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd <= 2 or fd == nothing or fd in kept:
            continue
        try:
            mode = os.fstat(fd).st_mode
            anew = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) if stat.S_ISREG(mode) else nothing
        except OSError:
            continue  # The listing's own, which is closed by now; or one that cannot be opened again.
        os.dup2(anew, fd, inheritable=False)
        if anew != nothing:
            os.close(anew)
    os.close(nothing)


def _address(host: str, number: int) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return f"127.66.{number // 250}.{number % 250 + 1}"


def _keep_visible(place: str, made: str, mounted: Sequence[str]) -> None:
    """What is mounted beneath a place must not vanish under the fresh one."""
    for path in mounted:
        if not Path(path).is_relative_to(place):
            continue
        inner = Path(made) / Path(path).relative_to(place)
        inner.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            inner.mkdir(exist_ok=True)
        else:
            inner.touch()
        syscalls.bind(path, str(inner))


def _fresh_proc(place: str) -> None:
    syscalls.mount("proc", place, "proc", QUIET | syscalls.NO_EXEC)
    for name, most in COUNTED.items():
        with contextlib.suppress(FileNotFoundError):
            Path(place, "sys/user", name).write_text(str(most))
    covered, unreadable = sensitive(Path(place))
    for name in covered:
        syscalls.mount(f"{place}/{name}", f"{place}/{name}", flags=syscalls.BIND)
        flags = syscalls.BIND | syscalls.REMOUNT | syscalls.READ_ONLY | QUIET | syscalls.NO_EXEC
        syscalls.mount("none", f"{place}/{name}", flags=flags)
    for name in unreadable:
        syscalls.mount("/dev/null", f"{place}/{name}", flags=syscalls.BIND)


def _own_root(mounted: Sequence[str]) -> str:
    """The image, with a layer of this cell's own above it, and what was asked for beside it."""
    root, upper, work = f"{STAGE}/root", f"{STAGE}/upper", f"{STAGE}/layer"
    for path in (root, upper, work):
        Path(path).mkdir()
    layers = f"lowerdir={IMAGE},upperdir={upper},workdir={work},userxattr"
    syscalls.mount("overlay", root, "overlay", QUIET, layers)
    for name in ("dev", "proc", "etc"):
        _mount_point(f"{root}/{name}")
    syscalls.bind("/dev", f"{root}/dev")
    for name, content in (("passwd", PASSWD), ("group", GROUP), ("hosts", "")):
        if not Path(root, "etc", name).exists():
            Path(f"{root}/etc/{name}").write_text(content)
    for path in mounted:
        if Path(path).is_dir():
            _mount_point(f"{root}{path}")
        else:
            _mount_point(f"{root}{Path(path).parent}")
            Path(f"{root}{path}").touch()
        syscalls.bind(path, f"{root}{path}")
    return root


def _mount_point(path: str) -> None:
    # A link in an image must not lead out of it.
    place = Path(path)
    if place.is_symlink():
        place.unlink()
    place.mkdir(parents=True, exist_ok=True)
